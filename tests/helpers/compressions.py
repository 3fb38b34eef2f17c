"""Compressions of the tests."""

from __future__ import annotations

from typing import Any

from kvllm import CompressionConfig

PAPER: dict[str, Any] = {"policy": "periodic", "window_blocks": 3, "buffer": 32}


def paper_compression(**options: Any) -> CompressionConfig:
    """With the policy, windows and buffer of Kara's paper, unless others are given."""
    paper = PAPER | options
    if paper["policy"] == "threshold" and "window_blocks" not in options:
        del paper["window_blocks"]
    return CompressionConfig(**paper)
