"""Shuffled linked programs: arithmetic problems whose solution has to be worked out step by step.

A program is a chain of assignments modulo 10. Every line carries as its label the name written by the line that runs
before it (`#` for the first), and the lines are shown out of order, so running the program means following the labels.
Each name is written exactly once, and the operands of a line are uniform over all names written before it: most
look-ups reach far back into the text generated so far.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

NAMES = string.ascii_letters
SYMBOLS = NAMES + string.digits + "#>+-=?,\n"
NUM_INPUTS = 4
NUM_ASKED = 3
DEFAULT_LINES = 48
MAX_LINES = len(NAMES) - NUM_INPUTS


@dataclass(frozen=True)
class Problem:
    """One program and its solution.

    `prompt` ends with a newline, and `working` follows it directly. `answer` is the part of `working` after its `?`:
    every name asked for, each followed by its value.
    """

    prompt: str
    working: str
    answer: str


def make_problem(rng: random.Random, lines: int = DEFAULT_LINES) -> Problem:
    """Draw a program of `lines` assignments; all problems with equally many lines have texts of equal length.

    Raises ValueError unless 1 <= lines <= MAX_LINES.
    """
    if not 1 <= lines <= MAX_LINES:
        raise ValueError(f"lines is {lines}; a program has 1 to {MAX_LINES} lines, since every name is one letter")
    names = rng.sample(NAMES, NUM_INPUTS + lines)
    values = {name: rng.randrange(10) for name in names[:NUM_INPUTS]}
    inputs = ",".join(f"{name}{value}" for name, value in values.items())

    label = "#"
    program, working = [], []
    for i in range(NUM_INPUTS, len(names)):
        x, y, z = rng.choice(names[:i]), rng.choice(names[:i]), names[i]
        sign = rng.choice("+-")
        values[z] = (values[x] + values[y] if sign == "+" else values[x] - values[y]) % 10
        program.append(f"{label}>{x}{sign}{y}={z}")
        working.append(f"{label}>{x}{values[x]}{sign}{y}{values[y]}={z}{values[z]}")
        label = z

    asked = rng.sample(names, NUM_ASKED)
    answer = "".join(f"{name}{values[name]}" for name in asked)
    working.append(f"{label}>?{answer}")
    rng.shuffle(program)
    prompt = "\n".join([inputs, *program, f"{label}>?{''.join(asked)}"]) + "\n"
    return Problem(prompt, "\n".join(working), answer)


def grade(problem: Problem, text: str) -> tuple[bool, bool]:
    """Compare generated text, without the end-of-sequence token, to the solution: (right answer, exact working)."""
    return text.rpartition("?")[2] == problem.answer, text == problem.working
