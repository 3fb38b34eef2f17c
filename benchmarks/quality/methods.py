"""Every method under every policy that allows it, on the same problems: answers, speed, memory.

    python -m benchmarks.quality.methods

The problems are those of the demo (benchmarks/demo.py): a small reasoning model runs programs line by line, in a KV
pool of a quarter of the demand. By windows ("periodic", "pressure") a method keeps a quarter of each window of 256 KV
pairs. By threshold it cuts a cache of 832 KV pairs to 768, about as many as the windows leave of a sequence at its end.
The prompt stays whole. The figures go to methods.json, a plot to methods.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from matplotlib.figure import Figure

from benchmarks.common import command_line, machine, report
from benchmarks.common.problem_sets import MAX_NUM_SEQS, PROBLEMS, ProblemSet, Run
from benchmarks.common.variants import Variant
from kvllm import CompressionConfig
from kvllm.compression.specs import SPECS
from kvllm.config import require

POLICIES = ("periodic", "pressure", "threshold")
WINDOWS = {"period": 32, "window_blocks": 16, "retain_blocks": 4}
THRESHOLD = {"threshold_tokens": 832, "budget_tokens": 768, "protect_prompt": True}
OPTIONS: dict[str, Any] = {"buffer": 32, "query_window": 32, "chunk_budget": 8}


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.quality.methods", __doc__)
    add = parser.add_argument
    add("--methods", nargs="+", choices=SPECS, default=tuple(SPECS), metavar="M", help="default: all methods")
    add("--policies", nargs="+", choices=POLICIES, default=POLICIES, metavar="P", help="default: all policies")
    add("--problems", type=int, default=PROBLEMS, metavar="N", help=f"number of problems (default {PROBLEMS})")
    at_once = f"most sequences at once (default {MAX_NUM_SEQS})"
    add("--max-num-seqs", type=int, default=MAX_NUM_SEQS, metavar="N", help=at_once)
    add("--seed", type=int, default=1, help="seed of the problems (default 1)")
    add("--threads", type=int, help="threads of torch (default: all cores)")
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    for field in ("problems", "max_num_seqs"):
        require(getattr(args, field) >= 1, f"--{field.replace('_', '-')}", getattr(args, field), "at least 1")
    require(args.threads is None or args.threads >= 1, "--threads", args.threads, "at least 1")
    return args


def variants(methods: Sequence[str], policies: Sequence[str]) -> list[Variant]:
    """The full cache, then each method under each policy that allows it."""
    found = [Variant("full cache")]
    for policy in policies:
        sizes: dict[str, Any] = THRESHOLD if policy == "threshold" else WINDOWS
        for method in methods:
            if SPECS[method].refusal(policy):
                continue
            found.append(
                Variant(f"{method}, {policy}", CompressionConfig(method=method, policy=policy, **sizes, **OPTIONS))
            )
    return found


def show(runs: dict[str, Run]) -> str:
    rows = []
    for name, run in runs.items():
        measured = run.measurement
        events = measured.recompute_seconds + measured.score_seconds + measured.compact_seconds
        kv = measured.mean_blocks / measured.mean_concurrency * measured.block_bytes
        rows.append(
            [
                name,
                f"{run.exact / len(run.grades):.1%}",
                f"{run.right / len(run.grades):.1%}",
                f"{measured.output_tokens_per_s:,.0f}",
                f"{measured.steps:,}",
                f"{measured.mean_concurrency:.1f}",
                f"{measured.preemptions}",
                report.mib(kv),
                f"{1e3 * events / measured.windows_compressed:.2f}" if measured.windows_compressed else "",
            ]
        )
    header = ["", "exact\nworkings", "right\nanswers", "output\ntokens/s", "steps", "mean\nconcurrency", "preempted"]
    return report.table([*header, "KV of a\nsequence", "ms for\na window"], rows)


def plot(path: Path, runs: dict[str, Run]) -> None:
    """Exact workings over the memory of a running sequence, a point for each variant."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for name, run in runs.items():
        policy = name.partition(", ")[2]
        colour = report.COLOURS[POLICIES.index(policy) if policy else len(POLICIES)]
        measured = run.measurement
        kv = measured.mean_blocks / measured.mean_concurrency * measured.block_bytes / report.MIB
        exact = 100 * run.exact / len(run.grades)
        axes.plot(kv, exact, "o", color=colour)
        axes.annotate(name, (kv, exact), fontsize=7, xytext=(4, 3), textcoords="offset points")
    axes.set(xlabel="KV of a running sequence, mean (MiB)", ylabel="exact workings (%)", ylim=(-2, 104))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    report.save(path, figure)


def run_methods(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    problem_set = ProblemSet(args.problems, args.max_num_seqs, args.seed)
    provenance = machine.provenance("benchmarks.quality.methods", arguments)
    print(f"{machine.describe(provenance['machine'])}\n{problem_set.describe()}")
    problem_set.warm_up()
    chosen = variants(args.methods, args.policies)
    runs: dict[str, Run] = {}
    for variant in chosen:
        print(f"Running: {variant.name} ...", flush=True)
        runs[variant.name] = problem_set.run(variant)
    print(f"\n{show(runs)}\nEach ran once, one after the other: for speed, see benchmarks.throughput.")
    content: dict[str, Any] = {
        variant.name: {
            "compression": msgspec.to_builtins(variant.compression),
            "exact_workings": runs[variant.name].exact,
            "right_answers": runs[variant.name].right,
            "measurement": msgspec.to_builtins(runs[variant.name].measurement),
        }
        for variant in chosen
    }
    report.write_json(args.output / "methods.json", {**provenance, "problems": args.problems, "runs": content})
    plot(args.output / "methods.png", runs)
    print(f"Written: {args.output / 'methods.json'}, {args.output / 'methods.png'}")


def main() -> None:
    command_line.run_script(run_methods)


if __name__ == "__main__":
    main()
