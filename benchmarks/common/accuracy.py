"""The command line, the log and the tables of scripts that compare answers."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import torch
from matplotlib.figure import Figure

from benchmarks.common import command_line, machine, report
from benchmarks.common.intervals import interval, paired_difference, percent
from benchmarks.common.questions import QuestionSource
from benchmarks.common.trials import REASONER, Outcome, Setting, Trial, fingerprint, run_all
from benchmarks.reasoner.tasks import DEFAULT_TASK, TASKS
from kvllm.config import require
from kvllm.engine_args import DEFAULT_MODEL

SIZES = (44, 48)
"""Fewest and most lines of the programs. 48 lines is the longest program."""


def make_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments that all scripts about accuracy have."""
    parser = command_line.make_parser(module, description)
    add = parser.add_argument
    add("--model", default=REASONER, metavar="DIR", help="a checkpoint (default: the model of the package)")
    add("--dtype", help="default: float32 for the package's model, else the checkpoint's")
    add("--dataset", metavar="FILE", help="JSONL with 'problem' and 'answer', instead of the reasoner's problems")
    add("--max-tokens", type=int, default=8192, help="most tokens of an answer to --dataset (default 8192)")
    add("--task", choices=TASKS, default=DEFAULT_TASK, help=f"task of the reasoner (default {DEFAULT_TASK})")
    low, high = SIZES
    add("--sizes", type=int, nargs=2, metavar=("MIN", "MAX"), help=f"sizes of its problems (default {low} to {high})")
    add("--problems", type=int, help="number of questions (default 300)")
    add("--seed", type=int, default=1, help="seed of the problems (default 1)")
    add("--max-num-seqs", type=int, default=192, metavar="N", help="most sequences at once (default 192)")
    add("--processes", type=int, help="trials side by side (default: one for each core; 1 with a GPU)")
    add("--resume", action="store_true", help="take the trials that the report in the output folder has already")
    command_line.add_output_argument(parser)
    return parser


def setting_of(args: argparse.Namespace) -> tuple[Setting, int]:
    """The setting that the arguments describe, and the number of trials that run side by side.

    Raises ConfigError for arguments that do not fit.
    """
    if args.dataset and args.model == REASONER:
        require(False, "--dataset", args.dataset, "with --model alone: the reasoner reads its own problems only")
    low, high = args.sizes or SIZES
    source = QuestionSource(
        task=args.task,
        sizes=(low, high),
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
            "accuracy": outcome.accuracy,
            "interval": interval(sum(outcome.right), len(outcome.right)),
            "exact_workings": mean(outcome.exact),
            "kept": outcome.kept,
            **msgspec.to_builtins(outcome),
        }
        report.write_json(self.path, self.content)


def provenance(module: str, arguments: Sequence[str], setting: Setting) -> dict[str, Any]:
    return {**machine.provenance(module, arguments), "setting": msgspec.to_builtins(setting)}


def run_comparison(module: str, arguments: Sequence[str], args: argparse.Namespace, trials: Sequence[Trial]) -> None:
    """A whole script: run the trials, print a table against the first one, write JSON and a plot."""
    setting, processes = setting_of(args)
    header = provenance(module, arguments, setting)
    name = module.rpartition(".")[2]
    print(f"{machine.describe(header['machine'])}\n{setting.questions.load().describe()}", flush=True)
    log = Log(args.output / f"{name}.json", header, setting, args.resume)
    outcomes = run_all(setting, trials, processes, log, log.known)
    title = f"retention {args.retention}"
    print(f"\n{title}\n{compare(outcomes)}")
    plot_bars(args.output / f"{name}.png", title, outcomes)
    print(f"Written: {args.output / f'{name}.json'}, {args.output / f'{name}.png'}")


def compare(outcomes: Mapping[str, Outcome]) -> str:
    """A line for each trial, with its difference to the first one on the same questions."""
    first, *_ = outcomes.values()
    rows = []
    for name, outcome in outcomes.items():
        difference = paired_difference(outcome.right, first.right)
        against = ["", ""] if outcome is first else [difference.text, f"{difference.p_value:.1g}"]
        kept = f"{100 * outcome.kept:.1f}"
        rows.append([name, percent(outcome.right), f"{100 * mean(outcome.exact):.1f}", kept, *against])
    header = ["", "right, %\n[95% interval]", "exact\nworkings, %", "KV pairs kept\nat the end, %"]
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
    report.save(path, figure)
