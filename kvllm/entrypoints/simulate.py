"""Predict throughput, concurrency and what compression would buy on a machine, without it.

The real scheduler runs over the workload; a roofline of the machine says how long each step takes.

    kvllm simulate config.json --hardware h200 --workload AzureLLMInferenceTrace_conv.csv
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvllm.config import CompressionConfig, EngineConfig, bounding, check_host_size, host_room, make_kv_groups, require
from kvllm.config.engine import SWAP_MODES
from kvllm.engine_args import EngineArgs
from kvllm.entrypoints.engine_flags import CHOICES, SETTINGS, parse_compression
from kvllm.entrypoints.model_argument import add_model_argument, add_revision_argument
from kvllm.entrypoints.simulate_fleet import add_fleet_arguments, load_fleet, simulate_fleets
from kvllm.entrypoints.sizes import GIB, parse_count, parse_gib
from kvllm.errors import CheckpointError, ConfigError
from kvllm.files.checkpoint import checkpoint_folder
from kvllm.files.gguf.paths import is_gguf
from kvllm.kvcache.formats import KV_CACHE_DTYPES, KV_FORMATS
from kvllm.kvcache.groups import block_layers
from kvllm.layer_shares import resolve
from kvllm.models.config import ModelConfig, load_model_config
from kvllm.simulation.cost import CostModel, resolve_dtype
from kvllm.simulation.hardware import load_hardware, shipped_names
from kvllm.simulation.simulate import Outcome, simulate
from kvllm.simulation.tenants import Served, make_load, parse_tenants, serve, without
from kvllm.simulation.workload import Workload, arrival_times, load_workload

SHOWN: tuple[tuple[str, str, Callable[[Outcome], float]], ...] = (
    ("requests/s", "{:.2f}", lambda run: run.requests_per_s),
    ("output tokens/s", "{:,.0f}", lambda run: run.output_tokens_per_s),
    ("time, s", "{:,.1f}", lambda run: run.seconds),
    ("mean latency, s", "{:.2f}", lambda run: run.mean_latency),
    ("mean time to first token, s", "{:.2f}", lambda run: run.mean_first_token),
    ("inter-token latency, p50, ms", "{:.1f}", lambda run: 1e3 * run.inter_token.p50),
    ("inter-token latency, p99, ms", "{:.1f}", lambda run: 1e3 * run.inter_token.p99),
    ("inter-token latency, max, ms", "{:,.1f}", lambda run: 1e3 * run.inter_token.most),
    ("mean concurrency", "{:.1f}", lambda run: run.mean_concurrency),
    ("peak concurrency", "{:.0f}", lambda run: run.peak_concurrency),
    ("preemptions", "{:,.0f}", lambda run: run.preemptions),
    ("tokens computed again", "{:,.0f}", lambda run: run.tokens_recomputed),
    ("blocks in use, peak", "{:,.0f}", lambda run: run.peak_blocks),
    ("windows compressed", "{:,.0f}", lambda run: run.windows_compressed),
    ("blocks released", "{:,.0f}", lambda run: run.blocks_released),
    ("decode, s", "{:,.1f}", lambda run: run.phases.decode),
    ("prefill, s", "{:,.1f}", lambda run: run.phases.prefill),
    ("recompute queries, s", "{:,.1f}", lambda run: run.phases.recompute),
    ("score, s", "{:,.1f}", lambda run: run.phases.score),
    ("compact, s", "{:,.1f}", lambda run: run.phases.compact),
)
OF_TIERS: tuple[tuple[str, str, Callable[[Outcome], float]], ...] = (
    ("sequences swapped out", "{:,.0f}", lambda run: run.swapped_out),
    ("stored, GiB", "{:,.2f}", lambda run: run.stored_bytes / GIB),
    ("loaded, GiB", "{:,.2f}", lambda run: run.loaded_bytes / GIB),
    ("exchanged, GiB", "{:,.2f}", lambda run: run.recalled_bytes / GIB),
    ("KV pairs without room", "{:,.0f}", lambda run: run.lost_pairs),
    ("host memory, peak, GiB", "{:,.2f}", lambda run: run.host_bytes / GIB),
    ("transfer, s", "{:,.1f}", lambda run: run.phases.transfer),
    ("recall, s", "{:,.1f}", lambda run: run.phases.recall),
)
"""Shown where there is host memory."""


def add_checkpoint_argument(parser: argparse.ArgumentParser) -> None:
    """The model of commands that read no weights."""
    text = "a checkpoint, a GGUF file, config.json alone, or the id ORG/NAME of a model on a hub"
    add_model_argument(parser, text, metavar="DIR|FILE|ID", also=["--model-config"])
    add_revision_argument(parser)


def given_checkpoint(args: argparse.Namespace) -> Path:
    """Its path, where weights may be missing.

    Raises ConfigError where there is none, and CheckpointError for a hub's that cannot be had.
    """
    if args.model is None:
        raise ConfigError(f"kvllm {args.command} needs a model: give a checkpoint's directory, or its config.json")
    model = getattr(args, "described", None) or EngineArgs(args.model, revision=args.revision)
    args.described = model  # with which the headers go that were downloaded
    return model.described_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_checkpoint_argument(parser)
    names = ", ".join(shipped_names())
    add(
        "--hardware", required=True, metavar="FILE_OR_NAME", help=f"description of the machine; with kvllm come {names}"
    )
    load = parser.add_mutually_exclusive_group(required=True)
    load.add_argument(
        "--workload",
        type=Path,
        metavar="FILE",
        help="trace: .csv (ContextTokens, GeneratedTokens) or .jsonl (input_length, output_length); "
        "or .json: num_requests, input_len, output_len, range_ratio",
    )
    load.add_argument(
        "--tenants",
        metavar="FILE_OR_SPEC",
        help="several tenants with loads of their own: name=a,rate=2,input_len=500,output_len=200;name=b,..., or .json "
        "or .toml with a list `tenants` of such settings",
    )
    add_fleet_arguments(parser, load)
    add(
        "--duration",
        type=float,
        default=86400,
        metavar="S",
        help="with --tenants or --trace: seconds of arrivals (default: a day)",
    )
    add("--without", metavar="NAME", help="with --tenants: compare with the same day without this tenant")
    add("--requests", type=int, metavar="N", help="how many; a shorter file is repeated (default: all of the file)")
    add("--rate", type=float, metavar="R", help="requests/s that arrive, a Poisson process (default: all at once)")
    add("--compression", default="", metavar=SETTINGS, help="options of CompressionConfig; none: only without")
    add("--tensor-parallel-size", type=int, default=1, metavar="N")
    add("--dtype", default="auto", choices=CHOICES["dtype"], help="default: auto, the checkpoint's own")
    add("--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES, help="of the KV pool (default: auto, as --dtype)")
    add("--block-size", type=int, default=16)
    add("--max-model-len", type=parse_count, help="longer requests are left out (default: what the model allows)")
    add("--max-num-seqs", type=parse_count, default=256)
    add("--max-num-batched-tokens", type=parse_count, default=2048)
    add(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="plan a step while the one before it runs (default: if the machine has launch_seconds)",
    )
    pool = parser.add_mutually_exclusive_group()
    pool.add_argument(
        "--gpu-memory-utilization", type=float, default=0.9, help="for weights and KV pool (default: 0.9)"
    )
    pool.add_argument("--num-blocks", type=int, help="blocks in the KV pool")
    add_tier_arguments(parser)


def add_tier_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--kv-offloading-size", type=parse_gib, metavar="GIB", help="host memory below the KV pool (default: none)")
    dtypes = ("auto", *KV_FORMATS)
    add("--kv-offload-dtype", default="auto", choices=dtypes, help="of blocks there (default: auto, the pool's)")
    swap = "whether a preempted sequence's cache goes there (default: auto, where that is cheaper)"
    add("--swap", default="auto", choices=SWAP_MODES, help=swap)
    pairs = "KV pairs that come back at a recall, in each layer and KV head (default: what recall_chunks allows)"
    add("--recalled-pairs", type=float, metavar="X", help=pairs)


def run(args: argparse.Namespace) -> None:
    model = read_model_config(given_checkpoint(args))
    hardware = load_hardware(args.hardware)
    dtype, size = resolve_dtype(args.dtype, model, hardware.flops_per_s), args.tensor_parallel_size
    cost = CostModel(hardware, model, dtype, size, args.kv_cache_dtype)
    if args.tenants is not None:
        simulate_tenants(args, cost)
        return
    compression = parse_compression(args.compression)
    if args.trace or args.replicas != 1:
        longest, parts = load_fleet(args, longest_request(args, cost))
        of_fleet = [make_config(args, cost, longest, each) for each in (None, compression)[: 1 + bool(compression)]]
        print(simulate_fleets(args, cost, of_fleet, parts))
        return
    workload = load_workload(args.workload, longest_request(args, cost), args.requests)
    arrivals = arrival_times(len(workload.lengths), args.rate)
    config = make_config(args, cost, workload.longest)
    configs = [config]
    if compression:
        configs.append(make_config(args, cost, workload.longest, compression))
    pairs = args.recalled_pairs
    outcomes = [simulate(each, cost, workload.lengths, arrivals, recalled_pairs=pairs) for each in configs]
    print(describe(args, cost, config, workload))
    print(show(outcomes))


def longest_request(args: argparse.Namespace, cost: CostModel) -> int:
    """Tokens of the longest request that is served."""
    most = cost.model.max_position_embeddings
    require(args.max_model_len is None or args.max_model_len >= 1, "max_model_len", args.max_model_len, "at least 1")
    return min(args.max_model_len or most, most)


def make_config(
    args: argparse.Namespace, cost: CostModel, max_model_len: int, compression: CompressionConfig | None = None
) -> EngineConfig:
    """The simulated engine."""
    windows = bounding(cost.model.windows, max_model_len)
    folder = checkpoint_folder(given_checkpoint(args))
    if compression is not None:
        compression = resolve(compression, folder, windows, args.block_size)
    groups = make_kv_groups(windows, compression)
    blocks = args.num_blocks
    if blocks is None:
        scored = compression is not None and compression.spec.reselects
        blocks = cost.pool_blocks(args.block_size, args.gpu_memory_utilization, scored=scored, kv_groups=groups)
    config = EngineConfig(
        num_blocks=blocks,
        kv_cache_dtype=args.kv_cache_dtype,
        kv_offload_dtype=args.kv_offload_dtype,
        swap=args.swap,
        max_model_len=max_model_len,
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        compression=compression,
        kv_groups=groups,
        async_scheduling=cost.plans_ahead if args.async_scheduling is None else args.async_scheduling,
    )
    return with_host_memory(config, cost, args.kv_offloading_size)


def with_host_memory(config: EngineConfig, cost: CostModel, size: float | None) -> EngineConfig:
    """The same with so many GiB of host memory for all devices."""
    check_host_size(config, size)
    if size is None:
        return config
    block_bytes, chunk_bytes = cost.host_block_bytes(config), cost.host_chunk_bytes(config)
    each = cost.devices
    blocks, chunks = host_room(size, config.block_size, each * block_bytes, each * chunk_bytes or None)
    return msgspec.structs.replace(config, num_host_blocks=blocks, num_host_chunks=chunks)


def simulate_tenants(args: argparse.Namespace, cost: CostModel) -> None:
    """Run the tenants' requests fairly, first come, first served, and without one of the tenants."""
    tenants = parse_tenants(args.tenants)
    load = make_load(tenants, args.duration, longest_request(args, cost))
    settings = {tenant.name: tenant.config for tenant in tenants}
    compression = parse_compression(args.compression) if args.compression else None
    config = make_config(args, cost, max(map(sum, load.lengths)), compression)
    config = msgspec.structs.replace(config, tenants=settings)
    fewer = without(load, args.without) if args.without else None
    quiet = serve(config, cost, fewer) if fewer else None
    print(show_tenants("Fair", *serve(config, cost, load), quiet and quiet[1]))
    print(show_tenants("First come, first served", *serve(config, cost, load, in_order=True), quiet and quiet[1]))
    if quiet:
        print(show_tenants(f"Fair, without {args.without}", *quiet))


