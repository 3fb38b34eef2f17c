"""How many examples Hypothesis tries: see the profiles in `tests/conftest.py`."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> int:
    """`count` with pytest's option --long, and a twentieth of that without."""
    return max(1, count * settings.default.max_examples // 100)
