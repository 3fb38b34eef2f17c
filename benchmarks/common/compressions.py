"""How much of the cache Kara and the baselines keep in the comparisons of answers."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from math import ceil
from typing import Any

from kvllm import CompressionConfig
from kvllm.config import require

BLOCK_SIZE = 16
WINDOW, BUFFER = 384, 128
"""Of Kara, in entries: what benchmarks/quality/settings.py found to keep most of the right answers."""
RECENT, GAP = 32, 64
"""Of the baselines: the last entries, always kept, whose queries score; and the entries between a budget and its
threshold."""


def kara(
    retention: Fraction | str, *, window: int = WINDOW, buffer: int = BUFFER, method: str = "kara", **options: Any
) -> CompressionConfig:
    """Kara as in the paper's accuracy runs (section 4.1): of `window - buffer` entries the share `retention`."""
    retained = buffer + ceil(Fraction(retention) * (window - buffer))
    settings = {"chunk_budget": 8, "max_chunk": 8} | options
    return CompressionConfig(
        method=method, policy="standalone", window_blocks=window, retain_tokens=retained, buffer=buffer, **settings
    )


def threshold(method: str, *, recent: int = RECENT, gap: int = GAP) -> CompressionConfig:
    """A baseline that cuts a cache to its budget whenever it has `gap` entries more; prompts stay whole, as Kara's do.

    The budget here is replaced by one for each question.
    """
    return CompressionConfig(
        method=method,
        policy="threshold",
        protect_prompt=True,
        threshold_tokens=1024 + gap,
        budget_tokens=1024,
        buffer=recent,
        query_window=recent,
    )


def recent_of(method: str, recent: int, kara: Iterable[int], prompts: Iterable[int]) -> int:
    """The last entries that a baseline keeps in any case, for texts of which Kara ends with `kara` entries.

    H2O keeps as many recent entries as heavy hitters: half of what the smallest budget leaves beside the prompt.
    """
    if method != "h2o":
        return recent
    blocks = (-(-prompt // BLOCK_SIZE) * BLOCK_SIZE for prompt in prompts)
    return max(recent, min(n - prompt for n, prompt in zip(kara, blocks, strict=True)) // 2)


def check_retention(option: str, text: str) -> None:
    """Raises ConfigError unless `text` is a share, like 0.3."""
    try:
        fits = 0 < Fraction(text) <= 1
    except ValueError:
        fits = False
    require(fits, option, text, "a share above 0 and at most 1, like 0.3")
