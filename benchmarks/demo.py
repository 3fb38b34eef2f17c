"""The same problems with and without compression, in a KV pool of a quarter of the demand.

    python -m benchmarks.demo

A small reasoning model runs programs line by line and explains every step (benchmarks/reasoner). A tenth of its text
are facts, and many of them are looked up again from far away. So the answers show a compression that drops the wrong KV
pairs. The runs follow each other in one process, on the same problems, greedily. With `--repeats` the variants take
turns, and times are medians. The figures go to demo.json.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

import msgspec
import torch
from msgspec import Struct

from benchmarks.common import command_line, machine, report, summary, workloads
from benchmarks.common.measurement import Measurement, measure
from benchmarks.common.variants import Variant
from benchmarks.reasoner.problems import Problem, grade
from benchmarks.reasoner.tasks import make_problem
from benchmarks.reasoner.tokenizer import encode
from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.engine_args import DEFAULT_MODEL, EngineArgs
from kvllm.engine_builder import cache_shape

# The problems, and the engines that solve them

LINES = (26, 40)  # programs of equal length would run in waves, and the last wave would decide the time
DTYPE, BLOCK_SIZE = "bfloat16", 16
POOL_FRACTION = 0.25
MAX_TOKENS = 1800  # the longest working has about 1,600
PROBLEMS, MAX_NUM_SEQS = 120, 48

# A window must last until most facts were looked up once: a shorter one keeps the wrong KV pairs.
KARA = CompressionConfig(
    method="kara", policy="pressure", period=32, window_blocks=16, retain_blocks=8, buffer=32, chunk_budget=8
)


class Run(Struct):
    """One variant's pass over all problems. grades: (right answer, exact working) of each text."""

    measurement: Measurement
    texts: list[str]
    grades: list[tuple[bool, bool]]


class ProblemSet:
    """The problems, and the engines that solve them, whose pools have the same bytes."""

    def __init__(self, num_problems: int, max_num_seqs: int, seed: int) -> None:
        rng = random.Random(seed)
        self.problems = [make_problem(rng, rng.randint(*LINES)) for _ in range(num_problems)]
        self.prompt_tokens = [len(encode(problem.prompt)) for problem in self.problems]
        self.working_tokens = [len(encode(problem.working)) for problem in self.problems]
        kv_pairs = [sum(tokens) for tokens in zip(self.prompt_tokens, self.working_tokens, strict=True)]
        self.wanted = workloads.demand(kv_pairs, BLOCK_SIZE, max_num_seqs)
        self.pool = int(POOL_FRACTION * self.wanted)
        self.engine: dict[str, Any] = {"dtype": DTYPE, "block_size": BLOCK_SIZE, "max_num_seqs": max_num_seqs}
        plain = cache_shape(EngineArgs(DEFAULT_MODEL, **self.engine)).bytes_per_block
        self.engine["kv_cache_memory_bytes"] = self.pool * plain

    def warm_up(self) -> None:
        """Solve a few problems that do not count, so that threads, caches and kernels are ready."""
        llm = LLM(compression=KARA, **self.engine)
        prompts = [problem.prompt for problem in ProblemSet(4, 4, seed=0).problems]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=160), use_tqdm=False)

    def run(self, variant: Variant) -> Run:
        """Solve the problems in a fresh engine, and show the progress."""
        llm = LLM(compression=variant.compression, **self.engine, **variant.engine)
        sampling_params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        outputs, measurement = measure(llm, [problem.prompt for problem in self.problems], sampling_params)
        texts = [output.outputs[0].text for output in outputs]
        grades = [grade(problem, text) for problem, text in zip(self.problems, texts, strict=True)]
        return Run(measurement, texts, grades)

    def describe(self) -> str:
        return (
            f"{len(self.problems)} programs, on average {mean(self.prompt_tokens):.0f} tokens of prompt and "
            f"{mean(self.working_tokens):.0f} of working. {self.engine['max_num_seqs']} sequences end with "
            f"{self.wanted} KV blocks of {BLOCK_SIZE} tokens; the pool has {self.pool}, {POOL_FRACTION:.0%} of that."
        )


# The variants and their figures

SERVE = """
The same model behind an OpenAI API, at http://127.0.0.1:8000 (docs/serving.md):
  .venv/bin/kvllm serve
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"prompt": "words: d3,f9,Y0,x9\\n#>d+f=k\\nk>k-Y=Q\\nQ>?Q,k,f\\n", "temperature": 0, "max_tokens": 400}'"""
SHORT_PROBLEMS, SHORT_MAX_NUM_SEQS = 16, 16
SAMPLES = 3
VERDICTS = {(True, True): "right, every line exact", (True, False): "right", (False, False): "wrong"}

