"""Accuracy against retention, at equal memory (figure 5 of the Kara paper), and the parts of Kara (table 1).

    python -m benchmarks.paper.figure_5
    python -m benchmarks.paper.figure_5 --methods kara kara_no_bi kara_no_token2chunk --retentions 0.4

Kara runs first, at each retention, as in the paper's accuracy runs: it keeps that share of every window, and the prompt
whole. The KV pairs that it holds at the end of a question become that question's budget for each baseline. A baseline
cuts its cache to the budget whenever the cache has a few KV pairs more; its prompt stays whole and counts. So every
method ends every question with the same memory. All methods answer the same questions, greedily. The full cache is the
line to reach. Kara's ablations, and methods that take no budget, compress windows as it does.

`--recall-bound` and `--recall-period` let dropped KV pairs come back to all methods (docs/tiers.md). The figures go to
figure_5.json as trials end, a plot to figure_5.png.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import torch
from msgspec import Struct
from scipy.stats import binomtest

from benchmarks.common import command_line, machine, report
from benchmarks.common.child import run_child
from benchmarks.paper import settings
from benchmarks.reasoner.problems import Problem, grade
from benchmarks.reasoner.tasks import DEFAULT_TASK, TASKS
from benchmarks.reasoner.tokenizer import encode
from kvllm import LLM, CompressionConfig, SamplingParams, Standalone, Threshold
from kvllm.compression.specs import SPECS
from kvllm.config import require
from kvllm.config.compression import RECALL_DTYPES

FULL = "full cache"
SIZES = (44, 48)
"""Fewest and most lines of the programs. 48 lines is the longest program."""
BLOCK_SIZE, MAX_NUM_SEQS = 16, 192
HOST_GIB = 2.0
"""Host memory, half of it for dropped KV pairs that may come back."""
RECENT, GAP = 32, 64
"""KV pairs of the baselines: the last ones, which are always kept and whose queries score; and those between a budget
and its threshold."""
METHODS = tuple(SPECS)
DEFAULT = tuple(
    # Without the ablations, a file beside the model, StreamingLLM's second form, which has no sinks, and KVzip, which
    # reads a text again whenever it is cut.
    name
    for name, spec in SPECS.items()
    if not (name.startswith("kara_no") or name == "sliding_window" or spec.reads_file or spec.repeats)
)
RETENTIONS = ("0.2", "0.3", "0.4", "0.5", "0.6")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.paper.figure_5", __doc__)
    settings.add_problem_arguments(parser)
    add = parser.add_argument
    add("--task", choices=TASKS, default=DEFAULT_TASK, help=f"of the reasoner (default {DEFAULT_TASK})")
    low, high = SIZES
    sizes = f"sizes of its problems (default {low} to {high})"
    add("--sizes", type=int, nargs=2, metavar=("MIN", "MAX"), default=SIZES, help=sizes)
    add("--problems", type=int, default=300, help="their number (default 300)")
    add("--methods", nargs="+", choices=METHODS, default=DEFAULT, metavar="M", help=f"default: {' '.join(DEFAULT)}")
    add("--retentions", nargs="+", default=RETENTIONS, metavar="R", help=f"default: {' '.join(RETENTIONS)}")
    window, buffer = settings.WINDOW, settings.BUFFER
    add("--window", type=int, default=window, metavar="N", help=f"KV pairs of Kara's window (default {window})")
    add("--buffer", type=int, default=buffer, metavar="N", help=f"KV pairs of its buffer (default {buffer})")
    bound = "let dropped KV pairs come back where more than this share of a query's attention may lie in them"
    add("--recall-bound", type=float, metavar="SHARE", help=bound)
    add("--recall-period", type=int, metavar="N", help="let dropped KV pairs come back at every N-th token")
    dtype = "of dropped KV pairs (default: as the pool has them)"
    add("--recall-dtype", choices=RECALL_DTYPES, default="auto", metavar="D", help=dtype)
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    command_line.require_positive(args, "problems")
    without_budget = all(by_windows(method) for method in args.methods)
    allowed = "kara first: it sets the budgets of those that have one"
    require(without_budget or args.methods[0] == "kara", "--methods", " ".join(args.methods), allowed)
    args.recall = {}
    if args.recall_bound is not None or args.recall_period is not None:
        args.recall = {name: getattr(args, name) for name in ("recall_bound", "recall_period", "recall_dtype")}
    for method in args.methods:  # which refuses what does not fit
        for retention in args.retentions:
            windows(args, method, retention) if by_windows(method) else threshold(args, method, RECENT)
    return args


# How a method compresses


def by_windows(method: str) -> bool:
    return method.startswith("kara") or SPECS[method].refusal("cache") is not None


def windows(args: argparse.Namespace, method: str, retention: str) -> CompressionConfig:
    return settings.kara(retention, window=args.window, buffer=args.buffer, method=method, **args.recall)


def threshold(args: argparse.Namespace, method: str, recent: int) -> CompressionConfig:
    """A baseline that cuts a cache to its budget whenever it has GAP KV pairs more. Prompts stay whole, as with Kara.

    The budget of each question replaces the one here.
    """
    policy = Threshold(threshold_tokens=1024 + GAP, budget_tokens=1024, protect_prompt=True)
    own = SPECS[method].own(query_window=recent)
    return CompressionConfig(method=method, method_options=own, policy=policy, buffer=recent, **args.recall)


def recent_of(method: str, budgets: Iterable[int], prompts: Iterable[int]) -> int:
    """The number of last KV pairs that a baseline always keeps.

    H2O keeps as many recent KV pairs as heavy hitters: half of those that the smallest budget leaves beside the prompt.
    """
    if method != "h2o":
        return RECENT
    blocks = (-(-prompt // BLOCK_SIZE) * BLOCK_SIZE for prompt in prompts)
    return max(RECENT, min(n - prompt for n, prompt in zip(budgets, blocks, strict=True)) // 2)


# One trial, in a process of its own


class Trial(Struct, kw_only=True):
    """One way to compress. budgets: KV pairs to which policy="threshold" cuts the cache of each problem."""

    name: str
    model: str
    dtype: str
    problems: list[Problem]
    compression: CompressionConfig | None = None
    budgets: list[int] | None = None


class Outcome(Struct, kw_only=True):
    """The result of a trial, problem by problem.

    cached_lengths: KV pairs in the cache when the last token was sampled. logical_lengths: KV pairs that were computed
    until then. prompts: tokens of each. cpu_seconds: of the processor, for the whole trial; trials run side by side.
    recalled_bytes: that KV pairs took which changed places with dropped ones, both ways.
    """

    right: list[bool]
    exact: list[bool]
    cached_lengths: list[int]
    logical_lengths: list[int]
    prompts: list[int]
    windows: int
    cpu_seconds: float
    recalled_bytes: int

    @property
    def kept(self) -> float:
        """KV pairs held at the end, as a share of those that were computed."""
        return sum(self.cached_lengths) / sum(self.logical_lengths)


def run(trial: Trial) -> Outcome:
    """Solve all problems greedily in one engine. Raises the error of the first one that could not be answered."""
    problems, compression = trial.problems, trial.compression
    limits = [len(encode(problem.working)) + 16 for problem in problems]
    block_size = 1 if compression and isinstance(compression.policy, Standalone) else BLOCK_SIZE
    longest = max(len(encode(problem.prompt)) + n for problem, n in zip(problems, limits, strict=True))
    at_once = min(MAX_NUM_SEQS, len(problems))
    llm = LLM(
        trial.model,
        dtype=trial.dtype,
        block_size=block_size,
        max_num_seqs=at_once,
        num_gpu_blocks_override=at_once * (-(-longest // block_size) + 1),
        compression=compression,
        kv_offloading_size=HOST_GIB if compression and compression.recalls else None,
    )
    budgets = trial.budgets or [None] * len(problems)
    params = [
        SamplingParams(temperature=0, max_tokens=limit, budget_tokens=budget)
        for limit, budget in zip(limits, budgets, strict=True)
    ]
    begin = time.process_time()
    outputs = llm.generate([problem.prompt for problem in problems], params, use_tqdm=False)
    cpu_seconds = time.process_time() - begin
    for output in outputs:
        if output.error is not None:
            raise output.error
    grades = [grade(problem, output.outputs[0].text) for problem, output in zip(problems, outputs, strict=True)]
    # The token sampled last is never stored.
    lengths = [len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1 for output in outputs]
    stats = llm.stats()
    return Outcome(
        right=[right for right, _ in grades],
        exact=[exact for _, exact in grades],
        cached_lengths=[n - output.metrics.evicted_entries for output, n in zip(outputs, lengths, strict=True)],
        logical_lengths=lengths,
        prompts=[len(output.prompt_token_ids) for output in outputs],
        windows=stats.windows_compressed,
        cpu_seconds=cpu_seconds,
        recalled_bytes=stats.recalled_bytes,
    )


# All trials


def run_trials(args: argparse.Namespace, provenance: dict[str, Any]) -> dict[str, Outcome]:
    """Run all trials side by side, each in a process of its own: the full cache and those by windows, then the others.
    A problem's budget is the number of KV pairs that Kara held at its end. Results so far are always in the file, for a
    long run may be cut short. Raises KvLLMError of the first trial that failed."""
    problems = settings.make_problems(args.problems, tuple(args.sizes), args.seed, args.task)
    shared = {"model": str(args.model), "dtype": args.dtype, "problems": problems}
    pairs = [(f"{method} {retention}", method, retention) for method in args.methods for retention in args.retentions]
    content, outcomes, lock = {**provenance, "trials": {}}, dict[str, Outcome](), threading.Lock()

    def run_one(trial: Trial) -> None:
        outcome = run_child(run, trial, trial.name, {"OMP_NUM_THREADS": "1"})
        with lock:
            print(f"  {trial.name}: {percent(outcome.right)} % right", flush=True)
            outcomes[trial.name] = outcome
            found = {"kept": outcome.kept, **msgspec.to_builtins(outcome)}
            content["trials"][trial.name] = {"compression": msgspec.to_builtins(trial.compression), **found}
            report.write_json(args.output / "figure_5.json", content)

    processes = 1 if torch.cuda.is_available() else len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(processes) as executor:
        first = [Trial(name=FULL, **shared)]
        for name, method, retention in pairs:
            if by_windows(method):
                first.append(Trial(name=name, **shared, compression=windows(args, method, retention)))
        list(executor.map(run_one, first))
        others = []
        for name, method, retention in pairs:
            if not by_windows(method):
                budgets = outcomes[f"kara {retention}"].cached_lengths
                recent = recent_of(method, budgets, outcomes[FULL].prompts)
                own = threshold(args, method, recent)
                others.append(Trial(name=name, **shared, compression=own, budgets=budgets))
        list(executor.map(run_one, others))
    return outcomes


# Confidence intervals

CONFIDENCE = 0.95


def interval(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's confidence interval of a proportion."""
    found = binomtest(successes, trials).proportion_ci(CONFIDENCE, method="wilson")
    return found.low, found.high


