"""Throughput, preemptions and waiting over the watermarks of admission, simulated in a pool that is too small.

    python -m benchmarks.serving.admission --model-config config.json

The real scheduler serves requests whose cache takes several times the pool, without compression and with it, for every
low and high watermark. A low watermark is what admission leaves free; a high one is what must be free behind a
preemption before admission goes on ("-": it goes on at once).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import command_line, machine, report
from kvllm.config import CompressionConfig, EngineConfig
from kvllm.entrypoints.simulate import read_model_config
from kvllm.simulation.cost import CostModel
from kvllm.simulation.hardware import load_hardware
from kvllm.simulation.simulate import simulate
from kvllm.simulation.workload import SyntheticWorkload, draw

VARIANTS: dict[str, CompressionConfig | None] = {
    "full cache": None,
    "Kara, pressure": CompressionConfig(method="kara", policy="pressure", window_blocks=24, retain_blocks=8, buffer=64),
}
BLOCK_SIZE = 16


def run(args: argparse.Namespace, cost: CostModel, variant: str, low: float, high: float | None) -> dict[str, Any]:
    """first_token: mean seconds to a request's first token. recomputed: share of the computed tokens."""
    workload = SyntheticWorkload(
        num_requests=args.requests, input_len=args.input_len, output_len=args.output_len, range_ratio=0.5
    )
    lengths = draw(workload)
    config = EngineConfig(
        num_blocks=args.num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=2 * (args.input_len + args.output_len),
        max_num_seqs=args.max_num_seqs,
        watermark=low,
        high_watermark=high,
        compression=VARIANTS[variant],
    )
    outcome = simulate(config, cost, lengths, [0.0] * len(lengths))
    computed = outcome.prompt_tokens + outcome.output_tokens + outcome.tokens_recomputed
    return {
        "variant": variant,
        "low": low,
        "high": high,
        "output_tokens_per_s": outcome.output_tokens_per_s,
        "preemptions": outcome.preemptions,
        "recomputed": outcome.tokens_recomputed / computed,
        "mean_concurrency": outcome.mean_concurrency,
        "first_token": outcome.mean_first_token,
    }


def show(rows: Sequence[dict[str, Any]]) -> str:
    header = ["cache", "low", "high", "output\ntokens/s", "preemp-\ntions", "computed\nagain", "mean con-\ncurrency"]
    shapes = ("{}", "{:.0%}", "{:.0%}", "{:,.0f}", "{:,}", "{:.1%}", "{:.0f}", "{:.1f}")
    cells = [
        ["-" if value is None else shape.format(value) for shape, value in zip(shapes, row.values(), strict=True)]
        for row in rows
    ]
    return report.table([*header, "first\ntoken, s"], cells)


def sweep(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    cost = CostModel(load_hardware(args.hardware), read_model_config(args.model_config), "bfloat16")
    pairs = [(low, high) for high in (None, *args.high) for low in args.low if high is None or low <= high]
    rows = [run(args, cost, variant, low, high) for variant in VARIANTS for low, high in pairs]
    print(
        f"{args.model_config.stem} on {cost.hardware.name}: {args.requests} requests of {args.input_len} + "
        f"{args.output_len} tokens, {args.num_blocks:,} blocks of {BLOCK_SIZE}\n\n{show(rows)}"
    )
    provenance = machine.announce("benchmarks.serving.admission", arguments)
    report.write_json(args.output / "admission.json", {**provenance, "rows": rows})


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.serving.admission", __doc__)
    add = parser.add_argument
    add("--model-config", type=Path, required=True, metavar="FILE", help="config.json of a checkpoint")
    add("--hardware", default="h100", metavar="FILE_OR_NAME")
    add("--requests", type=int, default=300)
    add("--input-len", type=int, default=200)
    add("--output-len", type=int, default=1000)
    add("--num-blocks", type=int, default=2000)
    add("--max-num-seqs", type=int, default=128)
    add("--low", type=float, nargs="+", default=[0.0, 0.01, 0.05, 0.1, 0.2])
    add("--high", type=float, nargs="+", default=[0.1, 0.3])
    command_line.add_output_argument(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    command_line.run_script(sweep)
