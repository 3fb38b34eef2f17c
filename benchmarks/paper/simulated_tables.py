"""Throughput and latency at the scale of the Kara paper's serving experiments (tables 2 and 3), simulated.

    python -m benchmarks.paper.simulated_tables --model-config config.json

DeepSeek-R1-Distill-Llama-8B on four RTX 5090, tensor parallel 4, blocks of 256, at most 8192 generated tokens; Kara
compresses at most 30 windows of 3 blocks every 128 steps (paper, appendix B.1). The lengths of the answers, the number
of requests and the concurrency are assumptions: answers are uniform up to 8192 tokens. So the differences between rows
mean more than the absolute figures. The figures go to simulated_tables.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common import command_line, machine, report
from benchmarks.paper.settings import GAIN, PAPER, WINDOWS, snapkv
from kvllm.config import CompressionConfig, EngineConfig
from kvllm.entrypoints.simulate import read_model_config
from kvllm.simulation.cost import CostModel
from kvllm.simulation.hardware import load_hardware
from kvllm.simulation.simulate import Outcome, simulate
from kvllm.simulation.workload import SyntheticWorkload, draw

VARIANTS = {
    "full cache": None,
    "SnapKV, 1280 to 1025": snapkv(256),
    "Kara, 257 of 768": CompressionConfig(method="kara", **WINDOWS, retain_tokens=257),
    "Kara, 1 block of 3": CompressionConfig(method="kara", **WINDOWS),
    "Kara, 1 of 3, pressure": CompressionConfig(method="kara", **WINDOWS | {"policy": "pressure"}),
    "mean_attention, 1 of 3": CompressionConfig(method="mean_attention", **WINDOWS),
    "mean_attention, 1 of 3, pressure": CompressionConfig(method="mean_attention", **WINDOWS | {"policy": "pressure"}),
}
MAX_OUTPUT, PROMPT = 8192, 128


def run(args: argparse.Namespace, cost: CostModel, num_seqs: int, compression: CompressionConfig | None) -> Outcome:
    workload = SyntheticWorkload(
        num_requests=args.requests, input_len=PROMPT, output_len=MAX_OUTPUT // 2, range_ratio=0.999
    )
    lengths = draw(workload)
    scored = compression is not None and compression.spec.reselects
    config = EngineConfig(
        num_blocks=cost.pool_blocks(256, args.gpu_memory_utilization, scored=scored),
        max_model_len=2 * PROMPT + MAX_OUTPUT,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=8192,
        compression=compression,
        async_scheduling=True,
    )
    return simulate(config, cost, lengths, [0.0] * len(lengths))


COLUMNS: dict[str, Callable[[Outcome], str]] = {
    "output\ntokens/s": lambda run: f"{run.output_tokens_per_s:,.0f}",
    "mean con-\ncurrency": lambda run: f"{run.mean_concurrency:.0f}",
    "preemp-\ntions": lambda run: f"{run.preemptions:,}",
    "tokens com-\nputed again": lambda run: f"{run.tokens_recomputed:,}",
    "latency,\nmean, s": lambda run: f"{run.mean_latency:,.1f}",
}


def show(num_seqs: int, runs: dict[str, Outcome]) -> str:
    full = runs["full cache"].output_tokens_per_s
    rows = []
    for name, run in runs.items():
        published = GAIN if name == "Kara, 257 of 768" else ""
        cells = [cell(run) for cell in COLUMNS.values()]
        rows.append([name, f"{run.output_tokens_per_s / full - 1:+.1%}", published, *cells])
    return f"At most {num_seqs} sequences at once\n\n{report.table(['', 'gain', 'paper', *COLUMNS], rows)}\n"


def tables(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    model, hardware = read_model_config(args.model_config), load_hardware(args.hardware)
    cost = CostModel(hardware, model, "bfloat16", min(4, hardware.devices))
    blocks = cost.pool_blocks(256, args.gpu_memory_utilization)
    print(f"{args.model_config.stem} on {hardware.name}, tensor parallel {cost.devices}, {blocks:,} blocks of 256")
    print(f"Published: {PAPER}\n")
    content: dict[str, Any] = {}
    for num_seqs in args.max_num_seqs:
        runs = {name: run(args, cost, num_seqs, compression) for name, compression in VARIANTS.items()}
        print(show(num_seqs, runs), flush=True)
        content[str(num_seqs)] = msgspec.to_builtins(runs)
    provenance = machine.announce("benchmarks.paper.simulated_tables", arguments)
    content = {**provenance, "hardware": msgspec.to_builtins(hardware), "runs": content}
    report.write_json(args.output / "simulated_tables.json", content)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.paper.simulated_tables", __doc__)
    add = parser.add_argument
    add("--model-config", type=Path, required=True, metavar="FILE", help="config.json of DeepSeek-R1-Distill-Llama-8B")
    add("--hardware", default="rtx5090x4", metavar="FILE_OR_NAME")
    add("--requests", type=int, default=500)
    add("--max-num-seqs", type=int, nargs="+", default=[128, 256, 512])
    add("--gpu-memory-utilization", type=float, default=0.9)
    command_line.add_output_argument(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    command_line.run_script(tables)
