"""Tables and a plot of the right answers of several methods, over what they keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.common import intervals, report
from benchmarks.common.trials import FULL, Outcome

Outcomes = Mapping[str, Outcome]
"""The full cache's outcome, and others by method and column, as in "kara 0.2". A method may lack columns."""
Points = Mapping[float, Outcome]
"""The points of a line, by their places on the x axis."""


def show(labels: Sequence[str], unit: str, columns: Sequence[str], outcomes: Outcomes) -> str:
    """Right answers, paired differences to the full cache and to the first method, memory, and cost.

    labels: the methods; the first one that has a column is what others are compared with. unit: what the columns are.
    """
    full = outcomes[FULL]
    first = next((label for label in labels if any(f"{label} {column}" in outcomes for column in columns)), labels[0])

    def shown(cell: Callable[[Outcome, str], str], label: str, column: str) -> str:
        outcome = outcomes.get(f"{label} {column}")
        return "-" if outcome is None else cell(outcome, column)

    def table(cell: Callable[[Outcome, str], str]) -> str:
        rows = [[label, *(shown(cell, label, column) for column in columns)] for label in labels]
        return report.table(["", *(f"{unit} {column}" for column in columns)], rows)

    def minus_full(outcome: Outcome, _: str) -> str:
        return _minus(outcome, full)

    def minus_first(outcome: Outcome, column: str) -> str:
        other = outcomes.get(f"{first} {column}")
        return "-" if other is None else _minus(outcome, other)

    questions = len(full.right)
    parts = [
        f"Right answers in % with {intervals.CONFIDENCE:.0%} intervals, {questions} questions; full cache "
        f"{intervals.percent(full.right)}\n{table(lambda outcome, _: intervals.percent(outcome.right))}",
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


def plot(path: Path, xlabel: str, panels: Mapping[str, Mapping[str, Points]], full: Outcome) -> None:
    """Right answers with their intervals.

    panels: by title, the lines by their labels. Lines of the same label look alike in all panels.
    """
    columns = 2 if len(panels) == 4 else max(1, min(3, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    figure = Figure(figsize=(9, 6 if rows == columns == 1 else 1 + 3 * rows), layout="constrained")
    all_axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    handles: dict[str, Any] = {}
    for index, (axes, (title, lines)) in enumerate(zip(all_axes, panels.items(), strict=False)):
        for label, points in lines.items():
            handles[label] = _draw(axes, points, labels.index(label))
        handles[FULL] = axes.axhline(100 * full.accuracy, color="grey", linewidth=0.8)
        axes.set(title=title, ylim=(-2, 103))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if index + columns >= len(panels):  # no panel below
            axes.set_xlabel(xlabel)
            axes.tick_params(labelbottom=True)
    for axes in all_axes[len(panels) :]:
        axes.set_axis_off()
    figure.supylabel("right answers (%)", fontsize="medium")
    figure.legend(handles.values(), list(handles), loc="outside lower center", ncols=4, frameon=False)
    report.save(path, figure)


def _draw(axes: Axes, points: Points, index: int) -> Any:
    """A line, whose look goes by its index."""
    y = [100 * outcome.accuracy for outcome in points.values()]
    bounds = [intervals.interval(sum(outcome.right), len(outcome.right)) for outcome in points.values()]
    errors = [
        [value - 100 * low for value, (low, _) in zip(y, bounds, strict=True)],
        [100 * high - value for value, (_, high) in zip(y, bounds, strict=True)],
    ]
    style: dict[str, Any] = {
        "color": report.COLOURS[index % len(report.COLOURS)],
        "linestyle": report.STYLES[index // len(report.COLOURS) % len(report.STYLES)],
    }
    return axes.errorbar([*points], y, yerr=errors, marker="o", markersize=3, linewidth=1.2, capsize=2, **style)
