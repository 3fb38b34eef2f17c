"""Tests of the CPU and of a GPU in one: `DEVICES` has the case "cuda" with the mark `gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = pytest.mark.parametrize("device", ["cpu", CUDA])
ALLOWED = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Most of ‖found − expected‖ / ‖expected‖. Sums are in float32; operands and results are rounded to the dtype."""


@contextmanager
def poisoned() -> Iterator[None]:
    """Everything that torch allocates without initializing it is NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Whatever makes the host wait for a GPU, other than for an event, is an error meanwhile."""
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")


def assert_near(found: torch.Tensor, expected: torch.Tensor, allowed: float) -> None:
    """By the norm of the difference in float64; NaN is not near."""
    expected = expected.cpu().double()
    error = float((found.cpu().double() - expected).norm() / expected.norm())
    assert error <= allowed, f"error {error:.3g}, allowed are {allowed:.3g}"
