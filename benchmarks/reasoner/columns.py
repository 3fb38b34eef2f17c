"""Long addition, and multiplication by one digit: columns with carries, from the lowest place to the highest.

The numbers are given column by column, as they stand on paper: `3+5=a,7+2=b,...` for addition, `times 7: 3=a,2=b,...`
for multiplication, where a, b, ... name the digits of the result. A carry matters for one column and then no more; the
digits of the result are asked for at the end.
"""

from __future__ import annotations

import random

from benchmarks.reasoner.problems import NAMES, NUM_ASKED, Problem


def make_columns(rng: random.Random, places: int, *, multiplies: bool) -> Problem:
    """A sum of two numbers of `places` digits, with about 25 tokens of working a place, or the product of one and a
    digit, with about 30. Raises ValueError for too few places or too many."""
    if not NUM_ASKED <= places <= len(NAMES):
        raise ValueError(f"places is {places}; allowed are {NUM_ASKED} to {len(NAMES)}: every place is one letter")
    factor = rng.randrange(2, 10) if multiplies else None
    columns, steps, digits, carry = [], [], {}, 0
    for name in rng.sample(NAMES, places):
        x = rng.randrange(10)
        if factor is None:
            y = rng.randrange(10)
            total = x + y + carry
            columns.append(f"{x}+{y}={name}")
            said = f"{x}+{y} and carry {carry}"
        else:
            total = x * factor + carry
            columns.append(f"{x}={name}")
            said = f"{x} times {factor}, that is {x * factor}, and carry {carry}"
        digits[name], carry = total % 10, total // 10
        step = f"at {name} we have {said}, so we get {total}, that is {name}{digits[name]} and carry {carry}.\n"
        steps.append(step)
    asked = rng.sample([*digits], NUM_ASKED)
    answer = "".join(f"{name}{digits[name]}" for name in asked)
    task = "add" if factor is None else f"times {factor}"
    prompt = f"{task}: {','.join(columns)},\n?{','.join(asked)}\n"
    return Problem(prompt, "".join(steps) + f"all is done, so the answer is ?{answer}", answer)
