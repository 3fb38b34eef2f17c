"""The output of the benchmarks: JSON files, tables of text, and plots."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from kvllm.comparison.report import table

__all__ = ["table"]

# The palette of Okabe and Ito: its colours differ with any colour vision, and in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":")
MIB, GIB = 1 << 20, 1 << 30


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


class Line(NamedTuple):
    """The points of a line, and how far the interval of each reaches below and above it, if it has one."""

    x: Sequence[float]
    y: Sequence[float]
    errors: tuple[Sequence[float], Sequence[float]] | None = None


def plot_lines(
    path: Path, title: str, xlabel: str, panels: Mapping[str, Mapping[str, Line]], *, logarithmic: bool = False
) -> None:
    """Draw lines over one x axis.

    panels: by the label of the y axis, the lines by their labels. Lines of the same label look alike in all panels.
    logarithmic: the y axes.
    """
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    figure = Figure(figsize=(9, 2.5 * len(panels) + 2), layout="constrained")
    all_axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    handles = {}
    for axes, (ylabel, lines) in zip(all_axes, panels.items(), strict=True):
        for label, line in lines.items():
            index = labels.index(label)
            style = {"color": COLOURS[index % len(COLOURS)], "linestyle": STYLES[index // len(COLOURS) % len(STYLES)]}
            style |= {"linewidth": 1.2, "marker": "o" if len(line.x) < 50 else None, "markersize": 3, "capsize": 2}
            handles[label] = axes.errorbar(line.x, line.y, line.errors, **style)
        axes.set_ylabel(ylabel)
        if logarithmic:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1].set_xlabel(xlabel)
    figure.suptitle(title)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def plot_timelines(
    path: Path, title: str, timelines: Mapping[str, Sequence[Sequence[int]]], pools: Sequence[int]
) -> None:
    """Draw the running sequences, and the blocks of the KV pool in use, over the steps of several runs.

    timelines: by run, (running sequences, blocks in use) of each step. pools: blocks in the pool of each run.
    """
    running, used = {}, {}
    for (name, timeline), pool in zip(timelines.items(), pools, strict=True):
        steps = range(len(timeline))
        running[name] = Line(steps, [step[0] for step in timeline])
        used[name] = Line(steps, [100 * step[1] / pool for step in timeline])
    plot_lines(path, title, "step", {"running sequences": running, "KV pool in use (%)": used})
