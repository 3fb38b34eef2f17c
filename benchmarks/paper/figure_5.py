"""Accuracy against retention, at equal memory (paper, figure 5).

    python -m benchmarks.paper.figure_5

Kara runs first, at each retention, as in the paper's accuracy runs: it keeps that share of every window, and the prompt
whole. The KV pairs that it holds at the end of a question become that question's budget for each baseline. A baseline
cuts its cache to the budget whenever the cache has a few KV pairs more; its prompt stays whole and counts. So every
method ends every question with the same memory. All methods answer the same questions, greedily. The full cache is the
line to reach.

`--short` asks fewer questions at fewer retentions. The figures go to figure_5.json, a plot to figure_5.png.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.common import accuracy, command_line, compressions, intervals, machine, report
from benchmarks.common.trials import FULL, Outcome, Trial, percent, run_all
from kvllm.compression.specs import SPECS
from kvllm.config import require

METHODS = tuple(method for method in SPECS if not method.startswith("kara_no"))  # the ablations are in table_1
DEFAULT = tuple(  # without statistics beside the model, and without StreamingLLM's second form, which has no sinks
    method for method in METHODS if method != "sliding_window" and not SPECS[method].calibrated
)
RETENTIONS = ("0.2", "0.3", "0.4", "0.5", "0.6")
SHORT = {
    "problems": 100,
    "retentions": ("0.2", "0.3", "0.5"),
    "methods": ("kara", "kara_sharp", "snapkv", "keydiff", "streaming"),
}

Outcomes = dict[tuple[str, str], Outcome]
"""Outcomes by method and retention."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = accuracy.make_parser("benchmarks.paper.figure_5", __doc__)
    add = parser.add_argument
    add("--methods", nargs="+", choices=METHODS, metavar="M", help=f"kara and others (default: {' '.join(DEFAULT)})")
    add("--retentions", nargs="+", metavar="R", help=f"default: {' '.join(RETENTIONS)}")
    add(
        "--window",
        type=int,
        default=compressions.WINDOW,
        help=f"KV pairs of Kara's window (default {compressions.WINDOW})",
    )
    add(
        "--buffer",
        type=int,
        default=compressions.BUFFER,
        help=f"KV pairs of its buffer (default {compressions.BUFFER})",
    )
    add(
        "--recent",
        type=int,
        default=compressions.RECENT,
        help=f"last KV pairs that the others always keep (default {compressions.RECENT})",
    )
    add(
        "--gap",
        type=int,
        default=compressions.GAP,
        help=f"KV pairs from a budget to its threshold (default {compressions.GAP})",
    )
    add("--short", action="store_true", help="under ten minutes on two cores")
    args = parser.parse_args(arguments)
    for name, value in SHORT.items() if args.short else ():
        setattr(args, name, getattr(args, name) or value)
    args.methods = args.methods or DEFAULT
    args.retentions = args.retentions or RETENTIONS
    command_line.require_unique("--methods", args.methods)
    command_line.require_unique("--retentions", args.retentions)
    require(args.methods[0] == "kara", "--methods", " ".join(args.methods), "kara first: it sets the budgets")
    for retention in args.retentions:
        compressions.check_retention("--retentions", retention)
    return args


def kara_trials(args: argparse.Namespace) -> list[Trial]:
    """The full cache, and Kara with its variants at every retention."""
    options = {"window": args.window, "buffer": args.buffer}
    return [
        Trial(name=FULL),
        *(
            Trial(name=f"{method} {r}", compression=compressions.kara(r, method=method, **options))
            for method in args.methods
            if SPECS[method].refusal("threshold")
            for r in args.retentions
        ),
    ]


def baseline_trials(args: argparse.Namespace, kara: Mapping[str, Outcome]) -> list[Trial]:
    """The other methods. The budget of each question is the number of KV pairs that Kara held at its end."""
    baselines = [method for method in args.methods if not SPECS[method].refusal("threshold")]
    return [
        Trial(
            name=f"{method} {r}",
            compression=compressions.threshold(method, recent=recent_of(method, args, kara[f"kara {r}"]), gap=args.gap),
            budgets=kara[f"kara {r}"].cached_lengths,
        )
        for method in baselines
        for r in args.retentions
    ]


