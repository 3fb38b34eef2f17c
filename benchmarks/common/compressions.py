"""The compressions whose answers are compared: Kara by windows, and the baselines with Kara's memory as a budget."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from fractions import Fraction
from math import ceil
from typing import Any

from kvllm import CompressionConfig
from kvllm.compression.specs import SPECS
from kvllm.config import require
from kvllm.config.compression import RECALL_DTYPES

BLOCK_SIZE = 16
WINDOW, BUFFER = 384, 128
"""Kara's window and buffer in KV pairs: with these most answers were right."""
RECALL_OPTIONS = ("recall_bound", "recall_period", "recall_chunks", "recall_dtype")
RECENT, GAP = 32, 64
"""KV pairs of the baselines: the last ones, which are always kept and whose queries score; and those between a budget
and its threshold."""


def kara(
    retention: Fraction | str, *, window: int = WINDOW, buffer: int = BUFFER, method: str = "kara", **options: Any
) -> CompressionConfig:
    """Kara as in the paper's accuracy runs (section 4.1).

    retention: the share kept of `window - buffer` KV pairs. The buffer is kept whole.
    """
    retained = buffer + ceil(Fraction(retention) * (window - buffer))
    settings: dict[str, Any] = {"chunk_budget": 8, "max_chunk": 8} | options
    return CompressionConfig(
        method=method, policy="standalone", window_blocks=window, retain_tokens=retained, buffer=buffer, **settings
    )


def windows_of(length: int, start: int, window: int, buffer: int) -> int:
    """Windows that are compressed while a text is written; one that is full at the last token stays.

    length: KV pairs of the whole text. start: KV pairs in front of its first window.
    """
    return max(0, length - 1 - start - buffer) // (window - buffer)


def retained_of(budget: int, length: int, start: int, window: int, buffer: int) -> int:
    """KV pairs to keep of each window, so that a text ends with at most `budget`. length, start: as in `windows_of`.

    Raises ConfigError if the buffers alone take more.
    """
    count = windows_of(length, start, window, buffer)
    most = window - buffer
    allowed = (
        f"at least {length - count * most} for a text of {length} tokens with windows of {window} KV pairs and a "
        f"buffer of {buffer}, from token {start} on: raise it, lower --buffer, or leave out methods by windows"
    )
    require(length - count * most <= budget, "--budgets", budget, allowed)
    return window if length <= budget else window - -(-(length - budget) // count)


def threshold(
    method: str, *, recent: int = RECENT, gap: int = GAP, protect_prompt: bool = True, **options: Any
) -> CompressionConfig:
    """A baseline that cuts a cache to its budget whenever it has `gap` KV pairs more. Prompts stay whole, as with Kara.

    The budget of each question replaces the one here.
    """
    return CompressionConfig(
        method=method,
        policy="threshold",
        protect_prompt=protect_prompt,
        threshold_tokens=1024 + gap,
        budget_tokens=1024,
        buffer=recent,
        query_window=recent,
        **options,
    )


def recent_of(method: str, recent: int, kara: Iterable[int], prompts: Iterable[int]) -> int:
    """The number of last KV pairs that a baseline always keeps.

    H2O keeps as many recent KV pairs as heavy hitters: half of those that the smallest budget leaves beside the prompt.
    kara: KV pairs that Kara holds at the end of each text. prompts: tokens of each prompt.
    """
    if method != "h2o":
        return recent
    blocks = (-(-prompt // BLOCK_SIZE) * BLOCK_SIZE for prompt in prompts)
    return max(recent, min(n - prompt for n, prompt in zip(kara, blocks, strict=True)) // 2)


def check_retention(option: str, text: str) -> None:
    """Raises ConfigError unless `text` is a share like 0.3."""
    try:
        fits = 0 < Fraction(text) <= 1
    except ValueError:
        fits = False
    require(fits, option, text, "a share above 0 and at most 1, like 0.3")


def add_recall_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    bound = "let dropped KV pairs come back where more than this share of a query's attention may lie in them"
    add("--recall-bound", type=float, metavar="SHARE", help=bound)
    add("--recall-period", type=int, metavar="N", help="let dropped KV pairs come back at every N-th token")
    add("--recall-chunks", type=int, default=2, metavar="N", help="most chunks that come back at once (default 2)")
    dtype = "of dropped KV pairs (default: as the pool has them)"
    add("--recall-dtype", choices=RECALL_DTYPES, default="auto", metavar="D", help=dtype)
    size = "GiB of host memory, half of it for dropped KV pairs that may come back (default 2)"
    add("--kv-offloading-size", type=float, default=2.0, metavar="GIB", help=size)


def recall_of(args: argparse.Namespace, methods: Iterable[str]) -> dict[str, Any]:
    """The options of CompressionConfig that `add_recall_arguments` describe; none without recall.

    Raises ConfigError if they do not fit, or if one of the methods allows no recall.
    """
    if args.recall_bound is None and args.recall_period is None:
        return {}
    options = {name: getattr(args, name) for name in RECALL_OPTIONS}
    for method in methods:
        if SPECS[method].refusal("threshold"):
            kara("0.5", method=method, **options)
        else:
            threshold(method, **options)
    return options


def add_window_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--window", type=int, default=WINDOW, metavar="N", help=f"KV pairs of Kara's window (default {WINDOW})")
    add("--buffer", type=int, default=BUFFER, metavar="N", help=f"KV pairs of its buffer (default {BUFFER})")


def add_baseline_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    recent, gap = "last KV pairs that the baselines always keep", "KV pairs from a budget to its threshold"
    add("--recent", type=int, default=RECENT, metavar="N", help=f"{recent} (default {RECENT})")
    add("--gap", type=int, default=GAP, metavar="N", help=f"{gap} (default {GAP})")
