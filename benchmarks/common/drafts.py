"""Drafts that were tried while something ran, and how many of their tokens were right."""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple

from kvllm.stats import DraftCounts


class Tried(NamedTuple):
    """drafts: how many. tokens: of all of them. right: the share of drafts that are right at each position."""

    drafts: int
    tokens: int
    right: list[float]


def tried(before: DraftCounts, now: DraftCounts) -> Tried:
    """Those between two counts."""
    drafts = now.drafts - before.drafts
    pairs = zip_longest(now.right, before.right, fillvalue=0)
    return Tried(drafts, now.tokens - before.tokens, [(late - early) / max(1, drafts) for late, early in pairs])
