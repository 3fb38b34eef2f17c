"""The same problems with and without compression, in a KV pool that holds a quarter of what is wanted.

    python -m benchmarks.demo

A small reasoning model runs programs line by line and explains every step (benchmarks/reasoner). A tenth of its text
are facts, and many of them are looked up far behind, so a wrong choice of what to throw away shows in the answers. The
runs follow each other in one process, on the same problems, greedily. The figures go to problem_set.json and a plot to
problem_set.png.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.common import machine, report
from benchmarks.common.measurement import Measurement
from benchmarks.common.problem_sets import (
    BLOCK_SIZE,
    KARA,
    MAX_NUM_SEQS,
    POOL_FRACTION,
    PROBLEMS,
    ProblemSet,
    Run,
)
from benchmarks.common.variants import Variant, parse_variant
from benchmarks.reasoner.problems import Problem, grade
from kvllm.errors import ConfigError, KvLLMError

SHORT_PROBLEMS, SHORT_MAX_NUM_SEQS = 16, 16
SAMPLES = 3
QUIET = 0.1  # cores that other processes may use without spoiling the times

SHARP = msgspec.structs.replace(KARA, method="kara_sharp")
VARIANTS = (
    Variant("full cache"),
    Variant("Kara, keeps\n1/2", KARA),
    Variant("kara_sharp,\nkeeps 1/2", SHARP),
    Variant("kara_sharp,\nkeeps 1/4", msgspec.structs.replace(SHARP, retain_blocks=4)),
)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--problems", type=int, metavar="N", help=f"how many problems to solve (default {PROBLEMS})")
    add(
        "--short",
        action="store_true",
        help=f"{SHORT_PROBLEMS} problems, {SHORT_MAX_NUM_SEQS} at once, one thread: seconds",
    )
    add("--seed", type=int, default=1, help="of the problems (default 1)")
    add(
        "--variants", nargs="+", metavar="V", help="compare these instead: vanilla, kara:window_blocks=3,buffer=16, ..."
    )
    add("--output", type=Path, default=Path("demo-output"), metavar="DIR")
    args = parser.parse_args(arguments)
    if args.problems is None:
        args.problems = SHORT_PROBLEMS if args.short else PROBLEMS
    if args.problems < 1:
        parser.error(f"--problems {args.problems}: at least 1")
    return args


def describe(variant: Variant) -> str:
    """One line about a variant's settings."""
    compression = variant.compression
    name = _one_line(variant.name)
    if compression is None:
        return f"{name}: no compression"
    kept = (
        f"{compression.retain_blocks} kept"
        if compression.retain_tokens is None
        else f"{compression.retain_tokens} tokens kept"
    )
    return (
        f"{name}: {compression.method}, {compression.policy}, period {compression.period}; windows of "
        f"{compression.window_blocks} blocks, {kept}; buffer {compression.buffer}, chunk budget "
        f"{compression.chunk_budget}; prompts {'compressed too' if compression.compress_prompt else 'kept whole'}"
    )


def show(runs: dict[str, Run]) -> str:
    """The table: a column for each run."""

    def cells(title: str, show_one: Any) -> list[str]:
        return [title, *(show_one(run) for run in runs.values())]

    def count(title: str, field: str) -> list[str]:
        return cells(title, lambda run: f"{getattr(run.measurement, field):,}")

    rows = [
        cells("exact workings", lambda run: _share(run.exact, run)),
        cells("right answers", lambda run: _share(run.right, run)),
        count("output tokens", "output_tokens"),
        cells("output tokens/s", lambda run: f"{run.measurement.output_tokens_per_s:,.0f}"),
        cells("time, s", lambda run: f"{run.measurement.seconds:.1f}"),
        cells("cores busy with other work", lambda run: f"{run.measurement.other_load:.1f}"),
        count("steps", "steps"),
        cells("mean concurrency", lambda run: f"{run.measurement.mean_concurrency:.1f}"),
        count("peak concurrency", "peak_concurrency"),
        count("preemptions", "preemptions"),
        cells("KV of a running sequence, mean", lambda run: report.mib(_kv_of_a_sequence(run.measurement))),
        cells("KV pool", lambda run: report.mib(run.measurement.num_blocks * run.measurement.block_bytes)),
        cells("KV in use, peak", lambda run: report.mib(run.measurement.peak_kv_bytes)),
        cells("KV in use, mean", lambda run: report.mib(run.measurement.mean_blocks * run.measurement.block_bytes)),
        count("compression events", "compression_events"),
        count("windows compressed", "windows_compressed"),
        count("blocks released", "blocks_released"),
    ]
    return report.table(["", *runs], rows)


def _share(number: int, run: Run) -> str:
    total = len(run.grades)
    return f"{number} of {total} ({number / total:.1%})"


