"""What these scripts have in common: the paper's settings of Kara, and the problems that the reasoner solves."""

from __future__ import annotations

import argparse
import random
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

from benchmarks.reasoner.problems import Problem
from benchmarks.reasoner.tasks import DEFAULT_TASK, TASKS, make_problem
from kvllm import CompressionConfig, Standalone
from kvllm.compression.specs import SPECS
from kvllm.config import require
from kvllm.engine_args import DEFAULT_MODEL

PAPER = "Kara: Efficient Reasoning LLM Serving via Sliding-Window KV Cache Compression, arXiv 2607.01237"
GAIN = "+12.75%"
"""Of output throughput over the full cache, with 257 of 768 KV pairs kept. The other figures are not at hand."""
WINDOWS: dict[str, Any] = {"policy": "periodic", "window_blocks": 3, "buffer": 32}
"""Of the paper's serving runs (appendix B.1), beside the defaults; at blocks of 256 tokens."""
WINDOW, BUFFER = 384, 128
"""Kara's window and buffer in KV pairs where answers count: with these most were right."""


def snapkv(block_size: int) -> CompressionConfig:
    """SnapKV as in the paper's serving runs: with blocks of 256, it cuts 1280 KV pairs to 1025."""
    return CompressionConfig(
        method="snapkv",
        policy="threshold",
        threshold_tokens=5 * block_size,
        budget_tokens=4 * block_size + 1,
        query_window=block_size // 8,
        buffer=block_size // 8,
    )


def kara(retention: str, *, window: int, buffer: int, method: str = "kara", **options: Any) -> CompressionConfig:
    """Kara as in the paper's accuracy runs (section 4.1).

    retention: the share kept of `window - buffer` KV pairs. The buffer is kept whole.
    Raises ConfigError unless that is above 0 and at most 1.
    """
    try:
        share = Fraction(retention)
    except ValueError:
        share = Fraction(0)
    require(0 < share <= 1, "retention", retention, "a share above 0 and at most 1, like 0.3")
    retained = buffer + ceil(share * (window - buffer))
    own = SPECS[method].own(chunk_budget=8, max_chunk=8)
    policy = Standalone(window_blocks=window, retain_tokens=retained)
    return CompressionConfig(method=method, method_options=own, policy=policy, buffer=buffer, **options)


def add_problem_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    model = "a checkpoint (default: the model of the package)"
    add("--model", type=Path, default=DEFAULT_MODEL, metavar="DIR", help=model)
    add("--dtype", default="auto", help="default: the checkpoint's, float32 for the package's model")
    add("--seed", type=int, default=1, help="seed of the reasoner's problems (default 1)")


def make_problems(count: int, sizes: tuple[int, int], seed: int, task: str = DEFAULT_TASK) -> list[Problem]:
    """Problems of a task of the reasoner. Raises ConfigError for sizes that it does not have."""
    (low, high), of_task = sizes, TASKS[task]
    allowed = f"numbers of {of_task.unit} from {of_task.smallest} to {of_task.largest}, the smaller one first"
    require(of_task.smallest <= low <= high <= of_task.largest, "size", sizes, allowed)
    rng = random.Random(f"questions/{seed}")
    return [make_problem(rng, rng.randint(low, high), task) for _ in range(count)]
