"""Tables and a plot of the right answers of several methods, over what they keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.common import intervals, report
from benchmarks.common.trials import FULL, Outcome, percent

Outcomes = Mapping[str, Outcome]
"""The full cache's outcome, and others by method and column, as in "kara 0.2"."""


def show(labels: Sequence[str], unit: str, columns: Sequence[str], outcomes: Outcomes) -> str:
    """Right answers, paired differences to the full cache and to the first method, memory, and cost.

    labels: the methods, first the one that others are compared with. unit: what the columns are.
    """
    first, full = labels[0], outcomes[FULL]

    def table(cell: Callable[[Outcome, str], str]) -> str:
        rows = [[label, *(cell(outcomes[f"{label} {column}"], column) for column in columns)] for label in labels]
        return report.table(["", *(f"{unit} {column}" for column in columns)], rows)

    def minus_full(outcome: Outcome, _: str) -> str:
        return _minus(outcome, full)

    def minus_first(outcome: Outcome, column: str) -> str:
        return _minus(outcome, outcomes[f"{first} {column}"])

    questions = len(full.right)
    parts = [
        f"Right answers in % with {intervals.CONFIDENCE:.0%} intervals, {questions} questions; full cache "
        f"{percent(full)}\n{table(lambda outcome, _: percent(outcome))}",
        "Minus the full cache, same questions, in points (p: McNemar's exact test)\n" + table(minus_full),
        f"Minus {first}, same questions, in points\n{table(minus_first)}" if len(labels) > 1 else "",
        f"KV pairs kept at the end, %\n{table(lambda outcome, _: f'{100 * outcome.kept:.1f}')}",
        f"Seconds of compression events / seconds of the processor in all; full cache {full.cpu_seconds:.0f}\n"
        + table(lambda outcome, _: f"{outcome.event_seconds:.1f} / {outcome.cpu_seconds:.0f}"),
    ]
    return "\n\n".join(filter(None, parts))


def _minus(outcome: Outcome, other: Outcome) -> str:
    difference = intervals.paired_difference(outcome.right, other.right)
    return f"{difference.text} (p {difference.p_value:.1g})"


def plot(path: Path, labels: Sequence[str], xlabel: str, columns: Mapping[str, float], outcomes: Outcomes) -> None:
    """Right answers with their intervals, a line for each method. columns: the place of each on the x axis."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for i, label in enumerate(labels):
        of_method = [outcomes[f"{label} {column}"] for column in columns]
        y = [100 * outcome.accuracy for outcome in of_method]
        bounds = [intervals.interval(sum(outcome.right), len(outcome.right)) for outcome in of_method]
        errors = [
            [value - 100 * low for value, (low, _) in zip(y, bounds, strict=True)],
            [100 * high - value for value, (_, high) in zip(y, bounds, strict=True)],
        ]
        style: dict[str, Any] = {
            "color": report.COLOURS[i % len(report.COLOURS)],
            "linestyle": report.STYLES[i // len(report.COLOURS) % len(report.STYLES)],
        }
        axes.errorbar(
            [*columns.values()],
            y,
            yerr=errors,
            marker="o",
            markersize=3,
            linewidth=1.2,
            capsize=2,
            label=label,
            **style,
        )
    axes.axhline(100 * outcomes[FULL].accuracy, color="grey", linewidth=0.8, label=FULL)
    axes.set(xlabel=xlabel, ylabel="right answers (%)", ylim=(-2, 103))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    report.save(path, figure)
