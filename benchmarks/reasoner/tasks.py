"""The kinds of problems, and how large each may be."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.reasoner import recall
from benchmarks.reasoner.columns import make_columns
from benchmarks.reasoner.problems import NAMES, NUM_ASKED, Problem
from benchmarks.reasoner.programs import MAX_LINES, at_length, dense, make_program, worded


@dataclass(frozen=True)
class Task:
    """`make(rng, size)` draws a problem; the model is trained for sizes from `smallest` to `largest` (which fill its
    context of 4,096 tokens, or use up the names). `size` counts `unit`."""

    make: Callable[[random.Random, int], Problem]
    unit: str
    smallest: int
    largest: int


TASKS = {
    "dense": Task(partial(make_program, style="short", write=dense), "lines", 2, MAX_LINES),
    "program": Task(partial(make_program, style="words", write=worded), "lines", 2, MAX_LINES),
    "long": Task(partial(make_program, style="long", write=at_length), "lines", 2, 44),
    "addition": Task(partial(make_columns, multiplies=False), "places", NUM_ASKED, 48),
    "multiplication": Task(partial(make_columns, multiplies=True), "places", NUM_ASKED, 48),
    "recall": Task(recall.make_recall, "pairs", NUM_ASKED, len(NAMES)),
    "needle": Task(recall.make_needle, "sentences", 4, 280),
}
DEFAULT_TASK, DEFAULT_SIZE = "program", 32


def make_problem(rng: random.Random, size: int = DEFAULT_SIZE, task: str = DEFAULT_TASK) -> Problem:
    """Draw a problem of one of `TASKS`. Raises ValueError if there is no such task, or no problem of that size."""
    if task not in TASKS:
        raise ValueError(f"task is {task!r}; choose one of {', '.join(TASKS)}")
    return TASKS[task].make(rng, size)
