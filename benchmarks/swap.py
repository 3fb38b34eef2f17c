"""Where it pays to swap preempted sequences to host memory.

    python -m benchmarks.swap

First the same requests, all at once in a small KV pool, with `swap` "never", "always" and "auto": each run is a process
of its own, and the modes take turns. Then one sequence of each length that is preempted both ways, and the time until
its next token. The figures go to swap.json.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.common import command_line, jobs, machine, report, shapes, summary, workloads
from benchmarks.common.internals import engine_of
from benchmarks.common.jobs import Job
from kvllm import LLM, SamplingParams
from kvllm.config import require
from kvllm.models.config import load_model_config

MODES = ("never", "always", "auto")
BLOCK_SIZE, HOST_GIB = 16, 2.0
FIGURES = ("output_tokens_per_s", "seconds", "prefill_seconds", "decode_seconds", "mean_latency", "mean_concurrency")
FIGURES += ("preemptions", "tokens_recomputed", "swapped_out", "blocks_loaded", "other_load")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.swap", __doc__)
    add = parser.add_argument
    add("--model", default="50m", help=shapes.MODEL_HELP)
    add("--requests", type=int, default=8, help="all arrive at once (default 8)")
    add("--input-len", type=int, default=512, help="tokens of a prompt (default 512)")
    add("--output-len", type=int, default=1024, help="tokens generated for it (default 1024)")
    add("--pool-fraction", type=float, default=0.25, help="share of the blocks that all would fill (default 0.25)")
    lengths = "of the sequences that are preempted alone"
    add("--lengths", type=int, nargs="+", default=[32, 128, 512, 2048], help=lengths)
    add("--repeats", type=int, default=3, help="runs of each mode, and preemptions of each length (default 3)")
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    command_line.require_positive(args, "requests", "input_len", "output_len", "repeats")
    require(0 < args.pool_fraction <= 1, "--pool-fraction", args.pool_fraction, "above 0, at most 1")
    return args


def engine_options(args: argparse.Namespace, longest: int, max_num_seqs: int, blocks: int) -> dict[str, Any]:
    return {
        "load_format": "dummy" if args.model in shapes.SHAPES else "auto",
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": 512,
        "max_model_len": longest,
        "max_num_seqs": max_num_seqs,
        "num_gpu_blocks_override": blocks,
        "kv_offloading_size": HOST_GIB,
        "enable_prefix_caching": False,  # or what is computed again would be found in the pool
    }


def make_jobs(args: argparse.Namespace, path: Path) -> dict[str, Job]:
    """The same requests in each mode."""
    lengths = [(args.input_len, args.output_len)] * args.requests
    requests = workloads.random_requests(random.Random(0), lengths, load_model_config(path).vocab_size)
    alone = -(-requests[0].kv_pairs // BLOCK_SIZE)
    blocks = max(alone, int(args.pool_fraction * args.requests * alone))
    engine = engine_options(args, args.input_len + args.output_len, args.requests, blocks)
    return {
        mode: Job(name=mode, model=str(path), engine=engine | {"swap": mode}, compression=None, requests=requests)
        for mode in MODES
    }


# A sequence alone


def time_to_return(llm: LLM, length: int, seed: int) -> float:
    """Seconds from a preemption of a sequence of `length` tokens until it has its next token."""
    engine = engine_of(llm)
    prompt = random.Random(seed).choices(range(llm.model_config.vocab_size), k=length - 4)
    output = engine.add_request("0", prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    token_ids = output.outputs[0].token_ids
    while len(token_ids) < 4:
        engine.step()
    engine.scheduler.batch.preempt(engine.scheduler.step, engine.scheduler.running[0])
    begin = time.perf_counter()
    while len(token_ids) < 5:
        engine.step()
    seconds = time.perf_counter() - begin
    engine.abort("0")
    return seconds


def sweep(args: argparse.Namespace, path: Path) -> list[dict[str, float]]:
    """For each length the bytes of both ways together, and the medians in milliseconds."""
    options = engine_options(args, max(args.lengths) + 16, 1, max(args.lengths) // BLOCK_SIZE + 2)
    engines = {mode: LLM(path, swap=mode, **options) for mode in MODES[:2]}
    found = []
    for length in args.lengths:
        times: dict[str, list[float]] = {mode: [] for mode in engines}
        for repeat in range(args.repeats + 1):
            for mode, llm in engines.items():
                times[mode].append(time_to_return(llm, length, repeat))
        again, swapped = (1000 * median(each[1:]) for each in times.values())  # the first warms up
        moved = 2 * -(-length // BLOCK_SIZE) * engines["always"].cache_shape.bytes_per_block
        found.append({"tokens": length, "bytes": moved, "again_ms": again, "swapped_ms": swapped})
    return found


def show_sweep(rows: list[dict[str, float]]) -> str:
    header = ["tokens", "moved, MiB", "computed\nagain, ms", "swapped,\nms"]
    shapes = ("{}", "{:.1f}", "{:.1f}", "{:.1f}")
    scaled = [row | {"bytes": row["bytes"] / report.MIB} for row in rows]
    return report.table(
        header, [[s.format(value) for s, value in zip(shapes, r.values(), strict=True)] for r in scaled]
    )


def benchmark(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    with tempfile.TemporaryDirectory() as directory:
        path = shapes.find_model(args.model, Path(directory))
        provenance = machine.announce("benchmarks.swap", arguments)
        runs = jobs.run_all(make_jobs(args, path), args.repeats)
        print(f"\nMedians of {args.repeats} runs (least-most).\n\n{summary.show(runs, FIGURES)}\n")
        alone = sweep(args, path)
    print(f"One sequence, medians of {args.repeats}.\n\n{show_sweep(alone)}\n")
    content = {"ratios": summary.ratios(runs), "runs": msgspec.to_builtins(runs), "alone": alone}
    report.write_json(args.output / "swap.json", provenance | content)


if __name__ == "__main__":
    command_line.run_script(benchmark)
