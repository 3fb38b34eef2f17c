"""Command-line options of the model and the engine, and the jobs that they describe."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from benchmarks.common import workloads
from benchmarks.common.jobs import Job
from benchmarks.common.limits import itemsize
from benchmarks.common.shapes import SHAPES
from benchmarks.common.variants import Variant
from benchmarks.common.workloads import Request
from kvllm.config import require
from kvllm.core.capacity import blocks_alone
from kvllm.core.policies import make_policy
from kvllm.engine_args import EngineArgs
from kvllm.engine_builder import cache_shape
from kvllm.errors import ConfigError
from kvllm.models.config import ModelConfig


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    names = ", ".join(SHAPES)
    add("--model", default="50m", help=f"directory of a checkpoint, or a shape with random weights: {names}")
    add("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights from config.json alone")
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")


def add_engine_arguments(parser: argparse.ArgumentParser) -> Callable[..., Any]:
    """Returns the function that adds further arguments to the same group."""
    engine = parser.add_argument_group("engine")
    engine.add_argument("--block-size", type=int, default=256)
    engine.add_argument("--max-num-batched-tokens", type=int, default=2048)
    add = (
        parser.add_argument_group("KV pool (default: room for all running sequences)")
        .add_mutually_exclusive_group()
        .add_argument
    )
    add("--num-gpu-blocks-override", "--num-blocks", type=int, metavar="N", help="blocks")
    add("--kv-cache-memory-bytes", "--kv-bytes", type=int, metavar="N", help="bytes")
    add(
        "--pool-fraction",
        type=float,
        metavar="F",
        help="share of the blocks that the running sequences fill at their ends",
    )
    return engine.add_argument


def check_lengths(args: argparse.Namespace, model: ModelConfig, requests: list[Request]) -> None:
    longest, allowed = max(request.kv_pairs + 1 for request in requests), model.max_position_embeddings
    if args.max_model_len is not None:
        require(args.max_model_len <= allowed, "--max-model-len", args.max_model_len, f"the model allows {allowed}")
        allowed = args.max_model_len
    if longest > allowed:
        raise ConfigError(f"the longest request has {longest} tokens, allowed are {allowed}: shorten the requests")


def make_job(
    args: argparse.Namespace, variant: Variant, path: Path, model: ModelConfig, requests: list[Request]
) -> Job:
    """The job of a variant.

    Raises ConfigError if the engine would refuse the options, or a request that cannot finish in the pool.
    """
    engine = {
        "dtype": args.dtype,
        "load_format": "dummy" if args.model in SHAPES else args.load_format,
        "seed": args.seed,
        "block_size": args.block_size,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "max_model_len": args.max_model_len or max(request.kv_pairs + 1 for request in requests),
        **variant.engine,
    }
    require(engine["block_size"] >= 1, "block_size", engine["block_size"], "between 1 and 256")
    require(engine["max_num_seqs"] >= 1, "max_num_seqs", engine["max_num_seqs"], "at least 1")
    engine.setdefault("num_gpu_blocks_override", args.num_gpu_blocks_override)
    of_engine = EngineArgs(path, compression=variant.compression, **engine)
    if of_engine.num_gpu_blocks_override is None:
        engine["num_gpu_blocks_override"] = in_the_same_bytes(pool_blocks(args, engine, model, requests), of_engine)
        of_engine = EngineArgs(path, compression=variant.compression, **engine)
    config = structs.replace(of_engine.engine_config, num_blocks=of_engine.pool_blocks)
    policy = make_policy(config)
    regions = policy and policy.group_regions
    needed = max(blocks_alone(config, regions, len(r.prompt_token_ids), r.kv_pairs) for r in requests)
    if needed > config.num_blocks:
        raise ConfigError(
            f"variant {variant.name}: a request needs {needed} KV blocks of {config.block_size} tokens and the pool "
            f"has {config.num_blocks}: give it more, or shorten the requests"
        )
    return Job(name=variant.name, model=str(path), engine=engine, compression=variant.compression, requests=requests)


def in_the_same_bytes(blocks: int, args: EngineArgs) -> int:
    """Blocks of an engine for those of one without compression and with KV pairs as they are. What `layer_groups` lets
    blocks hold is counted by the engine."""
    shape = replace(cache_shape(args), places=())
    plain = replace(shape, scored=False, kv_format=None)
    return max(1, blocks * plain.bytes_per_block // shape.bytes_per_block)


def pool_blocks(args: argparse.Namespace, engine: dict[str, Any], model: ModelConfig, requests: list[Request]) -> int:
    """Blocks in the pool of an engine without compression, as `num_gpu_blocks_override` counts them."""
    if args.num_gpu_blocks_override is not None:
        return args.num_gpu_blocks_override
    block_size = engine["block_size"]
    if args.kv_cache_memory_bytes is not None:
        pair_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize(model, engine["dtype"])
        return args.kv_cache_memory_bytes // (pair_bytes * block_size)
    fraction = 1.0 if args.pool_fraction is None else args.pool_fraction
    require(0 < fraction <= 1, "--pool-fraction", fraction, "above 0, at most 1")
    at_once = min(len(requests), engine["max_num_seqs"])
    return max(1, int(fraction * workloads.demand([r.kv_pairs for r in requests], block_size, at_once)))
