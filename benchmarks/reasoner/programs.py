"""Shuffled linked programs: a chain of assignments modulo 10 that must be run line by line.

The label of a line is the name that the line before it writes (`#` for the first line). The prompt shows the lines out
of order, so a run of the program follows the labels. Each name is written exactly once. Half of the operands are among
the last RECENT names, and half are among the names that stay in use, every third one. So most look-ups of a long
program reach far back into the text, and most values are needed for a while and then never again.

A program can be worked out in three ways: dense (only names, signs and values), in words, and at length (in words,
with a check of each line). In words a tenth of the text is facts and the rest connects them, as in the text of large
reasoning models.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.reasoner.problems import NAMES, NUM_ASKED, Problem

NUM_INPUTS = 4
MAX_LINES = len(NAMES) - NUM_INPUTS
RECENT, KEPT = 8, 3


@dataclass(frozen=True)
class Line:
    """`label>x sign y=z`, with the values of x and y, and the result before and after the modulo."""

    label: str
    x: str
    sign: str
    y: str
    z: str
    values: tuple[int, int]

    @property
    def raw(self) -> int:
        a, b = self.values
        return a + b if self.sign == "+" else a - b

    @property
    def result(self) -> int:
        return self.raw % 10

    @property
    def code(self) -> str:
        return f"{self.x}{self.sign}{self.y}={self.z}"


Writer = Callable[[Line], str]


def dense(line: Line) -> str:
    a, b = line.values
    return f"{line.label}>{line.x}{a}{line.sign}{line.y}{b}={line.z}{line.result}\n"


def worded(line: Line) -> str:
    a, b = line.values
    wrapped = f", over ten, that leaves {line.result}" if line.raw > 9 else ""
    wrapped = wrapped or (f", below zero, ten more is {line.result}" if line.raw < 0 else "")
    return (
        f"at {line.label} we have {line.code}. now {line.x}{a} and {line.y}{b}, "
        f"so we get {line.raw}{wrapped}, that is {line.z}{line.result}.\n"
    )


def at_length(line: Line) -> str:
    a, b = line.values
    again = "plus" if line.sign == "+" else "minus"
    return (
        f"{worded(line)[:-1]} let us check it once more: {line.x}{a} {again} {line.y}{b}, yes, this gives "
        f"{line.result}, so {line.z}{line.result} is right. this line is done, go on with the next one.\n"
    )


def draw_lines(rng: random.Random, count: int) -> tuple[dict[str, int], list[Line]]:
    """The values of all names, the inputs first, and the lines in running order."""

    def operand(known: list[str]) -> str:
        return rng.choice(known[-RECENT:] if rng.random() < 0.5 else known[::KEPT])

    names = rng.sample(NAMES, NUM_INPUTS + count)
    values = {name: rng.randrange(10) for name in names[:NUM_INPUTS]}
    label, lines = "#", []
    for i in range(NUM_INPUTS, len(names)):
        x, y = (operand(names[:i]) for _ in "xy")
        line = Line(label, x, rng.choice("+-"), y, names[i], (values[x], values[y]))
        values[line.z] = line.result
        lines.append(line)
        label = line.z
    return values, lines


def make_program(rng: random.Random, count: int, style: str, write: Writer) -> Problem:
    """A program of `count` lines, out of order in the prompt. Its first word names the style, in which `write` works
    out a line: with about 11 tokens (`dense`), 37 (`worded`) or 74 (`at_length`).

    Raises ValueError unless 1 <= count <= MAX_LINES.
    """
    if not 1 <= count <= MAX_LINES:
        raise ValueError(f"lines is {count}; a program has 1 to {MAX_LINES} lines, since every name is one letter")
    values, lines = draw_lines(rng, count)
    asked = rng.sample([*values], NUM_ASKED)
    inputs = ",".join(f"{name}{value}" for name, value in [*values.items()][:NUM_INPUTS])
    label = lines[-1].z
    answer = "".join(f"{name}{values[name]}" for name in asked)
    program = [f"{line.label}>{line.code}" for line in lines]
    rng.shuffle(program)
    prompt = "\n".join([f"{style}: {inputs}", *program, f"{label}>?{','.join(asked)}"]) + "\n"
    end = f"{label}>?{answer}" if write is dense else f"at {label} all is done, so the answer is ?{answer}"
    return Problem(prompt, "".join(map(write, lines)) + end, answer)
