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
from collections.abc import Callable, Sequence
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


# By table: the title of a column, and the cell of a run.
Columns = dict[str, Callable[[Outcome], str]]
THROUGHPUT: Columns = {
    "mean con-\ncurrency": lambda run: f"{run.mean_concurrency:.0f}",
    "preemp-\ntions": lambda run: f"{run.preemptions:,}",
    "windows": lambda run: f"{run.windows_compressed:,}",
}
LATENCY: Columns = {
    "mean, s": lambda run: f"{run.mean_latency:,.1f}",
    "to first\ntoken, s": lambda run: f"{run.mean_first_token:,.1f}",
    "ms a\ntoken": lambda run: (
        f"{1e3 * (run.mean_latency - run.mean_first_token) * run.requests / run.output_tokens:.1f}"
    ),
    "p50 be-\ntween two": lambda run: f"{1e3 * msgspec.structs.astuple(run.inter_token)[0]:,.1f}",
    "p99": lambda run: f"{1e3 * msgspec.structs.astuple(run.inter_token)[1]:,.1f}",
    "max": lambda run: f"{1e3 * msgspec.structs.astuple(run.inter_token)[2]:,.1f}",
    "decode, s": lambda run: f"{run.phases.decode:,.1f}",
    "prefill, s": lambda run: f"{run.phases.prefill:,.1f}",
    "recompute, s": lambda run: f"{run.phases.recompute:,.1f}",
    "score, s": lambda run: f"{run.phases.score:,.1f}",
    "compact, s": lambda run: f"{run.phases.compact:,.1f}",
    "recall, s": lambda run: f"{run.phases.recall:,.1f}",
    "transfer, s": lambda run: f"{run.phases.transfer:,.1f}",
}
HOST: Columns = {
    "tokens com-\nputed again": lambda run: f"{run.tokens_recomputed:,}",
    "swapped\nout": lambda run: f"{run.swapped_out:,}",
    "stored,\nGiB": lambda run: f"{run.stored_bytes / report.GIB:,.1f}",
    "loaded,\nGiB": lambda run: f"{run.loaded_bytes / report.GIB:,.1f}",
    "exchanged,\nGiB": lambda run: f"{run.recalled_bytes / report.GIB:,.1f}",
    "pairs with-\nout room": lambda run: f"{run.lost_pairs:,}",
    "host memory,\npeak, GiB": lambda run: f"{run.host_bytes / report.GIB:,.1f}",
}


def show(num_seqs: int, runs: dict[str, Outcome]) -> str:
    full = runs["full cache"].output_tokens_per_s
    rates = [
        [name, f"{run.output_tokens_per_s:,.0f}", f"{run.output_tokens_per_s / full - 1:+.1%}", PUBLISHED.get(name, "")]
        for name, run in runs.items()
    ]
    names = [[name] for name in runs]
    tables = [table(["throughput", "output\ntokens/s", "gain", "paper"], rates, THROUGHPUT, runs)]
    tables.append(table(["latency"], names, LATENCY, runs))
    if any(run.host_bytes for run in runs.values()):
        tables.append(table(["tiers"], names, HOST, runs))
    return "\n\n".join([f"At most {num_seqs} sequences at once", *tables]) + "\n"


def table(header: list[str], begins: list[list[str]], columns: Columns, runs: dict[str, Outcome]) -> str:
    """Rows that begin with some cells, and have one for each column."""
    cells = [[cell(run) for cell in columns.values()] for run in runs.values()]
    rows = [[*begin, *of_run] for begin, of_run in zip(begins, cells, strict=True)]
    return report.table([*header, *columns], rows)


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