def show_tenants(
    title: str, outcome: Outcome, tenants: dict[str, Served], baseline: dict[str, Served] | None = None
) -> str:
    """A line for each tenant; after its p99 how much longer it is than in `baseline`."""
    heads = ("requests", "share of tokens", "first token p50, s", "p99, s", "change of p99", "preemptions")
    lines = [f"{title}: {outcome.seconds:,.0f} s, {outcome.output_tokens_per_s:,.0f} output tokens/s"]
    lines.append(f"{'':<16}" + "".join(f"{head:>20}" for head in heads))
    for name, served in tenants.items():
        p50, p99 = served.first_token
        change = f"{p99 / baseline[name].first_token[1] - 1:+.1%}" if baseline and name in baseline else ""
        cells = [f"{served.requests:,}", f"{served.throughput_share:.1%}", f"{p50:.3f}", f"{p99:.3f}", change]
        lines.append(f"{name:<16}" + "".join(f"{cell:>20}" for cell in [*cells, f"{served.preemptions:,}"]))
    return "\n".join(lines) + "\n"


def read_model_config(path: Path) -> ModelConfig:
    """Read a checkpoint's directory, a GGUF file's header, or a config.json under any name."""
    if path.is_dir() or is_gguf(path):
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
    tokens = config.num_blocks * config.block_size
    layers = block_layers(config.kv_groups, cost.model.num_layers)
    of_layers = "" if layers == cost.model.num_layers else f" in {layers} of {cost.model.num_layers} layers"
    gib = tokens * cost.kv_pair_bytes * layers / GIB
    return (
        f"{Path(args.model).name} on {cost.hardware.name}, tensor parallel {cost.devices}: weights "
        f"{cost.weight_bytes / GIB:.1f} GiB and KV pool {gib:.1f} GiB a device\n"
        f"KV pool: {config.num_blocks:,} blocks of {config.block_size} = {tokens:,} tokens{of_layers}; "
        f"at most {config.max_num_seqs} sequences at once\n"
        f"Workload {args.workload.name}: {requests:,} requests, {arrival}, mean {prompts:.0f} + {outputs:.0f} tokens, "
        f"longest {workload.longest}{left_out}\n"
    )


def show(outcomes: list[Outcome]) -> str:
    """A column for each run, and the ratio of the second to the first."""
    names = ["without", "compressed", "ratio"] if len(outcomes) == 2 else ["without"]
    lines = [f"{'':<28}" + "".join(f"{name:>14}" for name in names)]
    has_tiers = any(outcome.host_bytes for outcome in outcomes)
    for title, shape, value in SHOWN + (OF_TIERS if has_tiers else ()):
        values = [value(outcome) for outcome in outcomes]
        cells = [shape.format(each) for each in values]
        if len(values) == 2:
            cells.append(f"{values[1] / values[0]:.3f}" if values[0] else "")
        lines.append(f"{title:<28}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join(lines)
