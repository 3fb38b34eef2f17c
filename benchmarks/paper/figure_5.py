"""Accuracy against retention, at equal memory (paper, figure 5).

    python -m benchmarks.paper.figure_5
    python -m benchmarks.paper.figure_5 --budgets 512 1024

Kara runs first, at each retention, as in the paper's accuracy runs: it keeps that share of every window, and the prompt
whole. The KV pairs that it holds at the end of a question become that question's budget for each baseline. A baseline
cuts its cache to the budget whenever the cache has a few KV pairs more; its prompt stays whole and counts. So every
method ends every question with the same memory. All methods answer the same questions, greedily. The full cache is the
line to reach.

`--budgets` gives every question the same KV pairs instead, as published tables have them. Methods by windows then keep
the share of each window that leaves the budget at the end of the full cache's answer. `--unprotected` compresses
prompts, too. `--windows` names methods that shall compress windows as Kara does, where a budget would do as well.
`--recall-bound` and `--recall-period` let dropped KV pairs come back to all methods (docs/tiers.md).

`--short` asks fewer questions at fewer retentions. `--resume` goes on with a run that was cut short. The figures go to
figure_5.json, a plot to figure_5.png.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from benchmarks.common import accuracy, answer_tables, command_line, compressions, machine
from benchmarks.common.trials import FULL, Outcome, Trial, prompts_of, run_all
from kvllm.compression.specs import SPECS
from kvllm.config import require

METHODS = tuple(method for method in SPECS if not method.startswith("kara_no"))  # the ablations are in table_1
DEFAULT = tuple(
    # Without a file beside the model, without StreamingLLM's second form, which has no sinks, and without KVzip,
    # which reads a text again whenever it is cut.
    method
    for method in METHODS
    if method != "sliding_window" and not SPECS[method].reads_file and not SPECS[method].repeats
)
RETENTIONS = ("0.2", "0.3", "0.4", "0.5", "0.6")
SHORT = {
    "problems": 100,
    "retentions": ("0.2", "0.3", "0.5"),
    "methods": ("kara", "kara_sharp", "snapkv", "keydiff", "streaming"),
}

Outcomes = Mapping[str, Outcome]


class Entry(NamedTuple):
    """A line of the tables. windows: whether the method compresses windows as Kara does."""

    label: str
    method: str
    windows: bool


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = accuracy.make_parser("benchmarks.paper.figure_5", __doc__)
    add = parser.add_argument
    add("--methods", nargs="+", choices=METHODS, metavar="M", help=f"kara and others (default: {' '.join(DEFAULT)})")
    more = "methods that compress windows, too, besides their budget"
    add("--windows", nargs="+", choices=METHODS, default=(), metavar="M", help=more)
    add("--retentions", nargs="+", metavar="R", help=f"default: {' '.join(RETENTIONS)}")
    add("--budgets", nargs="+", type=int, metavar="N", help="KV pairs of a question, instead of retentions")
    add("--unprotected", action="store_true", help="compress prompts, too")
    compressions.add_window_arguments(parser)
    compressions.add_baseline_arguments(parser)
    compressions.add_recall_arguments(parser)
    add("--short", action="store_true", help="under ten minutes on two cores")
    args = parser.parse_args(arguments)
    both = "without --retentions and --short: either a share or a number of KV pairs is kept"
    require(not (args.budgets and (args.retentions or args.short)), "--budgets", args.budgets, both)
    for name, value in SHORT.items() if args.short else ():
        setattr(args, name, getattr(args, name) or value)
    args.methods = args.methods or DEFAULT
    args.columns = [*map(str, args.budgets)] if args.budgets else args.retentions or RETENTIONS
    for option in ("methods", "windows", "columns"):
        command_line.require_unique(f"--{option}", getattr(args, option))
    args.recall = compressions.recall_of(args, [*args.methods, *args.windows])
    if args.budgets:
        require(min(args.budgets) >= 1, "--budgets", args.budgets, "at least 1")
    else:
        by_windows = all(SPECS[method].refusal("threshold") for method in args.methods)
        allowed = "kara first: it sets the budgets of those that have one"
        require(by_windows or args.methods[0] == "kara", "--methods", " ".join(args.methods), allowed)
        for retention in args.columns:
            compressions.check_retention("--retentions", retention)
    return args


def entries(args: argparse.Namespace) -> list[Entry]:
    own = [Entry(method, method, SPECS[method].refusal("threshold") is not None) for method in args.methods]
    return own + [Entry(f"{method}, windows", method, True) for method in args.windows]


# Trials


def window_trials(args: argparse.Namespace, full: Outcome) -> list[Trial]:
    """Kara and all others by windows, in every column."""
    trials = []
    for entry in filter(lambda entry: entry.windows, entries(args)):
        for column in args.columns:
            compression = compressions.kara(
                "0.5" if args.budgets else column,  # a share that `retained` replaces
                method=entry.method,
                window=args.window,
                buffer=args.buffer,
                compress_prompt=args.unprotected,
                **args.recall,
            )
            retained = retained_of(args, int(column), full) if args.budgets else None
            trials.append(make_trial(args, f"{entry.label} {column}", compression=compression, retained=retained))
    return trials


def retained_of(args: argparse.Namespace, budget: int, full: Outcome) -> list[int]:
    starts = [0] * len(full.tokens) if args.unprotected else prompts_of(full)
    lengths = zip(full.logical_lengths, starts, strict=True)
    return [compressions.retained_of(budget, length, start, args.window, args.buffer) for length, start in lengths]


def threshold_trials(args: argparse.Namespace, outcomes: Outcomes) -> list[Trial]:
    """The other methods. A question's budget is the column's, or the number of KV pairs that Kara held at its end."""
    full = outcomes[FULL]
    prompts = [0] * len(full.tokens) if args.unprotected else prompts_of(full)
    trials = []
    for entry in filter(lambda entry: not entry.windows, entries(args)):
        for column in args.columns:
            budgets = [int(column)] * len(prompts) if args.budgets else outcomes[f"kara {column}"].cached_lengths
            recent = compressions.recent_of(entry.method, args.recent, budgets, prompts)
            compression = compressions.threshold(
                entry.method, recent=recent, gap=args.gap, protect_prompt=not args.unprotected, **args.recall
            )
            trials.append(make_trial(args, f"{entry.label} {column}", compression=compression, budgets=budgets))
    return trials


def make_trial(args: argparse.Namespace, name: str, **parts: Any) -> Trial:
    return Trial(name=name, kv_offloading_size=args.kv_offloading_size if args.recall else None, **parts)


# The script


def run_figure(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    setting, processes = accuracy.setting_of(args)
    provenance = accuracy.provenance("benchmarks.paper.figure_5", arguments, setting)
    print(f"{machine.describe(provenance['machine'])}\n{setting.questions.load().describe()}", flush=True)
    begin = time.perf_counter()
    log = accuracy.Log(args.output / "figure_5.json", provenance, setting, args.resume)
    outcomes = run_all(setting, [Trial(name=FULL)], processes, log, log.known)
    outcomes |= run_all(setting, window_trials(args, outcomes[FULL]), processes, log, log.known)
    outcomes |= run_all(setting, threshold_trials(args, outcomes), processes, log, log.known)
    labels = [entry.label for entry in entries(args)]
    unit = "KV pairs" if args.budgets else "retention"
    print(f"\n{answer_tables.show(labels, unit, args.columns, outcomes)}")
    print(f"\nIt took {(time.perf_counter() - begin) / 60:.0f} minutes.")
    x = {column: float(column) if args.budgets else 100 * float(Fraction(column)) for column in args.columns}
    xlabel = "KV pairs of a question" if args.budgets else "retention (%)"
    lines = {label: {place: outcomes[f"{label} {column}"] for column, place in x.items()} for label in labels}
    answer_tables.plot(args.output / "figure_5.png", xlabel, {"": lines}, outcomes[FULL])
    print(f"Written: {args.output / 'figure_5.json'}, {args.output / 'figure_5.png'}")


if __name__ == "__main__":
    command_line.run_script(run_figure)
