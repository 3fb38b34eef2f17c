"""Numbers on which all agree that write or read vectors of a quantized KV cache: torch, and kernels."""

from __future__ import annotations

SCALE_BYTES = 4
"""Of a vector: a float32 scale, or a scale and a zero point in bfloat16."""
SMALLEST_MAGNITUDE = 1e-8
"""A vector of zeros has a scale, too."""
EXCESS_6 = 32
"""What codes of 6 bits have above the integers that they stand for, so that none is negative."""
