"""Peaks of the device: bytes copied and operations of a matrix product, each second. Floors follow."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.device.log import Log
from benchmarks.device.target import Target
from benchmarks.device.timing import seconds_in_graph, seconds_with_host


@dataclass(frozen=True)
class Ceilings:
    """copy_bytes_per_s: bytes read plus bytes written. matmul_flops_per_s: of a bfloat16 product."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float

    def floor(self, num_bytes: float, flops: float = 0.0) -> float:
        """Seconds below which no version can be that moves so many bytes and does so many operations."""
        return max(num_bytes / self.copy_bytes_per_s, flops / self.matmul_flops_per_s)


def measure(target: Target) -> Ceilings:
    return Ceilings(copy_bandwidth(target), matmul_rate(target))


def copy_bandwidth(target: Target) -> float:
    """Bytes/s, read and written, of a copy far larger than any cache."""
    source = target.randn(target.size(1 << 31, 1 << 22))  # random: zeros may be faster
    destination = torch.empty_like(source)
    seconds = seconds_with_host(target, [lambda: destination.copy_(source)])
    return 2 * source.nbytes / seconds


def matmul_rate(target: Target) -> float:
    """FLOP/s of a square bfloat16 product."""
    size = target.size(8192, 128)
    a, b = (target.randn(size, size, seed=seed) for seed in (0, 1))
    product = torch.empty_like(a)
    return 2 * size**3 / seconds_in_graph(target, [lambda: torch.mm(a, b, out=product)])


def run(target: Target, log: Log) -> None:
    log.measure("copy, bytes read and written", lambda: {"bytes_per_s": copy_bandwidth(target)})
    log.measure(f"bfloat16 product of {target.size(8192, 128)}", lambda: {"flops_per_s": matmul_rate(target)})
