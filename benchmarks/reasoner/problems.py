"""A problem, and the grading of an answer. The kinds of problems are in tasks.py."""

from __future__ import annotations

import string
from dataclasses import dataclass

NAMES = string.ascii_letters
NUM_ASKED = 3


@dataclass(frozen=True)
class Problem:
    """`prompt` ends with a newline, and `working` follows it directly. `answer` is what follows the `?` of `working`:
    every name asked for, each followed by its value."""

    prompt: str
    working: str
    answer: str


def grade(problem: Problem, text: str) -> tuple[bool, bool]:
    """Compare generated text, without the end-of-sequence token, to the solution: (right answer, exact working)."""
    return text.rpartition("?")[2] == problem.answer, text == problem.working
