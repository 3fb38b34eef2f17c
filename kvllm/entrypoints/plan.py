"""Tell how much memory a model and its KV cache take, and how many sequences fit, from config.json or a GGUF file's
header alone.

    kvllm plan config.json --gpu-memory 80GB --tensor-parallel-size 2 --max-model-len 32768 \\
        --compression policy=pressure,window_blocks=3,retain_blocks=1
    kvllm plan DIR --input-length 4096 --num-sequences 32 --json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvllm.config import EngineConfig, SpeculativeConfig, bounding, make_kv_groups, require
from kvllm.engine_args import SIZES, EngineArgs
from kvllm.entrypoints.engine_flags import CHOICES, READERS, SETTINGS, parse_compression
from kvllm.entrypoints.simulate import add_checkpoint_argument, given_checkpoint, read_model_config
from kvllm.entrypoints.sizes import GIB, parse_bytes, parse_count
from kvllm.files.checkpoint import checkpoint_folder
from kvllm.kvcache.formats import KV_CACHE_DTYPES
from kvllm.layer_shares import resolve
from kvllm.models.config import ModelConfig
from kvllm.simulation.cost import resolve_dtype

if TYPE_CHECKING:
    from kvllm.memory_plan import MemoryPlan

SHORTEST = 1024
"""Tokens of the shortest sequence in the table, whose lengths double."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_checkpoint_argument(parser)
    add("--gpu-memory", type=parse_bytes, metavar="SIZE", help="memory of one device, such as 80GB or 24GiB")
    add("--gpu-memory-utilization", type=float, default=0.9, metavar="X", help="for weights and KV pool (default: 0.9)")
    add("--tensor-parallel-size", type=int, default=1, metavar="N", help="devices that share the model (default: 1)")
    add("--max-model-len", type=parse_count, metavar="N", help="longest sequence (default: what the model allows)")
    add("--dtype", default="auto", choices=CHOICES["dtype"], help="default: auto, the checkpoint's own")
    add("--kv-cache-dtype", default="auto", metavar="NAME", help=f"of KV pairs: {', '.join(KV_CACHE_DTYPES)}")
    add("--block-size", type=int, default=16, metavar="N", help="tokens of a KV block (default: 16)")
    add("--compression", default="none", metavar=SETTINGS, help="options of CompressionConfig (default: none)")
    add("--speculative-config", **READERS["speculative_config"], help="of what drafts, its memory is counted, too")
    add("--enable-lora", action="store_true", help="count the memory of adapters, too")
    add("--max-loras", type=int, default=1, metavar="N", help="adapters in use at once (default: 1)")
    add("--max-lora-rank", type=int, default=16, metavar="R", help="their highest rank (default: 16)")
    add("--input-length", type=parse_count, metavar="N", help="tokens of a sequence (default: the longest)")
    add("--prompt-length", type=parse_count, default=0, metavar="N", help="of these, the prompt, which stays whole")
    add("--num-sequences", type=parse_count, default=1, metavar="M", help="sequences of that length (default: 1)")
    add("--json", action="store_true", help="print figures of --num-sequences sequences of --input-length tokens")
    add("--plot", type=Path, metavar="FILE", help="draw bytes held over length, as a PNG; needs matplotlib")


def run(args: argparse.Namespace) -> None:
    from kvllm.memory_plan import plan_memory  # which imports torch; a typing error should not wait for that

    path = given_checkpoint(args)
    model = read_model_config(path)
    longest = model.max_position_embeddings if args.max_model_len is None else args.max_model_len
    windows = bounding(model.windows, longest)
    compression = parse_compression(args.compression)
    if compression is not None:
        compression = resolve(compression, checkpoint_folder(path), windows, args.block_size)
    for name in ("max_loras", "max_lora_rank"):
        (smallest, largest), value = SIZES[name], getattr(args, name)
        require(smallest <= value <= largest, name, value, f"between {smallest} and {largest}")
    config = EngineConfig(
        num_blocks=1,
        max_model_len=longest,
        block_size=args.block_size,
        kv_cache_dtype=args.kv_cache_dtype,
        compression=compression,
        kv_groups=make_kv_groups(windows, compression),
        max_loras=args.max_loras if args.enable_lora else 0,
        max_lora_rank=args.max_lora_rank,
    )
    dtype, draft = resolve_dtype(args.dtype, model), _draft_config(args.speculative_config, model)
    plan = plan_memory(model, config, dtype, args.tensor_parallel_size, draft)
    length = longest if args.input_length is None else args.input_length
    require(length >= 1, "input_length", length, "at least 1")
    require(0 <= args.prompt_length <= length, "prompt_length", args.prompt_length, f"between 0 and {length}")
    require(args.num_sequences >= 1, "num_sequences", args.num_sequences, "at least 1")
    if args.json:
        print(json.dumps(figures(plan, length, args), indent=2))
    else:
        print("\n".join(report(plan, length, args)))
    if args.plot:
        draw(plan, args.prompt_length, args.plot)


