"""Accuracy against retention, at equal memory (figure 5 of the Kara paper), and the parts of Kara (table 1).

    python -m benchmarks.paper.figure_5
    python -m benchmarks.paper.figure_5 --methods kara kara_no_bi kara_no_token2chunk --retentions 0.4

Kara runs first, at each retention, as in the paper's accuracy runs: it keeps that share of every window, and the prompt
whole. The KV pairs that it holds at the end of a question become that question's budget for each baseline. A baseline
cuts its cache to the budget whenever the cache has a few KV pairs more; its prompt stays whole and counts. So every
method ends every question with the same memory. All methods answer the same questions, greedily. The full cache is the
line to reach. Kara's ablations, and methods that take no budget, compress windows as it does.

`--windows` names methods that shall compress windows, too, where a budget would do as well. `--recall-bound` and
`--recall-period` let dropped KV pairs come back to all methods (docs/tiers.md).

`--resume` goes on with a run that was cut short. The figures go to figure_5.json, a plot to figure_5.png.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from math import sqrt
from pathlib import Path
from statistics import NormalDist, mean
from typing import Any, NamedTuple

import msgspec
import torch
from matplotlib.figure import Figure
from msgspec import Struct, structs
from scipy.stats import binomtest

from benchmarks.common import accuracy, command_line, machine, report
from benchmarks.common.child import run_child
from benchmarks.common.questions import Questions, QuestionSource
from kvllm import LLM, CompressionConfig, RequestOutput, SamplingParams, Standalone, Threshold
from kvllm.compression.specs import SPECS
from kvllm.config import require
from kvllm.config.compression import RECALL_DTYPES
from kvllm.engine_args import DEFAULT_MODEL

FULL = "full cache"
SIZES = (44, 48)
"""Fewest and most lines of the programs. 48 lines is the longest program."""
BLOCK_SIZE = 16
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
RECALL_OPTIONS = ("recall_bound", "recall_period", "recall_chunks", "recall_dtype")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.paper.figure_5", __doc__)
    accuracy.add_model_arguments(parser)
    add = parser.add_argument
    low, high = SIZES
    sizes = f"sizes of its problems (default {low} to {high})"
    add("--sizes", type=int, nargs=2, metavar=("MIN", "MAX"), default=SIZES, help=sizes)
    add("--dataset", metavar="FILE", help="JSONL with 'problem' and 'answer', instead of the reasoner's problems")
    add("--max-tokens", type=int, default=8192, help="most tokens of an answer to --dataset (default 8192)")
    add("--problems", type=int, default=300, help="number of questions (default 300)")
    add("--methods", nargs="+", choices=METHODS, default=DEFAULT, metavar="M", help=f"default: {' '.join(DEFAULT)}")
    more = "methods that compress windows, too, besides their budget"
    add("--windows", nargs="+", choices=METHODS, default=(), metavar="M", help=more)
    add("--retentions", nargs="+", default=RETENTIONS, metavar="R", help=f"default: {' '.join(RETENTIONS)}")
    window, buffer = accuracy.WINDOW, accuracy.BUFFER
    add("--window", type=int, default=window, metavar="N", help=f"KV pairs of Kara's window (default {window})")
    add("--buffer", type=int, default=buffer, metavar="N", help=f"KV pairs of its buffer (default {buffer})")
    recent, gap = "last KV pairs that the baselines always keep", "KV pairs from a budget to its threshold"
    add("--recent", type=int, default=RECENT, metavar="N", help=f"{recent} (default {RECENT})")
    add("--gap", type=int, default=GAP, metavar="N", help=f"{gap} (default {GAP})")
    bound = "let dropped KV pairs come back where more than this share of a query's attention may lie in them"
    add("--recall-bound", type=float, metavar="SHARE", help=bound)
    add("--recall-period", type=int, metavar="N", help="let dropped KV pairs come back at every N-th token")
    add("--recall-chunks", type=int, default=2, metavar="N", help="most chunks that come back at once (default 2)")
    dtype = "of dropped KV pairs (default: as the pool has them)"
    add("--recall-dtype", choices=RECALL_DTYPES, default="auto", metavar="D", help=dtype)
    size = "GiB of host memory, half of it for dropped KV pairs that may come back (default 2)"
    add("--kv-offloading-size", type=float, default=2.0, metavar="GIB", help=size)
    add("--max-num-seqs", type=int, default=192, metavar="N", help="most sequences at once (default 192)")
    add("--processes", type=int, help="trials side by side (default: one for each core; 1 with a GPU)")
    add("--resume", action="store_true", help="take the trials that the report in the output folder has already")
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    for option in ("methods", "windows", "retentions"):
        command_line.require_unique(f"--{option}", getattr(args, option))
    for retention in args.retentions:
        accuracy.check_retention("--retentions", retention)
    allowed = "kara first: it sets the budgets of those that have one"
    without_budget = all(by_windows(method) for method in args.methods)
    require(without_budget or args.methods[0] == "kara", "--methods", " ".join(args.methods), allowed)
    alone = "with --model alone: the reasoner reads its own problems only"
    require(not args.dataset or args.model != DEFAULT_MODEL, "--dataset", args.dataset, alone)
    args.recall = recall_of(args)
    return args


def recall_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options of CompressionConfig about recall; none without it.

    Raises ConfigError if they do not fit, or if one of the methods allows no recall.
    """
    if args.recall_bound is None and args.recall_period is None:
        return {}
    options = {name: getattr(args, name) for name in RECALL_OPTIONS}
    for entry in entries(args):
        if entry.windows:
            accuracy.kara("0.5", method=entry.method, **options)
        else:
            threshold(entry.method, **options)
    return options


