"""How much of many cases is tried by default: see the profiles and the option --long in `tests/conftest.py`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings


def examples(count: int) -> int:
    """How many examples Hypothesis tries: `count` with pytest's option --long, and a twentieth of that without."""
    return max(1, count * settings.default.max_examples // 100)


def thinned(cases: Iterable[Any], every: int = 2) -> list[Any]:
    """Cases as parameters, each a value or a tuple of several; all but each `every`-th one are long."""
    return [
        pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=() if i % every == 0 else pytest.mark.long)
        for i, each in enumerate(cases)
    ]
