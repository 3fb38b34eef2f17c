"""Random tensors, the table of rotations, and how far two ways to round may differ."""

from __future__ import annotations

import torch


def randn(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cos_sin_table(head_dim: int, max_positions: int = 100) -> torch.Tensor:
    frequencies = 1e4 ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(max_positions)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def assert_same_rounding(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal in float32 up to the order of a sum; in bfloat16 up to its last bit, and nearly everywhere to that."""
    if actual.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=3e-6, atol=1e-6)
        return
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-6)
    assert (actual == expected).float().mean() > 0.98


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