def by_windows(method: str) -> bool:
    return method.startswith("kara") or SPECS[method].refusal("cache") is not None


class Entry(NamedTuple):
    """A line of the tables. windows: whether the method compresses windows as Kara does."""

    label: str
    method: str
    windows: bool


def entries(args: argparse.Namespace) -> list[Entry]:
    own = [Entry(method, method, by_windows(method)) for method in args.methods]
    return own + [Entry(f"{method}, windows", method, True) for method in args.windows]


# One trial, in a process of its own


class Setting(Struct, frozen=True, kw_only=True):
    """The part that all trials share. model: a checkpoint's directory."""

    model: str
    dtype: str
    questions: QuestionSource
    max_num_seqs: int
    threads: int


class Trial(Struct, frozen=True, kw_only=True):
    """One way to compress.

    budgets: KV pairs to which policy="threshold" cuts the cache of each question. kv_offloading_size: GiB of host
    memory, half of it for KV pairs that may come back.
    """

    name: str
    compression: CompressionConfig | None = None
    budgets: list[int] | None = None
    kv_offloading_size: float | None = None

    @property
    def block_size(self) -> int:
        return 1 if self.compression and isinstance(self.compression.policy, Standalone) else BLOCK_SIZE


class Job(Struct, kw_only=True):
    setting: Setting
    trial: Trial


class Outcome(Struct, kw_only=True):
    """The result of a trial, question by question.

    cached_lengths: KV pairs in the cache when the last token was sampled. logical_lengths: KV pairs that were computed
    until then. tokens: generated ones. seconds: of the whole trial. Trials run side by side, so this is no measure of
    speed. cpu_seconds: of the processor, for the whole trial. event_seconds: of the compressions; scores that are
    observed while decoding are not part of it. recalled_bytes: that KV pairs took which changed places with dropped
    ones, both ways.
    """

    right: list[bool]
    exact: list[bool]
    cached_lengths: list[int]
    logical_lengths: list[int]
    tokens: list[int]
    windows: int
    seconds: float
    cpu_seconds: float
    event_seconds: float
    recalled_bytes: int = 0

    @property
    def kept(self) -> float:
        """KV pairs held at the end, as a share of those that were computed."""
        return sum(self.cached_lengths) / sum(self.logical_lengths)

    @property
    def prompts(self) -> list[int]:
        """Tokens of each prompt."""
        return [logical - tokens + 1 for logical, tokens in zip(self.logical_lengths, self.tokens, strict=True)]


