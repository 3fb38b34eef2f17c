"""Budgets that fall from layer to layer, as PyramidKV has them (Cai et al., arXiv 2406.02069). Imports no torch."""

from __future__ import annotations

import math
from fractions import Fraction


def layer_budgets(num_layers: int, length: int, retain: int, buffer: int, beta: int = 20) -> list[int]:
    """KV pairs kept beside the buffer, by layer: a falling line, rounded to the sum `num_layers * (retain - buffer)`.

    The last layer has `1 / beta` of the mean, or more where the first one would exceed the `length - buffer` there
    are. The exact fractions are rounded by largest remainder; of equals, the lower layer rounds up.
    """
    mean = min(retain, length) - buffer
    if num_layers == 1:
        return [mean]
    first = min(2 * mean - Fraction(mean, beta), Fraction(length - buffer))
    step = 2 * (first - mean) / (num_layers - 1)
    exact = [first - layer * step for layer in range(num_layers)]
    budgets = [math.floor(budget) for budget in exact]
    by_remainder = sorted(range(num_layers), key=lambda layer: budgets[layer] - exact[layer])
    for layer in by_remainder[: num_layers * mean - sum(budgets)]:
        budgets[layer] += 1
    return budgets
