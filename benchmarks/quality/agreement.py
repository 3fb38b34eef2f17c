"""Predictions with compressed caches on any text: agreement with, and divergence from, the full cache.

    python -m benchmarks.quality.agreement
    python -m benchmarks.quality.agreement --model DIR --text FILE
    python -m benchmarks.quality.agreement --model DIR --dataset FILE

Every engine is given the same texts token by token, as if it had generated them (teacher forcing). So all engines
predict the same tokens after the same text, and differ only in the KV pairs that their caches still hold. At every
position of the output the script compares the most likely token with the full cache's, and computes the
Kullback-Leibler divergence KL(full || compressed) in nats. No task is needed, and a loss shows long before answers are
wrong.

The texts are problems of the reasoner with their right workings; or pieces of a file; or the questions of a dataset
with the answers that the full cache gives. Kara runs first. The KV pairs that it holds at the end of a text are the
budget of the other methods, as in benchmarks/paper/figure_5.py. These drop nothing until a cache exceeds its budget,
while Kara compresses from its first window on. So methods have equal memory only at the end of a text, and its last
quarter tells most.

The figures go to agreement.json and a plot to agreement.png.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import NormalDist, stdev
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from msgspec import Struct

from benchmarks.common import accuracy, command_line, compressions, intervals, machine, report
from benchmarks.common.kv_caches import check_kv_cache, kv_cache_options
from benchmarks.common.questions import QuestionSource, ReasonerQuestions
from benchmarks.common.teacher_forcing import Observe, feed
from benchmarks.common.trials import FULL, REASONER, Trial
from benchmarks.reasoner.tasks import DEFAULT_TASK, TASKS
from kvllm import LLM, SamplingParams
from kvllm.compression.specs import SPECS
from kvllm.config import require
from kvllm.tokenizer import load_tokenizer

METHODS = tuple(SPECS)
DEFAULT = tuple(  # the others need a file beside the model, or read a text again whenever it is cut
    name for name, spec in SPECS.items() if not spec.reads_file and not spec.repeats
)
BY_WINDOWS = tuple(name for name, spec in SPECS.items() if name.startswith("kara") or spec.refusal("threshold"))
ALL = "all KV pairs"
PARTS = 4
"""Equal parts of a text, each with figures of its own."""
BINS = 32
"""Points of a line in the plot."""

# Texts


class Text(NamedTuple):
    """Token ids: a prompt, and the output that is given token by token."""

    prompt: list[int]
    output: list[int]


def make_texts(args: argparse.Namespace) -> list[Text]:
    if args.text is not None:
        return read_texts(args)
    source = QuestionSource(
        task=args.task,
        sizes=tuple(args.sizes),
        count=args.texts,
        seed=args.seed,
        dataset=args.dataset,
        limit=args.max_tokens,
    )
    questions = source.load()
    if isinstance(questions, ReasonerQuestions):
        encode = load_tokenizer(accuracy.path_of(args)).encode
        return [Text(encode(p.prompt), encode(p.working, add_special_tokens=False)) for p in questions.problems]
    llm = LLM(accuracy.path_of(args), dtype=accuracy.dtype_of(args), max_num_seqs=args.max_num_seqs)
    params = [SamplingParams(temperature=0, max_tokens=tokens) for tokens in questions.max_tokens]
    outputs = llm.chat(questions.prompts, params, use_tqdm=sys.stderr.isatty())
    return [Text(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs if output.error is None]


def read_texts(args: argparse.Namespace) -> list[Text]:
    """Consecutive pieces of a file."""
    path = Path(args.text)
    require(path.is_file(), "--text", args.text, "an existing file")
    token_ids = load_tokenizer(accuracy.path_of(args)).encode(path.read_text())
    length, start = args.length, args.prompt_tokens
    pieces = [token_ids[i : i + length] for i in range(0, len(token_ids) - length + 1, length)]
    require(bool(pieces), "--length", length, f"at most the file's {len(token_ids)} tokens")
    return [Text(piece[:start], piece[start:]) for piece in pieces[: args.texts]]


# Predictions


class Reference:
    """The full cache's logits at every position of every text, in a file, because a large vocabulary has many."""

    def __init__(self, path: Path, texts: Sequence[Text], vocab_size: int) -> None:
        lengths = [len(text.output) for text in texts]
        self.starts = np.cumsum([0, *lengths])
        self.logits = np.lib.format.open_memmap(path, "w+", np.float32, (sum(lengths), vocab_size))

    def rows(self, sequences: list[int], counts: list[int]) -> np.ndarray:
        return self.starts[sequences] + counts

    def store(self, logits: torch.Tensor, sequences: list[int], counts: list[int]) -> None:
        self.logits[self.rows(sequences, counts)] = logits.cpu().numpy()


