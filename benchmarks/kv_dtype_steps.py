"""Decode steps over KV pairs of each dtype, side by side.

    python -m benchmarks.kv_dtype_steps --contexts 128 4096

The model has layers of the shape of Qwen3-0.6B and random weights. For each dtype an engine holds the same sequences,
and the engines take turns with a few steps each, so that all of them meet the machine in the same state. The table has
the median of a step, and the median of the ratios to the first dtype in the same turns with their quartiles. The
figures go to kv_dtype_steps.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

from msgspec import Struct, to_builtins

from benchmarks.common import command_line, machine, report
from benchmarks.common.sequences import add_sequences
from benchmarks.common.shapes import SHAPES
from kvllm import LLM
from kvllm.comparison.kv_caches import check_kv_cache, kv_cache_options
from kvllm.config import require

STEPS = 5
"""Of an engine in a turn."""
BLOCK_SIZE = 16
VOCABULARY = 8192
DTYPES = ("auto", "int8", "int6_int4_hadamard", "int4_hadamard")


class Steps(Struct):
    """Of one dtype with one context: milliseconds of each turn's mean step, and how much faster than the first dtype's
    in the same turn."""

    kv_cache_dtype: str
    context: int
    step_ms: list[float]
    speedups: list[float]


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.kv_dtype_steps", __doc__)
    add = parser.add_argument
    dtypes = f"default: {' '.join(DTYPES)}; int4_hadamard+32 has a residual of 32 tokens"
    add("--kv-cache-dtypes", nargs="+", default=DTYPES, metavar="D", help=dtypes)
    prompt = "tokens of a prompt (default 128 512 4096)"
    add("--contexts", type=int, nargs="+", default=[128, 512, 4096], help=prompt)
    add("--sequences", type=int, default=8, help="that decode together (default 8)")
    add("--layers", type=int, default=4, help="default 4")
    add("--turns", type=int, default=30, help=f"of {STEPS} steps for each dtype (default 30)")
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
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
        **kv_cache_options(kv_cache_dtype)._asdict(),
        block_size=BLOCK_SIZE,
        max_num_seqs=args.sequences,
        num_gpu_blocks_override=blocks + 1,
        enable_prefix_caching=False,
        max_model_len=tokens,
    )
    add_sequences(llm, args.sequences, context, tokens - context)
    return llm


def measure(args: argparse.Namespace, path: Path, context: int) -> list[Steps]:
    engines = {dtype: make_engine(args, path, dtype, context) for dtype in args.kv_cache_dtypes}
    times: dict[str, list[float]] = {dtype: [] for dtype in engines}
    for turn in range(1 + args.turns):
        for dtype, llm in engines.items():
            begin = time.perf_counter()
            for _ in range(STEPS):
                llm.llm_engine.step()
            if turn:  # the first one warms up
                times[dtype].append((time.perf_counter() - begin) / STEPS * 1000)
    for llm in engines.values():
        llm.llm_engine.close()
    first = times[args.kv_cache_dtypes[0]]
    return [
        Steps(dtype, context, own, [base / mine for base, mine in zip(first, own, strict=True)])
        for dtype, own in times.items()
    ]


def show(found: list[Steps]) -> str:
    rows = []
    for each in found:
        low, _, high = quantiles(each.speedups, n=4)
        speedup = f"{median(each.speedups):.2f} ({low:.2f} to {high:.2f})"
        rows.append([f"{each.context:,}", each.kv_cache_dtype, f"{median(each.step_ms):.2f}", speedup])
    return report.table(["context", "KV cache", "step, ms", f"times as fast as\n{found[0].kv_cache_dtype}"], rows)


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
    print(f"\nMemory is read at {bandwidth / 1e9:.1f} GB/s.\n\n{show(found)}")
    content = {"read_bytes_per_s": bandwidth, "steps": to_builtins(found)}
    report.write_json(args.output / "kv_dtype_steps.json", provenance | content)


if __name__ == "__main__":
    command_line.run_script(benchmark)
