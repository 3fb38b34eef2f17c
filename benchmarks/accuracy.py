"""What compression costs in answers: trials on the same questions, and how sure their differences are.

As a program it runs one trial in a process of its own: a job as JSON on stdin, an outcome as JSON on stdout.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from math import ceil, sqrt
from pathlib import Path
from statistics import NormalDist, mean
from typing import Any

import msgspec
import torch
from matplotlib.figure import Figure
from msgspec import Struct
from scipy.stats import binomtest

from benchmarks import report
from benchmarks.questions import Questions, QuestionSource
from benchmarks.reasoner.tasks import DEFAULT_TASK, TASKS
from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.config import require
from kvllm.errors import KvLLMError
from kvllm.llm import DEFAULT_MODEL

CONFIDENCE = 0.95
FULL = "full cache"
SIZES = (44, 48)
"""Lines of the programs: nearly the longest that there are."""
REASONER = "reasoner"
BLOCK_SIZE = 16
WINDOW, BUFFER = 384, 128
"""Of Kara, in entries: what benchmarks/settings.py found to keep most of the right answers."""
RECENT, GAP = 32, 64
"""Of the baselines: the last entries, always kept, whose queries score; and the entries between a budget and its
threshold."""


class Setting(Struct, frozen=True, kw_only=True):
    """What all trials share. `model`: a checkpoint's directory, or "reasoner", the model of the package."""

    model: str = REASONER
    dtype: str = "float32"
    questions: QuestionSource = QuestionSource()
    max_num_seqs: int = 192
    threads: int = 1


class Trial(Struct, frozen=True, kw_only=True):
    """One way to compress. `budgets`: entries left of each question's cache by policy="threshold"."""

    name: str
    compression: CompressionConfig | None = None
    budgets: list[int] | None = None

    @property
    def block_size(self) -> int:
        return 1 if self.compression and self.compression.policy == "standalone" else BLOCK_SIZE


class Outcome(Struct, kw_only=True):
    """What came of a trial, question by question.

    entries: of the cache when the last token was sampled. tokens: generated. seconds: of the whole trial; trials run
    side by side, so they are no measure of speed.
    """

    right: list[bool]
    exact: list[bool]
    entries: list[int]
    tokens: list[int]
    logical: list[int]
    windows: int
    seconds: float

    @property
    def accuracy(self) -> float:
        return mean(self.right)

    @property
    def kept(self) -> float:
        """Entries held at the end, as a share of those that were computed."""
        return sum(self.entries) / sum(self.logical)


class Job(Struct, kw_only=True):
    setting: Setting
    trial: Trial


# One trial


def run(job: Job) -> Outcome:
    """Answer all questions greedily in one engine, as many at once as it allows."""
    setting, trial = job.setting, job.trial
    torch.set_num_threads(setting.threads)
    questions = setting.questions.load()
    model = {} if setting.model == REASONER else {"model": setting.model}
    llm = LLM(
        **model,
        dtype=setting.dtype,
        block_size=trial.block_size,
        max_num_seqs=min(setting.max_num_seqs, len(questions.prompts)),
        compression=trial.compression,
        **pool(setting, trial, questions),
    )
    budgets = trial.budgets or [None] * len(questions.prompts)
    params = [
        SamplingParams(temperature=0, max_tokens=tokens, budget_tokens=budget)
        for tokens, budget in zip(questions.max_tokens, budgets, strict=True)
    ]
    begin = time.perf_counter()
    answer = llm.chat if questions.chat else llm.generate
    outputs = answer(questions.prompts, params, use_tqdm=False)
    for output in outputs:
        if output.error is not None:
            raise output.error
    grades = [questions.grade(i, output.outputs[0].text) for i, output in enumerate(outputs)]
    tokens = [len(output.outputs[0].token_ids) for output in outputs]
    # The token sampled last is never stored.
    logical = [len(output.prompt_token_ids) + n - 1 for output, n in zip(outputs, tokens, strict=True)]
    return Outcome(
        right=[grade.right for grade in grades],
        exact=[grade.exact for grade in grades],
        entries=[n - output.metrics.evicted_entries for output, n in zip(outputs, logical, strict=True)],
        tokens=tokens,
        logical=logical,
        windows=llm.stats().windows_compressed,
        seconds=time.perf_counter() - begin,
    )


