"""Predict throughput, concurrency and what compression would buy on a machine, without it.

The real scheduler runs over the workload; a roofline of the machine says how long each step takes.

    kvllm simulate --model-config config.json --hardware h200 --workload AzureLLMInferenceTrace_conv.csv
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvllm.config import EngineConfig
from kvllm.entrypoints.engine_flags import parse_compression
from kvllm.errors import CheckpointError
from kvllm.models.config import ModelConfig, load_model_config
from kvllm.simulation.cost import CostModel, resolve_dtype
from kvllm.simulation.hardware import load_hardware, shipped_names
from kvllm.simulation.simulate import Outcome, simulate
from kvllm.simulation.workload import Workload, arrival_times, load_workload

SHOWN: tuple[tuple[str, str, Callable[[Outcome], float]], ...] = (
    ("requests/s", "{:.2f}", lambda run: run.requests_per_s),
    ("output tokens/s", "{:,.0f}", lambda run: run.output_tokens_per_s),
    ("time, s", "{:,.1f}", lambda run: run.seconds),
    ("mean latency, s", "{:.2f}", lambda run: run.mean_latency),
    ("mean time to first token, s", "{:.2f}", lambda run: run.mean_first_token),
    ("mean concurrency", "{:.1f}", lambda run: run.mean_concurrency),
    ("peak concurrency", "{:.0f}", lambda run: run.peak_concurrency),
    ("preemptions", "{:,.0f}", lambda run: run.preemptions),
    ("blocks in use, peak", "{:,.0f}", lambda run: run.peak_blocks),
    ("windows compressed", "{:,.0f}", lambda run: run.windows_compressed),
    ("blocks released", "{:,.0f}", lambda run: run.blocks_released),
    ("decode, s", "{:,.1f}", lambda run: run.phases.decode),
    ("prefill, s", "{:,.1f}", lambda run: run.phases.prefill),
    ("recompute queries, s", "{:,.1f}", lambda run: run.phases.recompute),
    ("score, s", "{:,.1f}", lambda run: run.phases.score),
    ("compact, s", "{:,.1f}", lambda run: run.phases.compact),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model-config", type=Path, required=True, metavar="FILE", help="config.json of a Hugging Face checkpoint")
    names = ", ".join(shipped_names())
    add(
        "--hardware", required=True, metavar="FILE_OR_NAME", help=f"description of the machine; with kvllm come {names}"
    )
    add(
        "--workload",
        type=Path,
        required=True,
        metavar="FILE",
        help="trace: .csv (ContextTokens, GeneratedTokens) or .jsonl (input_length, output_length); "
        "or .json: num_requests, input_len, output_len, range_ratio",
    )
    add("--requests", type=int, metavar="N", help="how many; a shorter file is repeated (default: all of the file)")
    add("--rate", type=float, metavar="R", help="requests/s that arrive, a Poisson process (default: all at once)")
    add("--compression", default="", metavar="KEY=VALUE,...", help="options of CompressionConfig; none: only without")
    add("--tensor-parallel-size", type=int, default=1, metavar="N")
    add("--dtype", default="auto", help="bfloat16, float32 or auto (default): the checkpoint's own")
    add("--block-size", type=int, default=256)
    add("--max-model-len", type=int, help="longer requests are left out (default: what the model allows)")
    add("--max-num-seqs", type=int, default=256)
    add("--max-num-batched-tokens", type=int, default=2048)
    pool = parser.add_mutually_exclusive_group()
    pool.add_argument(
        "--gpu-memory-utilization", type=float, default=0.9, help="for weights and KV pool (default: 0.9)"
    )
    pool.add_argument("--num-blocks", type=int, help="blocks in the KV pool")


def run(args: argparse.Namespace) -> None:
    model = read_model_config(args.model_config)
    cost = CostModel(load_hardware(args.hardware), model, resolve_dtype(args.dtype, model), args.tensor_parallel_size)
    compression = parse_compression(args.compression)
    longest = min(args.max_model_len or model.max_position_embeddings, model.max_position_embeddings)
    workload = load_workload(args.workload, longest, args.requests)
    arrivals = arrival_times(len(workload.lengths), args.rate)
    blocks = args.num_blocks
    if blocks is None:
        blocks = cost.pool_blocks(args.block_size, args.gpu_memory_utilization)
    config = EngineConfig(
        num_blocks=blocks,
        max_model_len=workload.longest,
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )
    configs = [config, msgspec.structs.replace(config, compression=compression)][: 2 if compression else 1]
    outcomes = [simulate(each, cost, workload.lengths, arrivals) for each in configs]
    print(describe(args, cost, config, workload))
    print(show(outcomes))


def read_model_config(path: Path) -> ModelConfig:
    """Read a checkpoint's directory, or its config.json under any name."""
    if path.is_dir():
        return load_model_config(path)
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist: give the config.json of a checkpoint, or its directory")
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "config.json"
        file.symlink_to(path.resolve())
        try:
            return load_model_config(file.parent)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(file), str(path))) from None


def describe(args: argparse.Namespace, cost: CostModel, config: EngineConfig, workload: Workload) -> str:
    """The simulated machine and workload, in three lines."""
    requests = len(workload.lengths)
    prompts, outputs = (sum(column) / requests for column in zip(*workload.lengths, strict=True))
    arrival = "all at once" if args.rate is None else f"{args.rate:g} a second"
    left_out = f"; {workload.left_out} of the file left out as too long or empty" if workload.left_out else ""
    pool = config.num_blocks * config.block_size
    gib = pool * cost.kv_pair_bytes * cost.model.num_layers / (1 << 30)
    return (
        f"{args.model_config.name} on {cost.hardware.name}, tensor parallel {cost.devices}: weights "
        f"{cost.weight_bytes / (1 << 30):.1f} GiB and KV pool {gib:.1f} GiB a device\n"
        f"KV pool: {config.num_blocks:,} blocks of {config.block_size} = {pool:,} tokens; "
        f"at most {config.max_num_seqs} sequences at once\n"
        f"Workload {args.workload.name}: {requests:,} requests, {arrival}, mean {prompts:.0f} + {outputs:.0f} tokens, "
        f"longest {workload.longest}{left_out}\n"
    )


def show(outcomes: list[Outcome]) -> str:
    """A column for each run, and the ratio of the second to the first."""
    names = ["without", "compressed", "ratio"] if len(outcomes) == 2 else ["without"]
    lines = [f"{'':<28}" + "".join(f"{name:>14}" for name in names)]
    for title, shape, value in SHOWN:
        values = [value(outcome) for outcome in outcomes]
        cells = [shape.format(each) for each in values]
        if len(values) == 2:
            cells.append(f"{values[1] / values[0]:.3f}" if values[0] else "")
        lines.append(f"{title:<28}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join(lines)
