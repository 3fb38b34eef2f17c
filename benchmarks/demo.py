"""The same problems with and without compression, in a KV pool that holds a quarter of what is wanted.

    python -m benchmarks.demo

A small reasoning model runs programs line by line and explains every step (benchmarks/reasoner). A tenth of its text
are facts, and many of them are looked up far behind, so a wrong choice of what to throw away shows in the answers. The
runs follow each other in one process, on the same problems, greedily. The figures go to demo.json and a plot to
demo.png.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import torch
from msgspec import Struct

from benchmarks import report, workloads
from benchmarks.reasoner.problems import Problem, grade
from benchmarks.reasoner.tasks import make_problem
from benchmarks.reasoner.tokenizer import encode
from benchmarks.variants import Measurement, Variant, measure, parse_variant
from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.errors import ConfigError, KvLLMError

LINES = (26, 40)  # programs of equal length would run in waves, and the last wave decide the time
BLOCK_SIZE = 16
POOL_FRACTION = 0.25
MAX_TOKENS = 1800  # the longest working has about 1,600
PROBLEMS, MAX_NUM_SEQS = 120, 48
SHORT_PROBLEMS, SHORT_MAX_NUM_SEQS = 16, 16
SAMPLES = 3
QUIET = 0.1  # cores that other processes may use without spoiling the times

# A window has to be as long as it takes until most facts were looked up once: shorter ones keep the wrong entries.
KARA = CompressionConfig(policy="pressure", period=32, window_blocks=16, retain_blocks=8, buffer=32, chunk_budget=8)
SHARP = msgspec.structs.replace(KARA, method="kara_sharp")
VARIANTS = (
    Variant("full cache"),
    Variant("Kara, keeps\n1/2", KARA),
    Variant("kara_sharp,\nkeeps 1/2", SHARP),
    Variant("kara_sharp,\nkeeps 1/4", msgspec.structs.replace(SHARP, retain_blocks=4)),
)


class Run(Struct):
    """One variant's pass over all problems: texts, and for each (right answer, exact working)."""

    measurement: Measurement
    texts: list[str]
    grades: list[tuple[bool, bool]]

    @property
    def right(self) -> int:
        return sum(right for right, _ in self.grades)

    @property
    def exact(self) -> int:
        return sum(exact for _, exact in self.grades)


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


class Demo:
    """The problems, and the engines that solve them."""

    def __init__(self, num_problems: int, max_num_seqs: int, seed: int) -> None:
        rng = random.Random(seed)
        self.problems = [make_problem(rng, rng.randint(*LINES)) for _ in range(num_problems)]
        self.max_num_seqs = max_num_seqs
        self.prompt_tokens = [len(encode(problem.prompt)) for problem in self.problems]
        self.working_tokens = [len(encode(problem.working)) for problem in self.problems]

    def wanted(self, block_size: int) -> int:
        """Blocks that `max_num_seqs` sequences fill at their ends, going by the mean."""
        entries = [sum(pair) for pair in zip(self.prompt_tokens, self.working_tokens, strict=True)]
        return workloads.demand(entries, block_size, self.max_num_seqs)

    def engine(self, variant: Variant) -> dict[str, Any]:
        """Keywords of `LLM` for a variant. Raises ConfigError if its compression does not fit its block size."""
        block_size = variant.engine.get("block_size", BLOCK_SIZE)
        if variant.compression:
            variant.compression.retained(block_size)
        return {
            "dtype": "bfloat16",
            "block_size": block_size,
            "max_num_seqs": self.max_num_seqs,
            "num_gpu_blocks_override": int(POOL_FRACTION * self.wanted(block_size)),
            **variant.engine,
        }

    def warm_up(self) -> None:
        """Bring up threads, caches and kernels with a few problems that are not counted."""
        llm = LLM(compression=KARA, **self.engine(Variant("warm-up")))
        prompts = [problem.prompt for problem in Demo(4, 4, seed=0).problems]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=160), use_tqdm=False)

    def run(self, variant: Variant, use_tqdm: bool = False) -> Run:
        """Solve the problems in a fresh engine."""
        llm = LLM(compression=variant.compression, **self.engine(variant))
        sampling_params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        outputs, measurement = measure(llm, [problem.prompt for problem in self.problems], sampling_params, use_tqdm)
        texts = [output.outputs[0].text for output in outputs]
        grades = [grade(problem, text) for problem, text in zip(self.problems, texts, strict=True)]
        return Run(measurement, texts, grades)

    def describe(self) -> str:
        wanted, pool = self.wanted(BLOCK_SIZE), self.engine(VARIANTS[0])["num_gpu_blocks_override"]
        return (
            f"{len(self.problems)} programs of {LINES[0]} to {LINES[1]} lines, on average "
            f"{mean(self.prompt_tokens):.0f} tokens of prompt and {mean(self.working_tokens):.0f} of working; "
            f"up to {self.max_num_seqs} run at once.\n"
            f"{self.max_num_seqs} sequences end with {wanted} KV blocks of {BLOCK_SIZE} tokens. The pool has {pool}, "
            f"{POOL_FRACTION:.0%} of that."
        )


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
    demo = Demo(args.problems, SHORT_MAX_NUM_SEQS if args.short else MAX_NUM_SEQS, args.seed)
    engines = {variant.name: demo.engine(variant) for variant in variants}
    provenance = report.provenance("benchmarks.demo", arguments)
    print(report.describe(provenance["machine"]))
    print(demo.describe())
    for variant in variants:
        print(f"  {describe(variant)}")

    demo.warm_up()
    runs: dict[str, Run] = {}
    for variant in variants:
        print(f"Running: {_one_line(variant.name)} ...", flush=True)
        runs[variant.name] = demo.run(variant, use_tqdm=sys.stderr.isatty())
    first, *others = runs

    print(f"\n{show(runs)}\n")
    for name in others:
        print(compare(first, name, runs))
    print(f"\n{samples(demo.problems, runs)}\n")
    print(remark(runs))
    content = {
        **provenance,
        "problems": {
            "number": args.problems,
            "seed": args.seed,
            "prompt_tokens": sum(demo.prompt_tokens),
            "working_tokens": sum(demo.working_tokens),
            "wanted_blocks": demo.wanted(BLOCK_SIZE),
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
    print(f"Written: {args.output / 'demo.json'}, {args.output / 'demo.png'}")


def main() -> None:
    try:
        run_demo(sys.argv[1:])
    except KvLLMError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