def _draft_config(options: dict[str, Any] | None, model: ModelConfig) -> ModelConfig | None:
    """The model that drafts, if one does. Raises ConfigError and CheckpointError."""
    speculation = None if options is None else SpeculativeConfig(**options)
    if speculation is None or not speculation.has_model:
        return None
    return read_model_config(EngineArgs(speculation.model).described_path) if speculation.model else model.mtp


def figures(plan: MemoryPlan, length: int, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of `args.num_sequences` sequences of `length` tokens, for programs.

    `layer_token_units` and `blocks_per_sequence` are those of one sequence, `weights_bytes` and all `kv_bytes` those of
    all ranks together.
    """
    found: dict[str, Any] = {
        "layer_token_units": plan.layer_token_units(length),
        "kv_bytes": plan.kv_bytes(length, args.num_sequences),
        "bytes_per_token": plan.bytes_per_token,
        "blocks_per_sequence": plan.blocks_per_sequence(length),
        "weights_bytes": plan.weights_bytes,
    }
    if plan.draft_block_bytes:
        found["draft_weights_bytes"] = plan.draft_weights_bytes
        found["draft_bytes_per_token"] = plan.draft_block_bytes // plan.config.block_size
    if plan.rank_state_bytes:
        found["state_bytes_per_rank"] = plan.rank_state_bytes
    if plan.rank_adapter_bytes:
        found["adapter_bytes_per_rank"] = plan.rank_adapter_bytes
    if plan.compresses:
        found["compressed_kv_bytes"] = plan.compressed_kv_bytes(length, args.prompt_length, args.num_sequences)
    if args.gpu_memory is not None:
        pool = plan.pool_bytes(args.gpu_memory, args.gpu_memory_utilization)
        found["pool_bytes_per_rank"] = pool
        found["sequences_at_once"] = concurrency(plan, pool, length, args.prompt_length)
    return found


def concurrency(plan: MemoryPlan, pool: int, length: int, prompt: int) -> dict[str, int]:
    """Sequences that a pool holds at once, by what gives memory back."""
    found = {"nothing released": plan.concurrency(pool, length, prompt, windows=False, compressed=False)}
    if plan.has_windows:
        found["windows"] = plan.concurrency(pool, length, prompt, compressed=False)
    if plan.compresses:
        found["compression"] = plan.concurrency(pool, length, prompt, compressed=True)
    return found


def report(plan: MemoryPlan, length: int, args: argparse.Namespace) -> Iterator[str]:
    """The lines of the page that people read."""
    model = plan.model
    kv_dtype = "" if plan.config.kv_cache_dtype == "auto" else f", KV cache in {plan.config.kv_cache_dtype}"
    yield f"{model.architecture}, {model.num_decoder_layers} layers, {plan.dtype}{kv_dtype}"
    weights = f"{plan.weights_bytes / GIB:,.2f} GiB"
    if plan.num_ranks > 1:
        weights += f", {plan.rank_weights_bytes / GIB:,.2f} GiB on each of {plan.num_ranks} ranks"
    yield f"weights: {weights}; KV pairs of a token in all layers: {plan.bytes_per_token:,} bytes"
    if plan.draft_block_bytes:
        weights, of_token = plan.draft_weights_bytes / GIB, plan.draft_block_bytes // plan.config.block_size
        yield f"what drafts: {weights:,.2f} GiB of weights, {of_token:,} bytes of a token in a pool as long"
    if plan.rank_adapter_bytes:
        most, rank = plan.config.max_loras, plan.config.max_lora_rank
        yield f"adapters: {plan.rank_adapter_bytes / GIB:,.2f} GiB on each rank, {most} of rank {rank} in all matrices"
    yield ""
    yield f"{'layers':<10}{'number':>8}{'window':>10}{'bytes of a KV pair':>20}{'of a token':>14}"
    for kind in plan.layer_types:
        window = "all" if kind.window is None else f"{kind.window:,}"
        share = kind.layers * plan.pair_bytes
        yield f"{kind.name:<10}{kind.layers:>8}{window:>10}{plan.pair_bytes:>20,}{share:>14,}"
    if model.recurrent:
        state = f"a state of {plan.rank_state_bytes:,} bytes for each sequence on each rank"
        others = f"{len(model.recurrent.indices)} other layers hold no KV pairs: they have"
        others = "all layers have, beside KV pairs," if model.mamba else others
        yield f"{others} {state}"
    if plan.key_bytes != plan.value_bytes:
        yield f"of a KV pair, the key takes {plan.key_bytes:,} bytes and the value {plan.value_bytes:,}"
    yield ""
    yield from _lengths(plan, args.prompt_length)
    if args.gpu_memory is not None:
        pool = plan.pool_bytes(args.gpu_memory, args.gpu_memory_utilization)
        layers, places = model.num_layers, plan.block_layers
        of_layers = "" if places == layers else f" tokens in {places} of {layers} layers"
        yield ""
        yield (
            f"KV pool of a rank: {pool / GIB:,.2f} GiB, {pool // plan.block_bytes:,} blocks of "
            f"{plan.config.block_size}{of_layers}; what steps need beside it is measured when an engine starts"
        )
        for what, number in concurrency(plan, pool, length, args.prompt_length).items():
            yield f"sequences of {length:,} tokens at once, {what}: {number:,}"


def _lengths(plan: MemoryPlan, prompt: int) -> Iterator[str]:
    """KV pairs in a layer of each type, and bytes of a sequence, by its length."""
    kinds = [kind.name for kind in plan.layer_types]
    heads = [*kinds, "MiB"] + (["full, compressed", "MiB, compressed"] if plan.compresses else [])
    yield f"{'tokens':<10}" + "".join(f"{head:>18}" for head in heads)
    for length in _doubling(plan.config.max_model_len):
        cells = [f"{kind.held(length):,}" for kind in plan.layer_types] + [f"{plan.kv_bytes(length) / 2**20:,.1f}"]
        if plan.compresses:
            start = min(prompt, length)
            held = plan.compressed_kv_bytes(length, start)
            cells += [f"{plan.compressed_length(length, start):,}", f"{held / 2**20:,.1f}"]
        yield f"{length:<10,}" + "".join(f"{cell:>18}" for cell in cells)


def _doubling(longest: int) -> list[int]:
    lengths = [min(SHORTEST, longest)]
    while lengths[-1] < longest:
        lengths.append(min(2 * lengths[-1], longest))
    return lengths


def draw(plan: MemoryPlan, prompt: int, path: Path) -> None:
    """Bytes that one sequence holds over its length."""
    from matplotlib.figure import Figure

    longest = plan.config.max_model_len
    lengths = sorted({max(1, longest * step // 400) for step in range(1, 401)})
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    lines = {"every layer holds every token": [plan.bytes_per_token * length for length in lengths]}
    if plan.has_windows:
        lines["windows"] = [plan.kv_bytes(length) for length in lengths]
    if plan.compresses:
        lines["compression"] = [plan.compressed_kv_bytes(length, min(prompt, length)) for length in lengths]
    for label, held in lines.items():
        axes.plot(lengths, [each / 2**20 for each in held], label=label)
    axes.set(xlabel="tokens of a sequence", ylabel="MiB of KV pairs", title=f"{plan.model.architecture}, {plan.dtype}")
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, format="png")