def percent(right: Sequence[bool]) -> str:
    """The share of right answers in percent, with its interval."""
    low, high = interval(sum(right), len(right))
    return f"{100 * mean(right):.1f} [{100 * low:.0f}, {100 * high:.0f}]"


# Tables and the plot


def show(args: argparse.Namespace, outcomes: Mapping[str, Outcome]) -> str:
    """Right answers, memory, and cost."""
    full = outcomes[FULL]

    def table(title: str, cell: Callable[[Outcome, str], str]) -> str:
        rows = [[each, *(cell(outcomes[f"{each} {r}"], r) for r in args.retentions)] for each in args.methods]
        return f"{title}\n" + report.table(["", *(f"retention {r}" for r in args.retentions)], rows)

    answers = f"Right answers in % with {CONFIDENCE:.0%} intervals, {len(full.right)} questions; full cache "
    parts = [
        table(answers + percent(full.right), lambda own, _: percent(own.right)),
        table("KV pairs kept at the end, %", lambda own, _: f"{100 * own.kept:.1f}"),
        table("Processor time over the full cache's", lambda own, _: f"{own.cpu_seconds / full.cpu_seconds:.1f}"),
    ]
    return "\n\n".join(parts)


def plot(path: Path, args: argparse.Namespace, outcomes: Mapping[str, Outcome]) -> None:
    """Right answers with their intervals."""
    x = [100 * float(Fraction(retention)) for retention in args.retentions]
    lines = {}
    for method in args.methods:
        right = [outcomes[f"{method} {retention}"].right for retention in args.retentions]
        y = [100 * mean(each) for each in right]
        lows, highs = zip(*(interval(sum(each), len(each)) for each in right), strict=True)
        below = [abs(value - 100 * low) for value, low in zip(y, lows, strict=True)]
        above = [abs(100 * high - value) for value, high in zip(y, highs, strict=True)]
        lines[method] = report.Line(x, y, (below, above))
    lines[FULL] = report.Line(x, [100 * mean(outcomes[FULL].right)] * len(x))
    report.plot_lines(path, "Answers over retention", "retention (%)", {"right answers (%)": lines})


def run_figure(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    outcomes = run_trials(args, machine.announce("benchmarks.paper.figure_5", arguments))
    print(f"\n{show(args, outcomes)}")
    plot(args.output / "figure_5.png", args, outcomes)
    print(f"Written: {args.output / 'figure_5.json'}, {args.output / 'figure_5.png'}")


if __name__ == "__main__":
    command_line.run_script(run_figure)