class Comparison:
    """A comparison of predictions with those of a reference, position by position."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.agrees = np.zeros(len(reference.logits), dtype=bool)
        self.divergence = np.full(len(reference.logits), np.nan)

    def __call__(self, logits: torch.Tensor, sequences: list[int], counts: list[int]) -> None:
        rows = self.reference.rows(sequences, counts)
        full = torch.from_numpy(self.reference.logits[rows]).to(logits.device)
        self.agrees[rows] = (full.argmax(-1) == logits.argmax(-1)).cpu().numpy()
        expected, found = full.double().log_softmax(-1), logits.double().log_softmax(-1)
        divergence = F.kl_div(found, expected, reduction="none", log_target=True).sum(-1)
        self.divergence[rows] = divergence.cpu().numpy()


class Outcome(Struct, kw_only=True):
    """The result of a method.

    agreement, divergence: by text and position of its output. cached_lengths, logical_lengths: KV pairs in the cache,
    and KV pairs computed, at the end of each text.
    """

    agreement: list[list[float]]
    divergence: list[list[float]]
    cached_lengths: list[int]
    logical_lengths: list[int]
    windows: int
    preemptions: int

    @property
    def kept(self) -> float:
        """KV pairs held at the end, as a share of those that were computed."""
        return sum(self.cached_lengths) / sum(self.logical_lengths)


def make_engine(args: argparse.Namespace, trial: Trial, texts: Sequence[Text]) -> LLM:
    return LLM(
        accuracy.path_of(args),
        dtype=accuracy.dtype_of(args),
        block_size=trial.block_size,
        **kv_cache_options(trial.kv_cache_dtype)._asdict(),
        max_num_seqs=min(args.max_num_seqs, len(texts)),
        max_model_len=max(len(text.prompt) + len(text.output) for text in texts),
        compression=trial.compression,
    )


def predict(llm: LLM, trial: Trial, texts: Sequence[Text], observe: Observe) -> list[int]:
    """Let the engine predict every token of the outputs. Returns the KV pairs evicted from each text."""
    budgets = trial.budgets or [None] * len(texts)
    params = [
        SamplingParams(temperature=0, max_tokens=len(text.output), ignore_eos=True, budget_tokens=budget)
        for text, budget in zip(texts, budgets, strict=True)
    ]
    prompts, forced = [text.prompt for text in texts], [text.output for text in texts]
    return [output.metrics.evicted_entries for output in feed(llm, prompts, forced, params, observe, trial.name)]


def refer(args: argparse.Namespace, texts: Sequence[Text], path: Path) -> Reference:
    """Let the full cache predict."""
    trial = Trial(name=FULL)
    llm = make_engine(args, trial, texts)
    reference = Reference(path, texts, llm.model_config.vocab_size)
    predict(llm, trial, texts, reference.store)
    return reference


def compare(args: argparse.Namespace, trial: Trial, texts: Sequence[Text], reference: Reference) -> Outcome:
    """Let a method predict."""
    llm, comparison = make_engine(args, trial, texts), Comparison(reference)
    evicted = predict(llm, trial, texts, comparison)
    lengths = [len(text.prompt) + len(text.output) - 1 for text in texts]  # the last token is never stored
    borders = reference.starts[1:-1]
    return Outcome(
        agreement=[part.astype(float).tolist() for part in np.split(comparison.agrees, borders)],
        divergence=[part.tolist() for part in np.split(comparison.divergence, borders)],
        cached_lengths=[n - dropped for n, dropped in zip(lengths, evicted, strict=True)],
        logical_lengths=lengths,
        windows=llm.stats().windows_compressed,
        preemptions=llm.stats().preemptions,
    )


def trial_of(args: argparse.Namespace, method: str, budgets: list[int] | None, texts: Sequence[Text]) -> Trial:
    if method == ALL:
        return Trial(name=ALL, kv_cache_dtype=args.kv_cache_dtype)
    if method in BY_WINDOWS:
        compression = compressions.kara(args.retention, window=args.window, buffer=args.buffer, method=method)
        return Trial(name=method, compression=compression, kv_cache_dtype=args.kv_cache_dtype)
    assert budgets is not None
    recent = compressions.recent_of(method, args.recent, budgets, (len(text.prompt) for text in texts))
    compression = compressions.threshold(method, recent=recent, gap=args.gap)
    return Trial(name=method, compression=compression, budgets=budgets, kv_cache_dtype=args.kv_cache_dtype)


# Figures


def mean_of(values: Sequence[Sequence[float]]) -> float:
    """The mean over all positions."""
    return float(np.mean(np.concatenate(values)))


def half_width(values: Sequence[Sequence[float]]) -> float:
    """Half the confidence interval of a mean over positions. Positions of a text depend on each other; texts do not."""
    means = [float(np.mean(of_text)) for of_text in values]
    if len(means) < 2:
        return float("nan")
    return NormalDist().inv_cdf((1 + intervals.CONFIDENCE) / 2) * stdev(means) / sqrt(len(means))


def parts_of(values: Sequence[Sequence[float]], parts: int) -> list[float]:
    """Means over equal parts of the outputs, from beginning to end."""
    bounds = [[len(of_text) * i // parts for i in range(parts + 1)] for of_text in values]
    return [
        mean_of([of_text[b[i] : b[i + 1]] for of_text, b in zip(values, bounds, strict=True)]) for i in range(parts)
    ]


def line_of(values: Sequence[Sequence[float]]) -> report.Line:
    """Means over the texts that reach a position, for up to BINS stretches of the positions that half of them reach."""
    reached = sorted(len(of_text) for of_text in values)[len(values) // 2]
    width = -(-reached // BINS)
    starts = range(0, reached, width)
    return [start + width / 2 for start in starts], [
        mean_of([of_text[start : start + width] for of_text in values]) for start in starts
    ]


def show(outcomes: Mapping[str, Outcome]) -> str:
    def row(name: str, outcome: Outcome, values: list[list[float]], form: str, unit: float) -> list[str]:
        width, kept = format(unit * half_width(values), form), f"{100 * outcome.kept:.1f}"
        parts = [format(unit * part, form) for part in parts_of(values, PARTS)]
        return [name, kept, f"{format(unit * mean_of(values), form)} ± {width}", *parts]

    quarters = [f"{100 * i // PARTS}-\n{100 * (i + 1) // PARTS}%" for i in range(PARTS)]
    agreement = [row(name, outcome, outcome.agreement, ".1f", 100) for name, outcome in outcomes.items()]
    divergence = [row(name, outcome, outcome.divergence, ".4f", 1) for name, outcome in outcomes.items()]
    return "\n".join(
        [
            f"Positions whose most likely token is the full cache's, in %, with {intervals.CONFIDENCE:.0%} intervals",
            report.table(["", "KV pairs kept\nat the end, %", "all", *quarters], agreement),
            "",
            "KL(full || compressed), nats a position",
            report.table(["", "KV pairs kept\nat the end, %", "all", *quarters], divergence),
        ]
    )


def content(trial: Trial, outcome: Outcome) -> dict[str, Any]:
    def figures(values: list[list[float]]) -> dict[str, Any]:
        return {
            "mean": mean_of(values),
            "half_width": half_width(values),
            "parts": parts_of(values, PARTS),
            "over_positions": line_of(values),
            "by_text": [float(np.mean(of_text)) for of_text in values],
        }

    return {
        "compression": msgspec.to_builtins(trial.compression),
        "agreement": figures(outcome.agreement),
        "divergence": figures(outcome.divergence),
        "kept": outcome.kept,
        "cached_lengths": outcome.cached_lengths,
        "windows": outcome.windows,
        "preemptions": outcome.preemptions,
    }


def plot(path: Path, title: str, outcomes: Mapping[str, Outcome]) -> None:
    differs = {}
    for name, outcome in outcomes.items():
        x, y = line_of(outcome.agreement)
        differs[name] = (x, [100 * (1 - value) for value in y])
    panels = {
        "KL(full || compressed), nats": {name: line_of(outcome.divergence) for name, outcome in outcomes.items()},
        "another most likely token (%)": differs,
    }
    report.plot_lines(path, title, "tokens behind the prompt", panels)


# The script


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.quality.agreement", __doc__)
    add = parser.add_argument
    add("--model", default=REASONER, metavar="DIR", help="a checkpoint (default: the model of the package)")
    add("--dtype", help="default: float32 for the package's model, else the checkpoint's")
    add("--task", choices=TASKS, default=DEFAULT_TASK, help=f"task of the reasoner (default {DEFAULT_TASK})")
    low, high = accuracy.SIZES
    add(
        "--sizes",
        type=int,
        nargs=2,
        metavar=("MIN", "MAX"),
        default=(low, high),
        help=f"sizes of its problems (default {low} to {high})",
    )
    add("--seed", type=int, default=1, help="seed of its problems (default 1)")
    add("--text", metavar="FILE", help="a text instead of problems")
    add("--length", type=int, default=1024, help="tokens of a piece of --text (default 1024)")
    add(
        "--prompt-tokens",
        type=int,
        default=64,
        metavar="N",
        help="first tokens of a piece, which are its prompt (default 64)",
    )
    add("--dataset", metavar="FILE", help="JSONL with 'problem' and 'answer', instead of problems")
    add("--max-tokens", type=int, default=2048, help="most tokens of an answer to --dataset (default 2048)")
    add("--texts", type=int, default=32, metavar="N", help="most texts (default 32)")
    dtypes = "dtype of the compared caches; another than the full cache's has a line with all KV pairs (default: auto)"
    add("--kv-cache-dtype", default="auto", metavar="D", help=dtypes)
    add("--retention", default="0.3", help="share of a window that Kara keeps (default 0.3)")
    compressions.add_window_arguments(parser)
    compressions.add_baseline_arguments(parser)
    add(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=DEFAULT,
        metavar="M",
        help="kara and others (default: all but those that need statistics)",
    )
    add("--max-num-seqs", type=int, default=32, metavar="N", help="most sequences at once (default 32)")
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    for field in ("texts", "max_num_seqs", "buffer"):
        require(getattr(args, field) >= 1, f"--{field.replace('_', '-')}", getattr(args, field), "at least 1")
    require(args.text is None or args.dataset is None, "--text", args.text, "not together with --dataset")
    fits = 1 <= args.prompt_tokens < args.length
    require(fits, "--prompt-tokens", args.prompt_tokens, f"at least 1 and less than --length {args.length}")
    check_kv_cache("--kv-cache-dtype", args.kv_cache_dtype)
    compressions.check_retention("--retention", args.retention)
    command_line.require_unique("--methods", args.methods)
    require(args.methods[0] == "kara", "--methods", " ".join(args.methods), "kara first: it sets the budgets")
    return args


def run_agreement(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    texts = make_texts(args)
    provenance = machine.provenance("benchmarks.quality.agreement", arguments)
    prompt, output = (sum(len(text[i]) for text in texts) / len(texts) for i in (0, 1))
    print(machine.describe(provenance["machine"]))
    print(f"{len(texts)} texts: on average {prompt:.0f} tokens of prompt, {output:.0f} that are predicted", flush=True)
    written: dict[str, Any] = {**provenance, "texts": len(texts), "prompt_tokens": prompt, "output_tokens": output}
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as directory:
        reference = refer(args, texts, Path(directory) / "logits.npy")
        for name in args.methods if args.kv_cache_dtype == "auto" else (ALL, *args.methods):
            kara = outcomes.get("kara")
            trial = trial_of(args, name, kara.cached_lengths if kara else None, texts)
            outcomes[name] = compare(args, trial, texts, reference)
            print(f"  {name}: KL {mean_of(outcomes[name].divergence):.4f}", flush=True)
            written.setdefault("methods", {})[name] = content(trial, outcomes[name])
            report.write_json(args.output / "agreement.json", written)
    print(f"\n{show(outcomes)}")
    plot(args.output / "agreement.png", "Predictions with compressed caches against the full one", outcomes)
    print(f"Written: {args.output / 'agreement.json'}, {args.output / 'agreement.png'}")


def main() -> None:
    command_line.run_script(run_agreement)


if __name__ == "__main__":
    main()
