"""What kernels are launched with on the device at hand: one place for choices that differ between GPUs."""

from __future__ import annotations

import os
from typing import Any

import triton


def capability() -> int:
    """Compute capability of the current device, ten times: 90 for 9.0, and in Triton's interpreter."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return 90
    target: Any = triton.runtime.driver.active.get_current_target()
    return target.arch if target.backend == "cuda" else 0


def has_boxes() -> bool:
    """Whether the device has the TMA, and the shared memory that tiles of 128 keys and values take."""
    return capability() == 90


def multiplies_from_memory() -> bool:
    """Whether operands of products stay in shared memory, by wgmma or tcgen05. On other devices they take registers
    beside the sums: tiles that fit on 9.0 and 10.0 spill there, and programs have 99 KiB in all on 8.6, 8.9 and 12.0.
    """
    return capability() // 10 in (9, 10)


def fits_wide_tiles() -> bool:
    """Whether 32 latents of 16 bits, and as many that are on their way, fit beside 32 queries of as many channels: not
    in 99 KiB, and on 8.0 and 10.0 not in registers."""
    return capability() == 90
