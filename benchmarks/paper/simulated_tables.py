"""Throughput and latency at the scale of the Kara paper's serving experiments (tables 2 and 3), simulated.

    python -m benchmarks.paper.simulated_tables --model-config config.json

DeepSeek-R1-Distill-Llama-8B on four RTX 5090, tensor parallel 4, blocks of 256, at most 8192 generated tokens; Kara
compresses at most 30 windows of 3 blocks every 128 steps (paper, appendix B.1). The lengths of the answers, the number
of requests and the concurrency are assumptions: answers are uniform up to 8192 tokens. So the differences between rows
mean more than the absolute figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common import command_line, machine, report
from benchmarks.common.kara_paper import PAPER, PUBLISHED
from kvllm.config import CompressionConfig, EngineConfig
from kvllm.entrypoints.simulate import read_model_config
from kvllm.simulation.cost import CostModel
from kvllm.simulation.hardware import load_hardware
from kvllm.simulation.simulate import Outcome, simulate
from kvllm.simulation.workload import SyntheticWorkload, draw

VARIANTS: dict[str, CompressionConfig | None] = {
    "full cache": None,
    "SnapKV, 1280 to 1025": CompressionConfig(
        method="snapkv", policy="threshold", threshold_tokens=1280, budget_tokens=1025, query_window=32
    ),
    "Kara, 257 of 768": CompressionConfig(method="kara", retain_tokens=257),
    "Kara, 1 block of 3": CompressionConfig(method="kara"),
    "Kara, 1 of 3, pressure": CompressionConfig(method="kara", policy="pressure"),
    "kara_sharp, 1 of 3": CompressionConfig(method="kara_sharp"),
    "kara_sharp, 1 of 3, pressure": CompressionConfig(method="kara_sharp", policy="pressure"),
}
MAX_OUTPUT = 8192
PROMPT = 128


def run(args: argparse.Namespace, cost: CostModel, num_seqs: int, compression: CompressionConfig | None) -> Outcome:
    workload = SyntheticWorkload(
        num_requests=args.requests, input_len=PROMPT, output_len=MAX_OUTPUT // 2, range_ratio=0.999
    )
    lengths = draw(workload)
    scored = compression is not None and compression.observes_scores
    config = EngineConfig(
        num_blocks=cost.pool_blocks(256, args.gpu_memory_utilization, scored=scored),
        max_model_len=2 * PROMPT + MAX_OUTPUT,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        compression=compression,
        async_scheduling=args.async_scheduling,
    )
    return simulate(config, cost, lengths, [0.0] * len(lengths))


def throughput_rows(runs: dict[str, Outcome]) -> list[list[str]]:
    full = runs["full cache"]
    return [
        [
            name,
            f"{run.output_tokens_per_s:,.0f}",
            f"{run.output_tokens_per_s / full.output_tokens_per_s - 1:+.1%}",
            PUBLISHED.get(name, ""),
            f"{run.mean_concurrency:.0f}",
            f"{run.preemptions:,}",
            f"{run.windows_compressed:,}",
        ]
        for name, run in runs.items()
    ]


def latency_rows(runs: dict[str, Outcome]) -> list[list[str]]:
    return [
        [
            name,
            f"{run.mean_latency:,.1f}",
            f"{run.mean_first_token:,.1f}",
            f"{1e3 * (run.mean_latency - run.mean_first_token) * run.requests / run.output_tokens:.1f}",
            *(f"{1e3 * seconds:,.1f}" for seconds in msgspec.structs.astuple(run.inter_token)),
            *(f"{seconds:,.1f}" for seconds in msgspec.to_builtins(run.phases).values()),
        ]
        for name, run in runs.items()
    ]


def show(num_seqs: int, runs: dict[str, Outcome]) -> str:
    throughput = ["throughput", "output\ntokens/s", "gain", "paper", "mean con-\ncurrency", "preemp-\ntions", "windows"]
    latency = ["latency", "mean, s", "to first\ntoken, s", "ms a\ntoken", "p50 be-\ntween two", "p99", "max"]
    latency += ["decode, s", "prefill, s"]
    latency += ["recompute, s", "score, s", "compact, s"]
    return (
        f"At most {num_seqs} sequences at once\n\n"
        f"{report.table(throughput, throughput_rows(runs))}\n\n{report.table(latency, latency_rows(runs))}\n"
    )


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
    if args.output:
        provenance = machine.provenance("benchmarks.paper.simulated_tables", arguments)
        report.write_json(args.output, {**provenance, "hardware": msgspec.to_builtins(hardware), "runs": content})
        print(f"Written: {args.output}")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.paper.simulated_tables", __doc__)
    add = parser.add_argument
    add("--model-config", type=Path, required=True, metavar="FILE", help="config.json of DeepSeek-R1-Distill-Llama-8B")
    add("--hardware", default="rtx5090x4", metavar="FILE_OR_NAME")
    add("--requests", type=int, default=500)
    add("--max-num-seqs", type=int, nargs="+", default=[128, 256, 512])
    add("--max-num-batched-tokens", type=int, default=8192)
    add("--gpu-memory-utilization", type=float, default=0.9)
    add(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="plan a step while the one before it runs (default)",
    )
    add("--output", type=Path, metavar="FILE", help="write all figures as JSON")
    return parser.parse_args(arguments)


def main() -> None:
    command_line.run_script(tables)


if __name__ == "__main__":
    main()
