"""The savings and the costs of a plain sliding window: four tables over the window's size.

    python -m benchmarks.paper.sliding_window
    python -m benchmarks.paper.sliding_window --model DIR --prompts math500/test.jsonl --block-size 256 \\
        --windows 1024 4096

Method "sliding_window" under policy "threshold": a sequence that has --drop-blocks blocks more than its window releases
its first blocks, prompt included. Nothing is copied then, except once where a longer prompt does not end at a block.
The full cache and every window size serve the same requests twice: in a pool that holds all of them (memory, agreement
of the greedy tokens), and in a pool that holds a share of the full cache's demand (preemptions, concurrency). All
counts repeat exactly; none of them depends on time. The paper has no settings for this: by default the model of the
package works out its own problems. The figures go to sliding_window.json, a plot to sliding_window.png.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from msgspec import Struct

from benchmarks.common import command_line, engines, report, runs
from benchmarks.common.jobs import Job, make_engine, serve
from benchmarks.common.measurement import Measurement
from benchmarks.common.variants import Variant
from benchmarks.common.workloads import Request
from kvllm.config import CompressionConfig, EngineConfig, require
from kvllm.core.capacity import peak_blocks
from kvllm.core.policies import make_policy

FULL = "full cache"
PRESETS: dict[str, runs.Preset] = {
    "reasoner": {
        "model": runs.REASONER,
        "num_prompts": 240,
        "input_len": 128,
        "output_median": 2048,
        "output_sigma": 0.8,
        "max_output_len": 8192,
        "block_size": 16,
        "max_num_seqs": 64,
        "pool_fraction": 0.25,
        "windows": [64, 128, 256, 384, 512, 640, 768],
    },
}
PRESETS["cpu"] = PRESETS["reasoner"] | {"num_prompts": 24, "max_num_seqs": 16, "windows": [128, 256, 512, 768]}


class Agreement(Struct):
    """A comparison of a run's greedy tokens with the full cache's.

    equal_tokens: share of all positions. identical: share of the requests without any difference. first_difference: the
    median, over the other requests, of the tokens generated before the first difference; None if there are no others.
    """

    equal_tokens: float
    identical: float
    first_difference: float | None


class Result(Struct):
    """One window size, or the full cache.

    sequence_blocks: most blocks that the longest request needs. ample, small: the runs in the two pools.
    """

    window: int | None
    sequence_blocks: int
    ample: Measurement
    small: Measurement
    agreement: Agreement


def agreement(tokens: Sequence[Sequence[int]], full: Sequence[Sequence[int]]) -> Agreement:
    """Compare texts of equal length."""
    equal = [[a == b for a, b in zip(one, other, strict=True)] for one, other in zip(tokens, full, strict=True)]
    first = [each.index(False) for each in equal if not all(each)]
    return Agreement(
        equal_tokens=sum(map(sum, equal)) / sum(map(len, equal)),
        identical=1 - len(first) / len(equal),
        first_difference=median(first) if first else None,
    )


def window_config(args: argparse.Namespace, window: int) -> CompressionConfig:
    return CompressionConfig(
        method="sliding_window",
        policy="threshold",
        threshold_tokens=window + args.drop_blocks * args.block_size,
        budget_tokens=window,
        buffer=0,
    )


def blocks_for_all(args: argparse.Namespace, requests: Sequence[Request]) -> int:
    """Blocks that hold any `--max-num-seqs` requests at their ends."""
    require(args.block_size >= 1, "--block-size", args.block_size, "between 1 and 256")
    blocks = sorted((-(-request.kv_pairs // args.block_size) for request in requests), reverse=True)
    return sum(blocks[: args.max_num_seqs])


def make_jobs(
    args: argparse.Namespace, path: Path, model: Any, requests: list[Request], num_blocks: int | None
) -> dict[int | None, Job]:
    """Jobs of the full cache (None) and every window. num_blocks: of the pool; None for the size in the arguments."""
    options = argparse.Namespace(**vars(args))
    options.num_gpu_blocks_override = num_blocks or args.num_gpu_blocks_override
    jobs: dict[int | None, Job] = {None: engines.make_job(options, Variant(FULL), path, model, requests)}
    for window in args.windows:
        variant = Variant(f"window {window}", window_config(args, window))
        jobs[window] = engines.make_job(options, variant, path, model, requests)
    return jobs


def sequence_blocks(job: Job) -> int:
    """Most blocks that the longest of a job's requests needs while it runs alone."""
    names = ("max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens")
    config = EngineConfig(
        num_blocks=job.engine["num_gpu_blocks_override"],
        compression=job.compression,
        **{name: job.engine[name] for name in names},
    )
    policy = make_policy(config)
    regions = policy and policy.group_regions
    return max(peak_blocks(config, regions, len(r.prompt_token_ids), r.kv_pairs) for r in job.requests)


def generate(job: Job) -> tuple[list[list[int]], Measurement]:
    outputs, measurement = serve(make_engine(job), job.requests, job.name)
    return [output.outputs[0].token_ids for output in outputs], measurement


# Tables


def memory_table(results: Sequence[Result]) -> str:
    full = results[0].ample
    rows = [
        [
            _name(result),
            report.mib(result.ample.mean_blocks * result.ample.block_bytes),
            f"{1 - result.ample.mean_blocks / full.mean_blocks:.1%}",
            report.mib(result.ample.peak_kv_bytes),
            f"{1 - result.ample.peak_blocks / full.peak_blocks:.1%}",
            f"{result.ample.entries_evicted:,}",
        ]
        for result in results
    ]
    header = ["1. memory, in a pool that holds all", "KV in use,\nmean", "saved", "peak", "saved", "KV pairs\nevicted"]
    return report.table(header, rows)


