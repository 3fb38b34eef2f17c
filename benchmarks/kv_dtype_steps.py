"""Decode steps over KV pairs of each dtype, side by side.

    python -m benchmarks.kv_dtype_steps --contexts 128 4096

The model has layers of the shape of Qwen3-0.6B and random weights. For each dtype an engine holds the same sequences,
and the engines take turns with a few steps each, so that all of them meet the machine in the same state. The table has
the median of a step, the median of the ratios to the first dtype in the same turns with their quartiles, and the time
in which memory would give the bytes of the weights and of all KV pairs once. The figures go to kv_dtype_steps.json.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

from msgspec import Struct, to_builtins

from benchmarks.common import command_line, limits, machine, report
from benchmarks.common.internals import engine_of, runner_of
from benchmarks.common.shapes import SHAPES
from kvllm import LLM, SamplingParams
from kvllm.comparison.kv_caches import check_kv_cache, kv_cache_options
from kvllm.config import require
from kvllm.models.config import load_model_config

STEPS = 5
"""Of an engine in a turn."""
BLOCK_SIZE = 16
VOCABULARY = 8192


class Steps(Struct):
    """The steps of one dtype with one context: milliseconds of each turn's mean step, how much faster than the first
    dtype's in the same turn, and the bytes that a step reads."""

    kv_cache_dtype: str
    context: int
    step_ms: list[float]
    speedups: list[float]
    read_bytes: float


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.kv_dtype_steps", __doc__)
    add = parser.add_argument
    dtypes = "default: auto int8 int6_int4_hadamard int4_hadamard; int4_hadamard+32 has a residual of 32 tokens"
    add("--kv-cache-dtypes", nargs="+", metavar="D", help=dtypes)
    prompt = "tokens of a prompt (default 128 512 4096)"
    add("--contexts", type=int, nargs="+", default=[128, 512, 4096], help=prompt)
    add("--sequences", type=int, default=8, help="that decode together (default 8)")
    add("--layers", type=int, default=4, help="default 4")
    add("--turns", type=int, default=30, help=f"of {STEPS} steps for each dtype (default 30)")
    add("--seed", type=int, default=0)
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    args.kv_cache_dtypes = args.kv_cache_dtypes or ["auto", "int8", "int6_int4_hadamard", "int4_hadamard"]
    for name in args.kv_cache_dtypes:
        check_kv_cache("--kv-cache-dtypes", name)
    command_line.require_positive(args, "sequences", "layers")
    require(args.turns >= 2, "--turns", args.turns, "at least 2")
    require(min(args.contexts) >= 1, "--contexts", args.contexts, "at least 1 token each")
    return args


def make_engine(args: argparse.Namespace, path: Path, kv_cache_dtype: str, context: int) -> LLM:
    """An engine whose sequences have computed their prompts."""
    tokens = context + STEPS * (args.turns + 2)
    blocks = args.sequences * (-(-tokens // BLOCK_SIZE) + 1)
    llm = LLM(
        path,
        load_format="dummy",
        seed=args.seed,
        **kv_cache_options(kv_cache_dtype)._asdict(),
        block_size=BLOCK_SIZE,
        max_num_seqs=args.sequences,
        num_gpu_blocks_override=blocks + 1,
        enable_prefix_caching=False,
        max_model_len=tokens,
    )
    rng = random.Random(args.seed)
    params = SamplingParams(temperature=0, max_tokens=tokens - context, ignore_eos=True)
    for number in range(args.sequences):
        prompt = [rng.randrange(VOCABULARY) for _ in range(context)]
        engine_of(llm).add_request(str(number), {"prompt_token_ids": prompt}, params)
    while llm.stats().output_tokens < args.sequences:
        engine_of(llm).step()
    return llm


def measure(args: argparse.Namespace, path: Path, context: int) -> list[Steps]:
    engines = {dtype: make_engine(args, path, dtype, context) for dtype in args.kv_cache_dtypes}
    times: dict[str, list[float]] = {dtype: [] for dtype in engines}
    for turn in range(1 + args.turns):
        for dtype, llm in engines.items():
            milliseconds = time_steps(llm)
            if turn:  # the first one warms up
                times[dtype].append(milliseconds)
    first = times[args.kv_cache_dtypes[0]]
    weights = limits.weight_bytes(load_model_config(path), "auto")
    found = []
    for dtype, llm in engines.items():
        shape = runner_of(llm).cache.shape
        heads = args.sequences * shape.num_layers * shape.num_kv_heads
        as_they_are = min(context, kv_cache_options(dtype).kv_residual_tokens)
        pairs_bytes = (context + STEPS * args.turns / 2 - as_they_are) * shape.pair_bytes
        pairs_bytes += as_they_are * 2 * shape.head_dim * shape.dtype.itemsize
        speedups = [base / own for base, own in zip(first, times[dtype], strict=True)]
        found.append(Steps(dtype, context, times[dtype], speedups, weights + heads * pairs_bytes))
        llm.llm_engine.close()
    return found


def time_steps(llm: LLM) -> float:
    """Milliseconds of a step, the mean of a few."""
    begin = time.perf_counter()
    for _ in range(STEPS):
        llm.llm_engine.step()
    return (time.perf_counter() - begin) / STEPS * 1000


def show(found: list[Steps], read_bytes_per_s: float) -> str:
    rows = []
    for each in found:
        low, _, high = quantiles(each.speedups, n=4)
        speedup = f"{median(each.speedups):.2f} ({low:.2f} to {high:.2f})"
        times = (median(each.step_ms), 1000 * each.read_bytes / read_bytes_per_s)
        step, memory = (f"{milliseconds:.2f}" for milliseconds in times)
        rows.append([f"{each.context:,}", each.kv_cache_dtype, step, speedup, memory])
    header = ["context", "KV cache", "step, ms", f"times as fast as\n{found[0].kv_cache_dtype}", "memory alone, ms"]
    return report.table(header, rows)


def benchmark(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    provenance = machine.announce("benchmarks.kv_dtype_steps", arguments)
    bandwidth = machine.read_bandwidth()
    found = []
    with tempfile.TemporaryDirectory() as directory:
        shape = SHAPES["0.6b"] | {"num_hidden_layers": args.layers, "vocab_size": VOCABULARY}
        Path(directory, "config.json").write_text(json.dumps(shape))
        for context in args.contexts:
            found += measure(args, Path(directory), context)
    print(f"\nMemory is read at {bandwidth / 1e9:.1f} GB/s.\n\n{show(found, bandwidth)}")
    content = {"read_bytes_per_s": bandwidth, "steps": to_builtins(found)}
    report.write_json(args.output / "kv_dtype_steps.json", provenance | content)


if __name__ == "__main__":
    command_line.run_script(benchmark)
