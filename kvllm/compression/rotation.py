"""Rotary embedding backwards and forwards: vectors as they were before it, or would be at other positions.

Channel i and channel `i + d / 2` are a pair, which turns by `frequencies[i]` radians per position. The angles are
products in float32, as in models: so a rotation is taken back exactly, however long the text is.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotation(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[n, d / 2]` of the angles at int64 `positions [n]`."""
    angles = positions.float()[:, None] * frequencies
    return angles.cos(), angles.sin()


def mean_rotation(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[d / 2]`, averaged over positions: a rotation by these is the mean of the rotations."""
    cos, sin = rotation(positions, frequencies)
    return cos.mean(dim=0), sin.mean(dim=0)


def pair_lengths(x: Tensor) -> Tensor:
    """Length of each pair of channels: `[..., d]` -> float32 `[..., d / 2]`. No rotation changes it."""
    return torch.hypot(*x.float().chunk(2, dim=-1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """float32 `[..., d]` from `x [..., d]`; cos, sin: `[..., d / 2]`. With the negative sine, the rotation back."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def unrotate(x: Tensor, last_position: int, frequencies: Tensor) -> Tensor:
    """Vectors of successive positions, before their rotation: `[..., n, d]` -> float32 `[..., n, d]`.

    last_position: that of the last of the n.
    """
    positions = torch.arange(last_position - x.shape[-2] + 1, last_position + 1, device=x.device)
    cos, sin = rotation(positions, frequencies)
    return rotate(x, cos, -sin)
