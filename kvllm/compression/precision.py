"""Scores are products in full float32, on every device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_tf32() -> Iterator[None]:
    """Products in full float32, whatever the process allows: TF32 keeps 10 bits, and close scores would swap places."""
    matmul = torch.backends.cuda.matmul
    precision = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = precision