def run(job: Job) -> Outcome:
    """Answer all questions greedily in one engine, as many at once as it allows."""
    setting, trial = job.setting, job.trial
    torch.set_num_threads(setting.threads)
    questions = setting.questions.load()
    llm = LLM(
        setting.model,
        dtype=setting.dtype,
        block_size=trial.block_size,
        max_num_seqs=min(setting.max_num_seqs, len(questions.prompts)),
        num_gpu_blocks_override=pool_blocks(setting, trial, questions),
        compression=trial.compression,
        kv_offloading_size=trial.kv_offloading_size,
    )
    begin, cpu_begin = time.perf_counter(), time.process_time()
    outputs = answer(llm, trial, questions)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    grades = [questions.grade(i, output.outputs[0].text) for i, output in enumerate(outputs)]
    tokens = [len(output.outputs[0].token_ids) for output in outputs]
    # The token sampled last is never stored.
    lengths = [len(output.prompt_token_ids) + n - 1 for output, n in zip(outputs, tokens, strict=True)]
    stats = llm.stats()
    return Outcome(
        right=[grade.right for grade in grades],
        exact=[grade.exact for grade in grades],
        cached_lengths=[n - output.metrics.evicted_entries for output, n in zip(outputs, lengths, strict=True)],
        logical_lengths=lengths,
        tokens=tokens,
        windows=stats.windows_compressed,
        recalled_bytes=stats.recalled_bytes,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        event_seconds=stats.recompute_seconds + stats.score_seconds + stats.compact_seconds,
    )


