"""Throughput and latency at the scale of the Kara paper's serving experiments (tables 2 and 3), simulated.

    python -m benchmarks.paper.simulated_tables --model-config config.json
    python -m benchmarks.paper.simulated_tables --model-config config.json --tiers

DeepSeek-R1-Distill-Llama-8B on four RTX 5090, tensor parallel 4, blocks of 256, at most 8192 generated tokens; Kara
compresses at most 30 windows of 3 blocks every 128 steps (paper, appendix B.1). The lengths of the answers, the number
of requests and the concurrency are assumptions: answers are uniform up to 8192 tokens. So the differences between rows
mean more than the absolute figures.

`--tiers` has host memory below the pool instead: preempted sequences are computed again or swapped, and what kara_sharp
drops comes back. How many KV pairs do so is an assumption (`--recalled-pairs`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.common import command_line, machine, report
from benchmarks.common.kara_paper import PAPER, PUBLISHED, WINDOWS
from kvllm.config import CompressionConfig, EngineConfig
from kvllm.entrypoints.simulate import read_model_config, with_host_memory
from kvllm.simulation.cost import CostModel
from kvllm.simulation.hardware import load_hardware
from kvllm.simulation.simulate import Outcome, simulate
from kvllm.simulation.workload import SyntheticWorkload, draw


class Variant(NamedTuple):
    """swap: one of SWAP_MODES; None without host memory."""

    compression: CompressionConfig | None = None
    swap: str | None = None


def sharp(swap: str | None = None, **options: Any) -> Variant:
    return Variant(CompressionConfig(method="kara_sharp", **WINDOWS | options), swap)


VARIANTS = {
    "full cache": Variant(),
    "SnapKV, 1280 to 1025": Variant(
        CompressionConfig(
            method="snapkv", policy="threshold", threshold_tokens=1280, budget_tokens=1025, query_window=32, buffer=32
        )
    ),
    "Kara, 257 of 768": Variant(CompressionConfig(method="kara", **WINDOWS, retain_tokens=257)),
    "Kara, 1 block of 3": Variant(CompressionConfig(method="kara", **WINDOWS)),
    "Kara, 1 of 3, pressure": Variant(CompressionConfig(method="kara", policy="pressure", window_blocks=3, buffer=32)),
    "kara_sharp, 1 of 3": sharp(),
    "kara_sharp, 1 of 3, pressure": sharp(policy="pressure"),
}
TIERS = {
    "full cache": Variant(swap="never"),
    "full cache, swap always": Variant(swap="always"),
    "full cache, swap auto": Variant(swap="auto"),
    "kara_sharp, swap never": sharp("never"),
    "kara_sharp, swap always": sharp("always"),
    "kara_sharp, swap auto": sharp("auto"),
    "recall at each token": sharp("auto", recall_bound=0.3),
    "recall at each token, int4": sharp("auto", recall_bound=0.3, recall_dtype="int4"),
    "recall every 16, int4": sharp("auto", recall_period=16, recall_dtype="int4"),
    "recall every 64, int4": sharp("auto", recall_period=64, recall_dtype="int4"),
}
MAX_OUTPUT = 8192
PROMPT = 128


def run(args: argparse.Namespace, cost: CostModel, num_seqs: int, variant: Variant) -> Outcome:
    workload = SyntheticWorkload(
        num_requests=args.requests, input_len=PROMPT, output_len=MAX_OUTPUT // 2, range_ratio=0.999
    )
    lengths, compression = draw(workload), variant.compression
    scored = compression is not None and compression.observes_scores
    config = EngineConfig(
        num_blocks=cost.pool_blocks(256, args.gpu_memory_utilization, scored=scored),
        max_model_len=2 * PROMPT + MAX_OUTPUT,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        compression=compression,
        async_scheduling=args.async_scheduling,
        swap=variant.swap or "auto",
    )
    config = with_host_memory(config, cost, args.kv_offloading_size if variant.swap else None)
    return simulate(config, cost, lengths, [0.0] * len(lengths), recalled_pairs=args.recalled_pairs)


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


def tier_rows(runs: dict[str, Outcome]) -> list[list[str]]:
    return [
        [
            name,
            f"{run.tokens_recomputed:,}",
            f"{run.swapped_out:,}",
            *(f"{each / report.GIB:,.1f}" for each in (run.stored_bytes, run.loaded_bytes, run.recalled_bytes)),
            f"{run.lost_pairs:,}",
            f"{run.host_bytes / report.GIB:,.1f}",
        ]
        for name, run in runs.items()
    ]


def show(num_seqs: int, runs: dict[str, Outcome]) -> str:
    throughput = ["throughput", "output\ntokens/s", "gain", "paper", "mean con-\ncurrency", "preemp-\ntions", "windows"]
    latency = ["latency", "mean, s", "to first\ntoken, s", "ms a\ntoken", "p50 be-\ntween two", "p99", "max"]
    latency += ["decode, s", "prefill, s"]
    latency += ["recompute, s", "score, s", "compact, s", "recall, s", "transfer, s"]
    tiers = ["tiers", "tokens com-\nputed again", "swapped\nout", "stored,\nGiB", "loaded,\nGiB", "exchanged,\nGiB"]
    tiers += ["pairs with-\nout room", "host memory,\npeak, GiB"]
    tables = [report.table(throughput, throughput_rows(runs)), report.table(latency, latency_rows(runs))]
    if any(run.host_bytes for run in runs.values()):
        tables.append(report.table(tiers, tier_rows(runs)))
    return "\n\n".join([f"At most {num_seqs} sequences at once", *tables]) + "\n"


def tables(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    model, hardware = read_model_config(args.model_config), load_hardware(args.hardware)
    cost = CostModel(hardware, model, "bfloat16", min(4, hardware.devices))
    blocks = cost.pool_blocks(256, args.gpu_memory_utilization)
    print(f"{args.model_config.stem} on {hardware.name}, tensor parallel {cost.devices}, {blocks:,} blocks of 256")
    print(f"Published: {PAPER}\n")
    content: dict[str, Any] = {}
    for num_seqs in args.max_num_seqs:
        variants = TIERS if args.tiers else VARIANTS
        runs = {name: run(args, cost, num_seqs, variant) for name, variant in variants.items()}
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
    add("--tiers", action="store_true", help="host memory below the pool: swap and recall")
    size = "with --tiers: GiB of host memory (default 512)"
    add("--kv-offloading-size", type=float, default=512.0, metavar="GIB", help=size)
    pairs = "with --tiers: KV pairs that come back at a recall, in each layer and KV head (default 2)"
    add("--recalled-pairs", type=float, default=2.0, metavar="X", help=pairs)
    add("--output", type=Path, metavar="FILE", help="write all figures as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    command_line.run_script(tables)