def _kv_of_a_sequence(measurement: Measurement) -> float:
    return measurement.mean_blocks / measurement.mean_concurrency * measurement.block_bytes


def compare(first: str, name: str, runs: dict[str, Run]) -> str:
    """One line of ratios against the first run."""
    base, run = runs[first].measurement, runs[name].measurement
    answers = runs[name].right - runs[first].right
    return (
        f"{_one_line(name)} against {_one_line(first)}: "
        f"{run.output_tokens_per_s / base.output_tokens_per_s:.2f}x tokens/s, "
        f"{run.steps / base.steps:.2f}x steps, "
        f"{run.mean_concurrency / base.mean_concurrency:.2f}x concurrency, "
        f"{run.preemptions - base.preemptions:+d} preemptions, {answers:+d} right answers"
    )


def remark(runs: dict[str, Run]) -> str:
    """How far the figures can be trusted."""
    text = "Answers, steps and counts repeat exactly on this machine; times vary."
    if max(run.measurement.other_load for run in runs.values()) > QUIET:
        text += " Other processes were busy during these runs: do NOT compare their times."
    return text


def samples(problems: list[Problem], runs: dict[str, Run]) -> str:
    """A few problems with the end of each run's working: the first one, then those on which the runs differ."""
    differing = [i for i in range(1, len(problems)) if len({run.grades[i] for run in runs.values()}) > 1]
    lines = []
    for i in [0, *differing][:SAMPLES]:
        question = problems[i].prompt.splitlines()[-1]
        lines.append(f"Problem {i + 1} asks {question}, the answer is {problems[i].answer}")
        width = max(len(_one_line(name)) for name in runs)
        for name, run in runs.items():
            ending = "".join(run.texts[i].splitlines()[-1:])
            lines.append(f"  {_one_line(name):{width}}  ...  {ending}  -> {_verdict(problems[i], run.texts[i])}")
    return "\n".join(lines)


def _verdict(problem: Problem, text: str) -> str:
    right, exact = grade(problem, text)
    if exact:
        return "right, every line exact"
    pairs = zip(problem.working.splitlines(), text.splitlines(), strict=False)
    slip = next((number for number, (expected, line) in enumerate(pairs, start=1) if expected != line), None)
    where = "it ends too early" if slip is None else f"line {slip} of the working is the first that differs"
    return f"{'right' if right else 'wrong'}, {where}"


def _one_line(name: str) -> str:
    return name.replace("\n", " ")


def run_demo(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    variants = [parse_variant(text) for text in args.variants] if args.variants else list(VARIANTS)
    if len({variant.name for variant in variants}) < len(variants):
        raise ConfigError(f"--variants {' '.join(args.variants)}: each may be given once")
    if args.short:
        torch.set_num_threads(1)  # threads that wait for each other on a busy machine would take minutes
    problem_set = ProblemSet(args.problems, SHORT_MAX_NUM_SEQS if args.short else MAX_NUM_SEQS, args.seed)
    engines = {variant.name: problem_set.engine(variant) for variant in variants}
    provenance = machine.provenance("benchmarks.demo", arguments)
    print(machine.describe(provenance["machine"]))
    print(problem_set.describe())
    for variant in variants:
        print(f"  {describe(variant)}")

    problem_set.warm_up()
    runs: dict[str, Run] = {}
    for variant in variants:
        print(f"Running: {_one_line(variant.name)} ...", flush=True)
        runs[variant.name] = problem_set.run(variant, use_tqdm=sys.stderr.isatty())
    first, *others = runs

    print(f"\n{show(runs)}\n")
    for name in others:
        print(compare(first, name, runs))
    print(f"\n{samples(problem_set.problems, runs)}\n")
    print(remark(runs))
    content = {
        **provenance,
        "problems": {
            "number": args.problems,
            "seed": args.seed,
            "prompt_tokens": sum(problem_set.prompt_tokens),
            "working_tokens": sum(problem_set.working_tokens),
            "wanted_blocks": problem_set.wanted(BLOCK_SIZE),
        },
        "runs": {
            _one_line(variant.name): {
                "engine": engines[variant.name],
                "compression": msgspec.to_builtins(variant.compression),
                "exact_workings": runs[variant.name].exact,
                "right_answers": runs[variant.name].right,
                "measurement": msgspec.to_builtins(runs[variant.name].measurement),
            }
            for variant in variants
        },
    }
    report.write_json(args.output / "demo.json", content)
    report.plot_timelines(
        args.output / "demo.png",
        f"{args.problems} programs in a KV pool of {POOL_FRACTION:.0%} of the demand",
        {name: run.measurement.timeline for name, run in runs.items()},
        [run.measurement.num_blocks for run in runs.values()],
    )
    print(f"Written: {args.output / 'problem_set.json'}, {args.output / 'problem_set.png'}")


def main() -> None:
    try:
        run_demo(sys.argv[1:])
    except KvLLMError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
