"""What the scripts about answers share: the model and the problems on their command lines, and Kara as in the paper."""

from __future__ import annotations

import argparse
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

from benchmarks.reasoner.tasks import DEFAULT_TASK, TASKS
from kvllm import CompressionConfig, Standalone
from kvllm.compression.specs import SPECS
from kvllm.config import require
from kvllm.engine_args import DEFAULT_MODEL

WINDOW, BUFFER = 384, 128
"""Kara's window and buffer in KV pairs: with these most answers were right."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    model = "a checkpoint (default: the model of the package)"
    add("--model", type=Path, default=DEFAULT_MODEL, metavar="DIR", help=model)
    add("--dtype", help="default: float32 for the package's model, else the checkpoint's")
    add("--task", choices=TASKS, default=DEFAULT_TASK, help=f"task of the reasoner (default {DEFAULT_TASK})")
    add("--seed", type=int, default=1, help="seed of its problems (default 1)")


def dtype_of(args: argparse.Namespace) -> str:
    return args.dtype or ("float32" if args.model == DEFAULT_MODEL else "auto")


def kara(
    retention: Fraction | str, *, window: int = WINDOW, buffer: int = BUFFER, method: str = "kara", **options: Any
) -> CompressionConfig:
    """Kara as in the paper's accuracy runs (section 4.1).

    retention: the share kept of `window - buffer` KV pairs. The buffer is kept whole.
    """
    retained = buffer + ceil(Fraction(retention) * (window - buffer))
    own = SPECS[method].own(**{"chunk_budget": 8, "max_chunk": 8} | options)
    others = {name: value for name, value in options.items() if name not in own}
    policy = Standalone(window_blocks=window, retain_tokens=retained)
    return CompressionConfig(method=method, method_options=own, policy=policy, buffer=buffer, **others)


def check_retention(option: str, text: str) -> None:
    """Raises ConfigError unless `text` is a share like 0.3."""
    try:
        fits = 0 < Fraction(text) <= 1
    except ValueError:
        fits = False
    require(fits, option, text, "a share above 0 and at most 1, like 0.3")
