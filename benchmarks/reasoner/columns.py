"""Long addition, and multiplication by one digit: columns with carries, from the lowest place to the highest.

The numbers are given column by column, as they stand on paper: `3+5=a,7+2=b,...` for addition, `times 7: 3=a,2=b,...`
for multiplication, where a, b, ... name the digits of the result. A carry matters for one column and then no more; the
digits of the result are asked for at the end.
"""

from __future__ import annotations

import random

from benchmarks.reasoner.problems import NAMES, NUM_ASKED, Problem


def check_places(places: int) -> None:
    if not NUM_ASKED <= places <= len(NAMES):
        raise ValueError(f"places is {places}; allowed are {NUM_ASKED} to {len(NAMES)}: every place is one letter")


def finish(rng: random.Random, task: str, columns: list[str], steps: list[str], digits: dict[str, int]) -> Problem:
    asked = rng.sample([*digits], NUM_ASKED)
    answer = "".join(f"{name}{digits[name]}" for name in asked)
    prompt = f"{task}: {','.join(columns)},\n?{','.join(asked)}\n"
    return Problem(prompt, "".join(steps) + f"all is done, so the answer is ?{answer}", answer)


def make_addition(rng: random.Random, places: int) -> Problem:
    """Two numbers of `places` digits, with about 25 tokens of working a place.

    Raises ValueError for too few places or too many.
    """
    check_places(places)
    columns, steps, digits, carry = [], [], {}, 0
    for name in rng.sample(NAMES, places):
        x, y = rng.randrange(10), rng.randrange(10)
        total = x + y + carry
        columns.append(f"{x}+{y}={name}")
        digits[name] = total % 10
        step = f"at {name} we have {x}+{y} and carry {carry}, so we get {total}, "
        carry = total // 10
        steps.append(f"{step}that is {name}{digits[name]} and carry {carry}.\n")
    return finish(rng, "add", columns, steps, digits)


def make_multiplication(rng: random.Random, places: int) -> Problem:
    """A number of `places` digits times one digit, with about 30 tokens of working a place.

    Raises ValueError for too few places or too many.
    """
    check_places(places)
    factor = rng.randrange(2, 10)
    columns, steps, digits, carry = [], [], {}, 0
    for name in rng.sample(NAMES, places):
        x = rng.randrange(10)
        total = x * factor + carry
        columns.append(f"{x}={name}")
        digits[name] = total % 10
        step = f"at {name} we have {x} times {factor}, that is {x * factor}, and carry {carry}, so we get {total}, "
        carry = total // 10
        steps.append(f"{step}that is {name}{digits[name]} and carry {carry}.\n")
    return finish(rng, f"times {factor}", columns, steps, digits)