def preemption_table(results: Sequence[Result]) -> str:
    full = results[0].small
    rows = [
        [
            _name(result),
            f"{result.small.preemptions:,}",
            f"{full.preemptions - result.small.preemptions:,}",
            f"{result.small.tokens_recomputed:,}",
            f"{result.small.steps:,}",
        ]
        for result in results
    ]
    header = [f"2. preemptions, in a pool of {full.num_blocks} blocks", "preemp-\ntions", "avoided"]
    return report.table([*header, "tokens re-\ncomputed", "steps"], rows)


def agreement_table(results: Sequence[Result]) -> str:
    rows = []
    for result in results[1:]:
        first = result.agreement.first_difference
        rows.append(
            [
                _name(result),
                f"{result.agreement.equal_tokens:.1%}",
                f"{result.agreement.identical:.1%}",
                "none" if first is None else f"{first:,.0f}",
            ]
        )
    header = ["3. greedy tokens against the full cache", "equal\ntokens", "identical\nrequests"]
    return report.table([*header, "first difference,\nmedian: token"], rows)


def capacity_table(results: Sequence[Result]) -> str:
    pool = results[0].small.num_blocks
    rows = [
        [
            _name(result),
            f"{result.sequence_blocks:,}",
            f"{pool // result.sequence_blocks:,}",
            f"{result.small.peak_concurrency:,}",
            f"{result.small.mean_concurrency:.1f}",
        ]
        for result in results
    ]
    header = [
        f"4. batch capacity, in a pool of {pool} blocks",
        "longest request,\nblocks",
        "requests that\nfit at their peak",
    ]
    return report.table([*header, "peak con-\ncurrency", "mean"], rows)


def _name(result: Result) -> str:
    return FULL if result.window is None else f"window {result.window}"


def limit_text(args: argparse.Namespace, results: Sequence[Result]) -> str:
    pair_bytes = results[0].ample.block_bytes // args.block_size
    return (
        f"The limit: a KV pair takes {pair_bytes:,} bytes. So a window of W KV pairs takes at least {pair_bytes:,} W "
        f"bytes, and holds up to\n{args.drop_blocks} x {args.block_size} KV pairs more before it moves. A prompt is "
        "computed whole before its window applies. Published: nothing is known."
    )


def plot(path: Path, title: str, results: Sequence[Result]) -> None:
    windows = [result.window or 0 for result in results[1:]]

    def lines(value: Any) -> dict[str, report.Line]:
        full = value(results[0])
        return {
            "sliding window": (windows, [value(result) for result in results[1:]]),
            FULL: (windows, [full] * len(windows)),
        }

    panels = {
        "KV in use, mean (MiB)": lines(lambda r: r.ample.mean_blocks * r.ample.block_bytes / report.MIB),
        "preemptions": lines(lambda r: r.small.preemptions),
        "equal tokens (%)": lines(lambda r: 100 * r.agreement.equal_tokens),
        "mean running sequences": lines(lambda r: r.small.mean_concurrency),
    }
    report.plot_lines(path, title, "window (KV pairs)", panels)


# The whole


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = runs.make_parser("benchmarks.paper.sliding_window", __doc__, PRESETS)
    add = parser.add_argument
    add("--windows", type=int, nargs="+", help="window sizes, in KV pairs")
    add("--drop-blocks", type=int, default=1, help="blocks released at a time (default 1)")
    engines.add_engine_arguments(parser)("--max-num-seqs", type=int, help="most running sequences")
    args = runs.parse(parser, PRESETS, arguments)
    command_line.require_unique("--windows", args.windows)
    for window in args.windows:
        require(window >= 1, "--windows", window, "at least 1")
    command_line.require_positive(args, "drop_blocks")
    return args


def measure_windows(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as directory:
        path, model = runs.find_model(args, Path(directory))
        workload, requests = runs.make_requests(args, path, model)
        ample = make_jobs(args, path, model, requests, blocks_for_all(args, requests))
        small = make_jobs(args, path, model, requests, None)
        totals = runs.totals(workload, requests)
        provenance = runs.announce("benchmarks.paper.sliding_window", arguments, totals)
        full: list[list[int]] = []
        for window, job in ample.items():
            tokens, in_ample = generate(job)
            full = full or tokens
            in_small = generate(small[window])[1]
            blocks = sequence_blocks(job)
            results.append(Result(window, blocks, in_ample, in_small, agreement(tokens, full)))
            print(f"{_name(results[-1])}: done", flush=True)
    for table in (memory_table, preemption_table, agreement_table, capacity_table):
        print(f"\n{table(results)}")
    print(f"\n{limit_text(args, results)}")
    content = {
        **provenance,
        "model": {"name": args.model, **msgspec.to_builtins(model)},
        "workload": totals,
        "results": [_to_json(result, ample[result.window], args.model) for result in results],
    }
    report.write_json(args.output / "sliding_window.json", content)
    plot(args.output / "sliding_window.png", f"{args.model}: a sliding window", results)
    print(f"Written: {args.output / 'sliding_window.json'}, {args.output / 'sliding_window.png'}")


def _to_json(result: Result, job: Job, model: str) -> Mapping[str, Any]:
    return {
        **msgspec.to_builtins(result),
        "engine": job.engine | {"model": model},
        "compression": msgspec.to_builtins(job.compression),
    }


if __name__ == "__main__":
    command_line.run_script(measure_windows)
