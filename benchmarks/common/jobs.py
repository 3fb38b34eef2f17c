"""Variants of the engine that serve the same requests in pools of the same bytes, each run in a process of its own."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from msgspec import Struct

from benchmarks.common import shapes, workloads
from benchmarks.common.child import run_child
from benchmarks.common.measurement import Measurement, measure
from benchmarks.common.variants import Variant
from benchmarks.common.workloads import Request
from kvllm import LLM, CompressionConfig
from kvllm.config import require
from kvllm.engine_args import EngineArgs
from kvllm.engine_builder import cache_shape

WARM_UP_TOKENS = 8


class Job(Struct, kw_only=True):
    """A variant, and all that it shares with the others. `engine` holds keywords of `LLM`."""

    name: str
    model: str
    engine: dict[str, Any]
    compression: CompressionConfig | None
    requests: list[Request]


# From the command line


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="50m", help=shapes.MODEL_HELP)
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    add("--seed", type=int, default=0, help="of random weights and requests (default 0)")
    add("--block-size", type=int, default=256)
    add("--max-num-batched-tokens", type=int, default=2048)
    pool = parser.add_argument_group("KV pool (default: room for all running sequences)")
    add = pool.add_mutually_exclusive_group().add_argument
    add("--num-gpu-blocks-override", "--num-blocks", type=int, metavar="N", help="blocks")
    add("--kv-cache-memory-bytes", "--kv-bytes", type=int, metavar="N", help="bytes")
    share = "share of the blocks that the running sequences fill at their ends"
    add("--pool-fraction", type=float, metavar="F", help=share)


def make_job(
    args: argparse.Namespace, variant: Variant, path: Path, requests: list[Request], max_num_seqs: int, at_once: int
) -> Job:
    """The job of a variant, in as many bytes as the pool of one that keeps all KV pairs as they are, unless the variant
    or the command line names its blocks.

    at_once: the running sequences of which a pool holds its fraction.
    Raises ConfigError if the engine would refuse the options.
    """
    engine = {
        "dtype": args.dtype,
        "load_format": "dummy" if args.model in shapes.SHAPES else "auto",
        "seed": args.seed,
        "block_size": args.block_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "max_model_len": max(request.kv_pairs + 1 for request in requests),
    }
    if args.num_gpu_blocks_override is not None:
        pool = {"num_gpu_blocks_override": args.num_gpu_blocks_override}
    elif args.kv_cache_memory_bytes is not None:
        pool = {"kv_cache_memory_bytes": args.kv_cache_memory_bytes}
    else:
        fraction = 1.0 if args.pool_fraction is None else args.pool_fraction
        require(0 < fraction <= 1, "--pool-fraction", fraction, "above 0, at most 1")
        block_bytes = cache_shape(EngineArgs(path, **engine)).bytes_per_block
        kv_pairs = [request.kv_pairs for request in requests]
        demand = workloads.demand(kv_pairs, args.block_size, min(len(requests), at_once))
        pool = {"kv_cache_memory_bytes": max(1, int(fraction * demand)) * block_bytes}
    engine |= variant.engine if "num_gpu_blocks_override" in variant.engine else pool | variant.engine
    _ = EngineArgs(path, compression=variant.compression, **engine).engine_config  # which checks the options
    return Job(name=variant.name, model=str(path), engine=engine, compression=variant.compression, requests=requests)


# Runs


def run(job: Job) -> Measurement:
    """Load the model, warm up on prompts of the same lengths with other tokens, and measure."""
    llm = LLM(job.model, compression=job.compression, **job.engine)
    _warm_up(llm, job.requests[: llm.config.max_num_seqs])
    outputs, measurement = measure(llm, *workloads.prompts_of(job.requests))
    generated = [len(output.outputs[0].token_ids) for output in outputs]
    if generated != [request.output_length for request in job.requests]:
        raise RuntimeError(f"requests did not generate the tokens they were asked for: {generated}")
    return measurement


def _warm_up(llm: LLM, requests: list[Request]) -> None:
    """Prompts of one repeated token share no prefix with random or written ones, so the prefix cache stays unused."""
    vocab_size = llm.model_config.vocab_size
    short = [
        Request([i % vocab_size] * len(r.prompt_token_ids), min(WARM_UP_TOKENS, r.output_length))
        for i, r in enumerate(requests)
    ]
    llm.generate(*workloads.prompts_of(short), use_tqdm=False)


def run_all(jobs: dict[str, Job], repeats: int) -> dict[str, list[Measurement]]:
    """Run each variant `repeats` times. They take turns, so that a slow minute of the machine meets all of them."""
    runs: dict[str, list[Measurement]] = {name: [] for name in jobs}
    for repeat in range(1, repeats + 1):
        for name, job in jobs.items():
            runs[name].append(result := run_child(run, job, f"variant {job.name}"))
            speed = f"{result.output_tokens_per_s:.1f} output tokens/s, {result.seconds:.1f} s"
            print(f"run {repeat} of {repeats}, {name}: {speed}", flush=True)
    return runs