def recent_of(method: str, args: argparse.Namespace, kara: Outcome) -> int:
    prompts = [logical - tokens + 1 for logical, tokens in zip(kara.logical_lengths, kara.tokens, strict=True)]
    return compressions.recent_of(method, args.recent, kara.cached_lengths, prompts)


def show(args: argparse.Namespace, outcomes: Mapping[str, Outcome]) -> str:
    """Right answers, then the difference of each method to Kara on the same questions."""
    accuracies, differences = [], []
    for method in args.methods:
        of_method = [outcomes[f"{method} {r}"] for r in args.retentions]
        accuracies.append([method, *map(percent, of_method)])
        if method != "kara":
            pairs = zip(of_method, (outcomes[f"kara {r}"] for r in args.retentions), strict=True)
            found = [intervals.paired_difference(outcome.right, kara.right) for outcome, kara in pairs]
            differences.append([method, *(f"{d.text} (p {d.p_value:.1g})" for d in found)])
    kara = [outcomes[f"kara {r}"] for r in args.retentions]
    losses = [intervals.paired_difference(outcome.right, outcomes[FULL].right).text for outcome in kara]
    rows = [
        ["KV pairs kept at the end, %", *(f"{100 * outcome.kept:.1f}" for outcome in kara)],
        ["kara minus full cache", *losses],
    ]
    header = [f"retention {r}" for r in args.retentions]
    full = outcomes[FULL]
    return "\n".join(
        [
            f"Right answers in % with {intervals.CONFIDENCE:.0%} intervals; full cache {percent(full)}",
            report.table(["", *header], accuracies),
            "",
            "Minus Kara, same questions, in points (p: McNemar's exact test)",
            report.table(["", *header], [*rows, *differences]),
        ]
    )


def plot(path: Path, args: argparse.Namespace, outcomes: Mapping[str, Outcome]) -> None:
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    x = [100 * float(Fraction(r)) for r in args.retentions]
    for i, method in enumerate(args.methods):
        of_method = [outcomes[f"{method} {r}"] for r in args.retentions]
        y = [100 * outcome.accuracy for outcome in of_method]
        bounds = [intervals.interval(sum(outcome.right), len(outcome.right)) for outcome in of_method]
        errors = [
            [value - 100 * low for value, (low, _) in zip(y, bounds, strict=True)],
            [100 * high - value for value, (_, high) in zip(y, bounds, strict=True)],
        ]
        style: dict[str, Any] = {
            "color": report.COLOURS[i % len(report.COLOURS)],
            "linestyle": report.STYLES[i // len(report.COLOURS)],
        }
        axes.errorbar(x, y, yerr=errors, marker="o", markersize=3, linewidth=1.2, capsize=2, label=method, **style)
    axes.axhline(100 * outcomes[FULL].accuracy, color="grey", linewidth=0.8, label=FULL)
    axes.set(xlabel="retention (%)", ylabel="right answers (%)", ylim=(-2, 103))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    report.save(path, figure)


def run_figure(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    setting, processes = accuracy.setting_of(args)
    provenance = accuracy.provenance("benchmarks.paper.figure_5", arguments, setting)
    trials = kara_trials(args)
    print(f"{machine.describe(provenance['machine'])}\n{setting.questions.load().describe()}", flush=True)
    begin = time.perf_counter()
    log = accuracy.Log(args.output / "figure_5.json", provenance)
    outcomes = run_all(setting, trials, processes, log)
    outcomes |= run_all(setting, baseline_trials(args, outcomes), processes, log)
    print(f"\n{show(args, outcomes)}\n\nIt took {(time.perf_counter() - begin) / 60:.0f} minutes.")
    plot(args.output / "figure_5.png", args, outcomes)
    print(f"Written: {args.output / 'figure_5.json'}, {args.output / 'figure_5.png'}")


def main() -> None:
    command_line.run_script(run_figure)


if __name__ == "__main__":
    main()
