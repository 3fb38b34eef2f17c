"""Kernels with a mistake that a strict interpreter finds."""

# A launch takes options of which Triton's types say nothing.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_next(numbers):
    """The last program has no next number."""
    place = numbers + tl.program_id(0)
    tl.store(place, tl.load(place) + tl.load(place + 1))


@triton.jit
def far_offset(numbers, stride):
    """Two strides are more than 32 bits have."""
    tl.store(numbers + (tl.program_id(0) + 2) * stride, 0.0)
