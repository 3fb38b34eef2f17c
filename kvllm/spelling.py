"""What a mistyped name was meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest of the known ones, or nothing where none is near."""
    known = {each.lower(): each for each in names}
    near = get_close_matches(name.lower(), known, n=1)
    return f"; did you mean {known[near[0]]}?" if near else ""