Runs = Mapping[str, Sequence[Run]]
"""The runs of each variant."""

CALIBRATED = CompressionConfig(
    method="expected_attention_calibrated", policy=KARA.policy, buffer=KARA.buffer, layer_groups="auto"
)
QUARTER = msgspec.structs.replace(CALIBRATED, policy=msgspec.structs.replace(KARA.policy, retain_blocks=4))
VARIANTS = (
    Variant("full cache"),
    Variant("Kara, keeps 1/2", KARA),
    Variant("calibrated, keeps 1/2", CALIBRATED),
    Variant("calibrated, keeps 1/4", QUARTER),
    Variant("int4, calibrated, keeps 1/2", CALIBRATED, {"kv_cache_dtype": "int4"}),
)

FIGURES = ("output_tokens_per_s", "seconds", "other_load", "mean_concurrency", "steps", "preemptions")
FIGURES += ("compression_events", "blocks_released")


def show(runs: Runs) -> str:
    """A table with a column for each variant. Answers are of its first run, the other figures of all of them."""
    rows = []
    for index, title in enumerate(("right answers", "exact workings")):
        grades = [first.grades for first, *_ in runs.values()]
        shares = [(sum(grade[index] for grade in each), len(each)) for each in grades]
        rows.append([title, *(f"{number} of {total}" for number, total in shares)])
    return summary.show({name: [run.measurement for run in each] for name, each in runs.items()}, FIGURES, rows)


def samples(problems: list[Problem], runs: Runs) -> str:
    """The ends of the workings of a few problems: the first problem, then those on which the variants differ."""
    firsts = {name: first for name, (first, *_) in runs.items()}
    differing = [i for i in range(1, len(problems)) if len({run.grades[i] for run in firsts.values()}) > 1]
    lines, width = [], max(map(len, firsts))
    for i in [0, *differing][:SAMPLES]:
        question = problems[i].prompt.splitlines()[-1]
        lines.append(f"Problem {i + 1} asks {question}, the answer is {problems[i].answer}")
        for name, run in firsts.items():
            ending = "".join(run.texts[i].splitlines()[-1:])
            lines.append(f"  {name:{width}}  ...  {ending}  -> {VERDICTS[run.grades[i]]}")
    return "\n".join(lines)


# The script


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.demo", __doc__)
    add = parser.add_argument
    add("--problems", type=int, metavar="N", help=f"number of problems (default {PROBLEMS})")
    short = f"{SHORT_PROBLEMS} problems, {SHORT_MAX_NUM_SEQS} at once, one thread: under a minute"
    add("--short", action="store_true", help=short)
    add("--seed", type=int, default=1, help="seed of the problems (default 1)")
    add("--repeats", type=int, default=1, help="runs of each variant, in turns (default 1)")
    command_line.add_output_argument(parser, "demo-output")
    args = parser.parse_args(arguments)
    if args.problems is None:
        args.problems = SHORT_PROBLEMS if args.short else PROBLEMS
    command_line.require_positive(args, "problems", "repeats")
    return args


def run_demo(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    if args.short:
        torch.set_num_threads(1)  # threads that wait for each other on a busy machine would take minutes
    problem_set = ProblemSet(args.problems, SHORT_MAX_NUM_SEQS if args.short else MAX_NUM_SEQS, args.seed)
    provenance = machine.announce("benchmarks.demo", arguments)
    print(f"{problem_set.describe()}\nWarming up ...", flush=True)
    problem_set.warm_up()
    runs: dict[str, list[Run]] = {variant.name: [] for variant in VARIANTS}
    for repeat in range(1, args.repeats + 1):
        for variant in VARIANTS:
            print(f"Running: {variant.name} ({repeat} of {args.repeats}) ...", flush=True)
            runs[variant.name].append(problem_set.run(variant))
    print(f"\n{show(runs)}\n\n{samples(problem_set.problems, runs)}")
    of_variants = {
        variant.name: {
            "engine": problem_set.engine | variant.engine,
            "compression": msgspec.to_builtins(variant.compression),
            "grades": runs[variant.name][0].grades,
            "measurements": [msgspec.to_builtins(run.measurement) for run in runs[variant.name]],
        }
        for variant in VARIANTS
    }
    report.write_json(args.output / "demo.json", {**provenance, "runs": of_variants})
    print(f"Written: {args.output / 'demo.json'}\n{SERVE}")


if __name__ == "__main__":
    command_line.run_script(run_demo)