def pool(setting: Setting, trial: Trial, questions: Questions) -> dict[str, int]:
    """For the reasoner's problems on the CPU, a KV pool in which all fit; else it is sized by the memory, as ever."""
    if torch.cuda.is_available() or setting.questions.dataset:
        return {}
    longest = max(len(prompt) + n for prompt, n in zip(questions.prompts, questions.max_tokens, strict=True))
    rows = min(setting.max_num_seqs, len(questions.prompts))
    return {"num_gpu_blocks_override": rows * (-(-longest // trial.block_size) + 1)}


# Many trials


def run_all(
    setting: Setting, trials: Sequence[Trial], processes: int, finished: Callable[[Trial, Outcome], None]
) -> dict[str, Outcome]:
    """Run trials side by side, each in a process of its own; `finished` is called for each as it ends.

    Raises RuntimeError with the error of the first trial that failed.
    """
    lock = threading.Lock()

    def run_one(trial: Trial) -> Outcome:
        outcome = run_apart(Job(setting=setting, trial=trial))
        with lock:
            finished(trial, outcome)
        return outcome

    with ThreadPoolExecutor(processes) as executor:
        outcomes = list(executor.map(run_one, trials))
    return {trial.name: outcome for trial, outcome in zip(trials, outcomes, strict=True)}


def run_apart(job: Job) -> Outcome:
    environment = os.environ | {"OMP_NUM_THREADS": str(job.setting.threads)}
    command = [sys.executable, "-m", "benchmarks.accuracy"]
    done = subprocess.run(command, input=msgspec.json.encode(job), capture_output=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{job.trial.name}: {done.stderr.decode()[-2000:]}")
    return msgspec.json.decode(done.stdout, type=Outcome)


# What to try


def kara(
    retention: Fraction | str, *, window: int = WINDOW, buffer: int = BUFFER, method: str = "kara", **options: Any
) -> CompressionConfig:
    """Kara as in the paper's accuracy runs (section 4.1): of `window - buffer` entries the share `retention`."""
    retained = buffer + ceil(Fraction(retention) * (window - buffer))
    settings = {"chunk_budget": 8, "max_chunk": 8} | options
    return CompressionConfig(
        method=method, policy="standalone", window_blocks=window, retain_tokens=retained, buffer=buffer, **settings
    )


def threshold(method: str, *, recent: int = RECENT, gap: int = GAP) -> CompressionConfig:
    """A baseline that cuts a cache to its budget whenever it has `gap` entries more; prompts stay whole, as Kara's do.

    The budget here is replaced by one for each question.
    """
    return CompressionConfig(
        method=method,
        policy="threshold",
        protect_prompt=True,
        threshold_tokens=1024 + gap,
        budget_tokens=1024,
        buffer=recent,
        query_window=recent,
    )


def recent_of(method: str, recent: int, kara: Iterable[int], prompts: Iterable[int]) -> int:
    """The last entries that a baseline keeps in any case, for texts of which Kara ends with `kara` entries.

    H2O keeps as many recent entries as heavy hitters: half of what the smallest budget leaves beside the prompt.
    """
    if method != "h2o":
        return recent
    blocks = (-(-prompt // BLOCK_SIZE) * BLOCK_SIZE for prompt in prompts)
    return max(recent, min(n - prompt for n, prompt in zip(kara, blocks, strict=True)) // 2)


# How sure


def interval(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's interval for a proportion."""
    found = binomtest(successes, trials).proportion_ci(CONFIDENCE, method="wilson")
    return found.low, found.high


class Difference(Struct, frozen=True):
    """`first` minus `second` in right answers to the same questions: the mean with its half width, and the probability
    that equal methods differ as much (McNemar's exact test)."""

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
    p_value = binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    return Difference(average, half_width, p_value)


def percent(outcome: Outcome) -> str:
    """Accuracy with its interval."""
    low, high = interval(sum(outcome.right), len(outcome.right))
    return f"{100 * outcome.accuracy:.1f} [{100 * low:.0f}, {100 * high:.0f}]"


# Arguments


def make_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with what every script about accuracy takes."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default=REASONER, metavar="DIR", help="a checkpoint (default: the model of the package)")
    add("--dtype", help="default: float32 for the package's model, else the checkpoint's")
    add("--dataset", metavar="FILE", help="JSONL with 'problem' and 'answer', instead of the reasoner's problems")
    add("--max-tokens", type=int, default=8192, help="generated for a question of --dataset (default 8192)")
    add("--task", choices=TASKS, default=DEFAULT_TASK, help=f"of the reasoner (default {DEFAULT_TASK})")
    add(
        "--sizes", type=int, nargs=2, metavar=("MIN", "MAX"), help=f"of its problems (default {SIZES[0]} to {SIZES[1]})"
    )
    add("--problems", type=int, help="how many (default 300)")
    add("--seed", type=int, default=1, help="of the problems (default 1)")
    add("--max-num-seqs", type=int, default=192, metavar="N", help="at once (default 192)")
    add("--processes", type=int, help="trials side by side (default: one for each core; 1 with a GPU)")
    add("--output", type=Path, default=Path("benchmark-output"), metavar="DIR")
    return parser


def setting_of(args: argparse.Namespace) -> tuple[Setting, int]:
    """What the arguments describe, and how many trials run side by side. Raises ConfigError for what is not allowed."""
    if args.dataset and args.model == REASONER:
        require(False, "--dataset", args.dataset, "with --model alone: the reasoner reads its own problems only")
    source = QuestionSource(
        task=args.task,
        sizes=tuple(args.sizes or SIZES),
        count=args.problems or 300,
        seed=args.seed,
        dataset=args.dataset,
        limit=args.max_tokens,
    )
    gpu = torch.cuda.is_available()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = args.processes or (1 if gpu else cores)
    require(processes >= 1, "--processes", args.processes, "at least 1")
    setting = Setting(
        model=args.model,
        dtype=dtype_of(args),
        questions=source,
        max_num_seqs=args.max_num_seqs,
        threads=max(1, cores // processes),
    )
    return setting, processes


def path_of(args: argparse.Namespace) -> Path:
    return DEFAULT_MODEL if args.model == REASONER else Path(args.model)


def dtype_of(args: argparse.Namespace) -> str:
    return args.dtype or ("float32" if args.model == REASONER else "auto")


def check_retention(option: str, text: str) -> None:
    """Raises ConfigError unless `text` is a share, like 0.3."""
    try:
        fits = 0 < Fraction(text) <= 1
    except ValueError:
        fits = False
    require(fits, option, text, "a share above 0 and at most 1, like 0.3")


class Log:
    """Prints trials as they end, and keeps everything known so far in a file: a long run may be cut short."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        self.content: dict[str, Any] = {**header, "trials": {}}

    def __call__(self, trial: Trial, outcome: Outcome) -> None:
        print(f"  {trial.name}: {percent(outcome)} % right, {outcome.seconds:.0f} s", flush=True)
        self.content["trials"][trial.name] = {
            "compression": msgspec.to_builtins(trial.compression),
            "accuracy": outcome.accuracy,
            "interval": interval(sum(outcome.right), len(outcome.right)),
            "exact_workings": mean(outcome.exact),
            "kept": outcome.kept,
            **msgspec.to_builtins(outcome),
        }
        report.write_json(self.path, self.content)


def provenance(module: str, arguments: Sequence[str], setting: Setting) -> dict[str, Any]:
    return {**report.provenance(module, arguments), "setting": msgspec.to_builtins(setting)}


def run_comparison(module: str, arguments: Sequence[str], args: argparse.Namespace, trials: Sequence[Trial]) -> None:
    """A whole script: run the trials, print a table against the first one, write JSON and a plot."""
    setting, processes = setting_of(args)
    header = provenance(module, arguments, setting)
    name = module.rpartition(".")[2]
    print(f"{report.describe(header['machine'])}\n{setting.questions.load().describe()}", flush=True)
    outcomes = run_all(setting, trials, processes, Log(args.output / f"{name}.json", header))
    title = f"retention {args.retention}"
    print(f"\n{title}\n{compare(outcomes)}")
    plot_bars(args.output / f"{name}.png", title, outcomes)
    print(f"Written: {args.output / f'{name}.json'}, {args.output / f'{name}.png'}")


def compare(outcomes: Mapping[str, Outcome]) -> str:
    """A row for each trial, with its difference to the first one on the same questions."""
    first, *_ = outcomes.values()
    rows = []
    for name, outcome in outcomes.items():
        difference = paired_difference(outcome.right, first.right)
        against = ["", ""] if outcome is first else [difference.text, f"{difference.p_value:.1g}"]
        kept = f"{100 * outcome.kept:.1f}"
        rows.append([name, percent(outcome), f"{100 * mean(outcome.exact):.1f}", kept, *against])
    header = ["", "right, %\n[95% interval]", "exact\nworkings, %", "entries kept\nat the end, %"]
    return report.table([*header, "minus the first,\npoints", "p (McNemar)"], rows)


def plot_bars(path: Path, title: str, outcomes: Mapping[str, Outcome]) -> None:
    """Right answers with their intervals, a bar for each trial."""
    figure = Figure(figsize=(9, 1.5 + 0.35 * len(outcomes)), layout="constrained")
    axes = figure.subplots()
    for row, outcome in enumerate(outcomes.values()):
        low, high = interval(sum(outcome.right), len(outcome.right))
        axes.barh(row, 100 * outcome.accuracy, color=report.COLOURS[0], height=0.6)
        axes.plot([100 * low, 100 * high], [row, row], color=report.COLOURS[-1], linewidth=1.2)
    axes.set(title=title, xlabel="right answers (%)", xlim=(0, 100))
    axes.set_yticks(range(len(outcomes)), labels=list(outcomes))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def unique(names: Iterable[str], option: str) -> None:
    names = list(names)
    require(len(set(names)) == len(names), option, " ".join(names), "each once")


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    try:
        outcome = run(job)
    except KvLLMError as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(msgspec.json.encode(outcome))


if __name__ == "__main__":
    main()
