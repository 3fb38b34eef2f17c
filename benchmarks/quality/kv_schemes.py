"""Predictions of a model whose keys and values are rounded, for schemes that the engine has and for others.

    python -m benchmarks.quality.kv_schemes
    python -m benchmarks.quality.kv_schemes --model DIR --text FILE

transformers reads texts with attention over all KV pairs, each of them rounded: with the formulas of `int8`,
`int8_int4`, `int6_int4`, `int4` and `int4_hadamard`, in groups of channels, with the largest channels in 8 bits, and
with a residual of recent tokens as they are. The script compares predictions at every position of the output with those
of the model as it is: KL(full || rounded) in nats, the most likely token, and texts that have another one anywhere. So
it tells which scheme a model needs, before anybody writes kernels for it.

Texts are as for `benchmarks.reasoner.calibrate`. Memory is that of the attention of a text in one layer. The figures go
to kv_schemes.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice

import torch
from torch.nn.functional import kl_div
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import eager_mask

from benchmarks.common import command_line, machine, report, texts
from benchmarks.common.kv_schemes import Scheme, attend, schemes_of
from kvllm.config import require
from kvllm.models.config import load_model_config

ROUNDED = "rounded"
SHORTEST = 4
"""Texts have more tokens."""


@dataclass
class Figures:
    """share: of the bytes of a cache in bfloat16. divergence: summed over positions. other: positions with another most
    likely token, and the texts that have any."""

    share: float
    positions: int = 0
    divergence: float = 0.0
    other: int = 0
    texts: int = 0

    def add(self, full: torch.Tensor, found: torch.Tensor) -> None:
        """Log probabilities of the positions of a text: `[T, vocab_size]` each."""
        other = int((full.argmax(dim=-1) != found.argmax(dim=-1)).sum())
        self.positions += len(full)
        self.divergence += kl_div(found, full, reduction="sum", log_target=True).item()
        self.other += other
        self.texts += other > 0

    def cells(self) -> list[str]:
        return [f"{self.share:.0%}", f"{self.divergence / self.positions:.1e}", f"{self.other / self.positions:.2%}"]


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.quality.kv_schemes", __doc__)
    add = parser.add_argument
    texts.add_arguments(parser)
    add("--texts", type=int, default=16, metavar="N", help="most texts (default 16)")
    add("--threads", type=int, metavar="N", help="default: those of torch")
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    texts.check_arguments(args, SHORTEST)
    require(args.texts >= 1, "--texts", args.texts, "at least 1")
    require(args.threads is None or args.threads >= 1, "--threads", args.threads, "at least 1")
    return args


@torch.inference_mode()
def measure(args: argparse.Namespace, found: Sequence[texts.Text], schemes: dict[str, Scheme]) -> dict[str, Figures]:
    AttentionInterface.register(ROUNDED, attend)
    AttentionMaskInterface.register(ROUNDED, eager_mask)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation=ROUNDED).eval()
    head_dim = load_model_config(args.model).head_dim

    def predict(text: texts.Text, scheme: Scheme | None) -> torch.Tensor:
        logits = model(torch.tensor([text.token_ids]), use_cache=False, scheme=scheme).logits[0]
        return logits[max(text.num_prompt - 1, 0) :].double().log_softmax(dim=-1)

    figures = {name: Figures(scheme.share(head_dim)) for name, scheme in schemes.items()}
    for number, text in enumerate(found, start=1):
        full = predict(text, None)
        for name, scheme in schemes.items():
            figures[name].add(full, predict(text, scheme))
        print(f"{number} of {len(found)} texts", flush=True)
    return figures


def run_schemes(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    found = list(islice(texts.read_texts(args, SHORTEST), args.texts))
    provenance = machine.provenance("benchmarks.quality.kv_schemes", arguments)
    print(machine.describe(provenance["machine"]))
    figures = measure(args, found, schemes_of(load_model_config(args.model).head_dim))
    rows = [[name, *each.cells(), f"{each.texts} of {len(found)}"] for name, each in figures.items()]
    header = ["keys and values", "bytes", "KL, nats\na position", "another token\nmost likely", "texts with\nany such"]
    print(report.table(header, rows))
    schemes = {name: asdict(each) for name, each in figures.items()}
    written = args.output / "kv_schemes.json"
    report.write_json(written, {**provenance, "text": texts.describe(args), "texts": len(found), "schemes": schemes})
    print(f"Written: {written}")


def main() -> None:
    command_line.run_script(run_schemes)


if __name__ == "__main__":
    main()
