"""Predictions of a model with weights of few bits: perplexity, agreement with full weights, and divergence from them.

    python -m benchmarks.quality.quantization
    python -m benchmarks.quality.quantization --model DIR --text FILE

Engines with full weights, int8 and int4 are given the same texts token by token. At every position of the output, the
script takes the probability of the text's own token, compares the most likely token with that of full weights, and
computes the Kullback-Leibler divergence KL(full || quantized) in nats. The texts are problems of the reasoner with the
right workings, or pieces of a file.

The figures go to quantization.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.common import accuracy, command_line, machine, report
from benchmarks.common.questions import QuestionSource, ReasonerQuestions
from benchmarks.common.trials import REASONER
from benchmarks.reasoner.tasks import DEFAULT_TASK
from kvllm import LLM, SamplingParams
from kvllm.comparison.teacher_forcing import TeacherForcing
from kvllm.config import require
from kvllm.models.config import QUANTIZATIONS
from kvllm.tokenizer import load_tokenizer


class Text(NamedTuple):
    """Token ids: a prompt, and the output that is given token by token."""

    prompt: list[int]
    output: list[int]


def make_texts(args: argparse.Namespace) -> list[Text]:
    encode = load_tokenizer(accuracy.path_of(args)).encode
    if args.text is None:
        source = QuestionSource(task=DEFAULT_TASK, sizes=accuracy.SIZES, count=args.texts)
        problems = ReasonerQuestions(source).problems
        return [Text(encode(p.prompt), encode(p.working, add_special_tokens=False)) for p in problems]
    require(Path(args.text).is_file(), "--text", args.text, "an existing file")
    token_ids = encode(Path(args.text).read_text())
    starts = range(0, len(token_ids) - args.length + 1, args.length)
    require(len(starts) > 0, "--length", args.length, f"at most the file's {len(token_ids)} tokens")
    return [Text(token_ids[i : i + 1], token_ids[i + 1 : i + args.length]) for i in starts][: args.texts]


def log_probabilities(args: argparse.Namespace, quantization: str | None, text: Text) -> torch.Tensor:
    """Log probabilities of every token at every position of the output: float64 `[len(output), vocab_size]`."""
    llm = LLM(
        accuracy.path_of(args),
        dtype=args.dtype,
        quantization=quantization,
        max_num_seqs=1,
        max_model_len=len(text.prompt) + len(text.output),
    )
    rows: list[torch.Tensor] = []
    params = SamplingParams(temperature=0, max_tokens=len(text.output), ignore_eos=True)

    def keep(logits: torch.Tensor, *_: list[int]) -> None:
        rows.append(logits.double().log_softmax(-1))

    TeacherForcing(llm).feed([text.prompt], [text.output], [params], keep)
    return torch.cat(rows)


class Sums:
    """Sums over positions, and their number."""

    def __init__(self) -> None:
        self.positions, self.loss, self.agrees, self.divergence = 0, 0.0, 0, 0.0

    def add(self, text: Text, full: torch.Tensor, found: torch.Tensor) -> None:
        self.positions += len(text.output)
        self.loss -= found[range(len(text.output)), text.output].sum().item()
        self.agrees += int((full.argmax(-1) == found.argmax(-1)).sum())
        self.divergence += (full.exp() * (full - found)).sum().item()

    def figures(self) -> dict[str, float]:
        return {
            "perplexity": float(torch.tensor(self.loss / self.positions).exp()),
            "agreement": self.agrees / self.positions,
            "divergence": self.divergence / self.positions,
        }


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.quality.quantization", __doc__)
    add = parser.add_argument
    add("--model", default=REASONER, metavar="DIR", help="a checkpoint (default: the model of the package)")
    add("--dtype", default="auto", help="of activations and full weights (default: the checkpoint's)")
    add("--text", metavar="FILE", help="a text instead of problems")
    add("--length", type=int, default=256, help="tokens of a piece of --text (default 256)")
    add("--texts", type=int, default=16, metavar="N", help="most texts (default 16)")
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    require(args.texts >= 1, "--texts", args.texts, "at least 1")
    require(args.length >= 2, "--length", args.length, "at least 2")
    return args


def run_quantization(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    texts = make_texts(args)
    provenance = machine.provenance("benchmarks.quality.quantization", arguments)
    positions = sum(len(text.output) for text in texts)
    print(machine.describe(provenance["machine"]))
    print(f"{len(texts)} texts, {positions} tokens that are predicted", flush=True)
    sums: dict[str | None, Sums] = {name: Sums() for name in (None, *QUANTIZATIONS)}
    for text in texts:
        full = log_probabilities(args, None, text)
        for name, each in sums.items():
            each.add(text, full, full if name is None else log_probabilities(args, name, text))
    figures = {name or "full": each.figures() for name, each in sums.items()}
    rows = [
        [name, f"{f['perplexity']:.4f}", f"{f['agreement']:.2%}", f"{f['divergence']:.1e}"]
        for name, f in figures.items()
    ]
    print(report.table(["weights", "perplexity", "agreement", "KL, nats"], rows))
    written: dict[str, Any] = {**provenance, "texts": len(texts), "positions": positions, "weights": figures}
    report.write_json(args.output / "quantization.json", written)
    print(f"Written: {args.output / 'quantization.json'}")


def main() -> None:
    command_line.run_script(run_quantization)


if __name__ == "__main__":
    main()