def pool_blocks(setting: Setting, trial: Trial, questions: Questions) -> int | None:
    """Blocks for all of the reasoner's problems at once. None on a GPU or for a dataset: the memory sizes the pool."""
    if torch.cuda.is_available() or setting.questions.dataset:
        return None
    longest = max(len(prompt) + n for prompt, n in zip(questions.prompts, questions.max_tokens, strict=True))
    running = min(setting.max_num_seqs, len(questions.prompts))
    return running * (-(-longest // trial.block_size) + 1)


def answer(llm: LLM, trial: Trial, questions: Questions) -> list[RequestOutput]:
    """Raises the error of the first question that could not be answered."""
    limits = zip(questions.max_tokens, trial.budgets or [None] * len(questions.prompts), strict=True)
    params = [SamplingParams(temperature=0, max_tokens=tokens, budget_tokens=budget) for tokens, budget in limits]
    generate = llm.chat if questions.chat else llm.generate
    outputs = generate(questions.prompts, params, use_tqdm=False)
    for output in outputs:
        if output.error is not None:
            raise output.error
    return outputs


# All trials


class Log:
    """Prints trials as they end, and writes all results so far to a file, because a long run may be cut short.

    known: outcomes that the file has from an earlier run, by fingerprint; none unless `resume` is set.
    """

    def __init__(self, path: Path, header: dict[str, Any], setting: Setting, resume: bool) -> None:
        self.path = path
        self.setting = setting
        self.content: dict[str, Any] = {**header, "trials": {}}
        self.known: dict[str, Outcome] = {}
        if resume and path.is_file():
            trials = json.loads(path.read_text())["trials"].values()
            self.known = {trial["fingerprint"]: msgspec.convert(trial, Outcome) for trial in trials}

    def __call__(self, trial: Trial, outcome: Outcome) -> None:
        print(f"  {trial.name}: {percent(outcome.right)} % right, {outcome.seconds:.0f} s", flush=True)
        self.content["trials"][trial.name] = {
            "fingerprint": fingerprint(self.setting, trial),
            "compression": msgspec.to_builtins(trial.compression),
            "accuracy": mean(outcome.right),
            "interval": interval(sum(outcome.right), len(outcome.right)),
            "exact_workings": mean(outcome.exact),
            "kept": outcome.kept,
            **msgspec.to_builtins(outcome),
        }
        report.write_json(self.path, self.content)


def fingerprint(setting: Setting, trial: Trial) -> str:
    """A number for all that decides the answers of a trial."""
    parts = msgspec.json.encode([structs.replace(setting, threads=1), trial])
    return hashlib.sha256(parts).hexdigest()[:16]


def run_all(trials: Sequence[Trial], processes: int, log: Log) -> dict[str, Outcome]:
    """Run trials side by side, each in a process of its own, but those that the log knows.

    Raises KvLLMError with the message of the first trial that failed.
    """
    setting, lock = log.setting, threading.Lock()

    def run_one(trial: Trial) -> Outcome:
        outcome = log.known.get(fingerprint(setting, trial))
        if outcome is None:
            threads = {"OMP_NUM_THREADS": str(setting.threads)}
            outcome = run_child(run, Job(setting=setting, trial=trial), trial.name, threads)
        with lock:
            log(trial, outcome)
        return outcome

    with ThreadPoolExecutor(processes) as executor:
        outcomes = list(executor.map(run_one, trials))
    return {trial.name: outcome for trial, outcome in zip(trials, outcomes, strict=True)}


def window_trials(args: argparse.Namespace) -> list[Trial]:
    """Kara and all others by windows, at every retention."""
    sizes = {"window": args.window, "buffer": args.buffer, **args.recall}
    return [
        make_trial(args, f"{entry.label} {each}", compression=accuracy.kara(each, method=entry.method, **sizes))
        for entry in entries(args)
        if entry.windows
        for each in args.retentions
    ]


def threshold_trials(args: argparse.Namespace, outcomes: Mapping[str, Outcome]) -> list[Trial]:
    """The other methods. A question's budget is the number of KV pairs that Kara held at its end."""
    trials = []
    for entry in entries(args):
        for retention in args.retentions if not entry.windows else ():
            budgets = outcomes[f"kara {retention}"].cached_lengths
            recent = recent_of(entry.method, args.recent, budgets, outcomes[FULL].prompts)
            compression = threshold(entry.method, recent=recent, gap=args.gap, **args.recall)
            trials.append(make_trial(args, f"{entry.label} {retention}", compression=compression, budgets=budgets))
    return trials


def make_trial(args: argparse.Namespace, name: str, **parts: Any) -> Trial:
    return Trial(name=name, kv_offloading_size=args.kv_offloading_size if args.recall else None, **parts)


def threshold(method: str, *, recent: int = RECENT, gap: int = GAP, **options: Any) -> CompressionConfig:
    """A baseline that cuts a cache to its budget whenever it has `gap` KV pairs more. Prompts stay whole, as with Kara.

    The budget of each question replaces the one here.
    """
    policy = Threshold(threshold_tokens=1024 + gap, budget_tokens=1024, protect_prompt=True)
    own = SPECS[method].own(query_window=recent)
    return CompressionConfig(method=method, method_options=own, policy=policy, buffer=recent, **options)


def recent_of(method: str, recent: int, budgets: Iterable[int], prompts: Iterable[int]) -> int:
    """The number of last KV pairs that a baseline always keeps.

    H2O keeps as many recent KV pairs as heavy hitters: half of those that the smallest budget leaves beside the prompt.
    """
    if method != "h2o":
        return recent
    blocks = (-(-prompt // BLOCK_SIZE) * BLOCK_SIZE for prompt in prompts)
    return max(recent, min(n - prompt for n, prompt in zip(budgets, blocks, strict=True)) // 2)


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


class Difference(Struct, frozen=True):
    """The difference of two trials in right answers to the same questions.

    mean, half_width: the first trial minus the second, with its confidence interval. p_value: the probability that
    equal methods differ as much (McNemar's exact test).
    """

    mean: float
    half_width: float
    p_value: float

    @property
    def text(self) -> str:
        return f"{100 * self.mean:+.1f} ± {100 * self.half_width:.1f}"


def paired_difference(first: Sequence[bool], second: Sequence[bool]) -> Difference:
    differences = [int(a) - int(b) for a, b in zip(first, second, strict=True)]
    n, average = len(differences), mean(differences)
    variance = sum((d - average) ** 2 for d in differences) / max(1, n - 1)
    half_width = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * sqrt(variance / n)
    wins, losses = differences.count(1), differences.count(-1)
    p_value = float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    return Difference(average, half_width, p_value)


# Tables and the plot


def show(labels: Sequence[str], retentions: Sequence[str], outcomes: Mapping[str, Outcome]) -> str:
    """Right answers, paired differences to the full cache and to the first method, memory, and cost."""
    full, first = outcomes[FULL], labels[0]

    def table(cell: Callable[[Outcome, str], str]) -> str:
        rows = [[label, *(cell(outcomes[f"{label} {each}"], each) for each in retentions)] for label in labels]
        return report.table(["", *(f"retention {each}" for each in retentions)], rows)

    def minus(outcome: Outcome, other: Outcome) -> str:
        difference = paired_difference(outcome.right, other.right)
        return f"{difference.text} (p {difference.p_value:.1g})"

    parts = [
        f"Right answers in % with {CONFIDENCE:.0%} intervals, {len(full.right)} questions; full cache "
        f"{percent(full.right)}\n{table(lambda outcome, _: percent(outcome.right))}",
        "Minus the full cache, same questions, in points (p: McNemar's exact test)\n"
        + table(lambda outcome, _: minus(outcome, full)),
        f"Minus {first}, same questions, in points\n"
        + table(lambda outcome, retention: minus(outcome, outcomes[f"{first} {retention}"])),
        f"KV pairs kept at the end, %\n{table(lambda outcome, _: f'{100 * outcome.kept:.1f}')}",
        f"Seconds of compression events / seconds of the processor in all; full cache {full.cpu_seconds:.0f}\n"
        + table(lambda outcome, _: f"{outcome.event_seconds:.1f} / {outcome.cpu_seconds:.0f}"),
    ]
    return "\n\n".join(parts)


def plot(path: Path, labels: Sequence[str], retentions: Sequence[str], outcomes: Mapping[str, Outcome]) -> None:
    """Right answers with their intervals."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    x = [100 * float(Fraction(retention)) for retention in retentions]
    for index, label in enumerate(labels):
        right = [outcomes[f"{label} {retention}"].right for retention in retentions]
        y = [100 * mean(each) for each in right]
        bounds = [interval(sum(each), len(each)) for each in right]
        lows, highs = (
            [abs(100 * end - value) for end, value in zip(ends, y, strict=True)] for ends in zip(*bounds, strict=True)
        )
        style: dict[str, Any] = {"marker": "o", "markersize": 3, "linewidth": 1.2, "capsize": 2, "label": label}
        colour, linestyle = index % len(report.COLOURS), index // len(report.COLOURS) % len(report.STYLES)
        style |= {"color": report.COLOURS[colour], "linestyle": report.STYLES[linestyle]}
        axes.errorbar(x, y, yerr=[lows, highs], **style)
    axes.axhline(100 * mean(outcomes[FULL].right), color="grey", linewidth=0.8, label=FULL)
    axes.set(xlabel="retention (%)", ylabel="right answers (%)", ylim=(-2, 103))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    report.save(path, figure)


# The script


def setting_of(args: argparse.Namespace) -> tuple[Setting, int]:
    """The setting that the arguments describe, and the number of trials that run side by side.

    Raises ConfigError for arguments that do not fit.
    """
    low, high = args.sizes
    source = QuestionSource(
        task=args.task,
        sizes=(low, high),
        count=args.problems,
        seed=args.seed,
        dataset=args.dataset,
        limit=args.max_tokens,
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = args.processes or (1 if torch.cuda.is_available() else cores)
    require(processes >= 1, "--processes", args.processes, "at least 1")
    setting = Setting(
        model=str(args.model),
        dtype=accuracy.dtype_of(args),
        questions=source,
        max_num_seqs=args.max_num_seqs,
        threads=max(1, cores // processes),
    )
    return setting, processes


def run_figure(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    setting, processes = setting_of(args)
    provenance = machine.provenance("benchmarks.paper.figure_5", arguments)
    print(f"{machine.describe(provenance['machine'])}\n{setting.questions.load().describe()}", flush=True)
    begin = time.perf_counter()
    header = {**provenance, "setting": msgspec.to_builtins(setting)}
    log = Log(args.output / "figure_5.json", header, setting, args.resume)
    outcomes = run_all([Trial(name=FULL), *window_trials(args)], processes, log)
    outcomes |= run_all(threshold_trials(args, outcomes), processes, log)
    labels = [entry.label for entry in entries(args)]
    print(f"\n{show(labels, args.retentions, outcomes)}")
    print(f"\nIt took {(time.perf_counter() - begin) / 60:.0f} minutes.")
    plot(args.output / "figure_5.png", labels, args.retentions, outcomes)
    print(f"Written: {args.output / 'figure_5.json'}, {args.output / 'figure_5.png'}")


if __name__ == "__main__":
    command_line.run_script(run_figure)
