"""Leverage scores (Chari and Van Durme, arXiv 2507.08143): keep the keys that the others cannot stand in for.

The leverage of a key is its share in the span of all keys: `x (X'X)^-1 x'`, for keys in front of the rotation, less
their mean. As in the authors' code, X is first projected to fewer channels at random, and X'X has a small ridge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvllm.compression import MethodSpec, Option, register
from kvllm.compression.methods.token2chunk import top_indices
from kvllm.compression.region import everything, keeps_everything, with_buffer
from kvllm.compression.rotation import unrotate

RIDGE = 1e-2

SKETCH = Option("sketch", default=48, least=1, most=1 << 12)


def select(
    queries: Tensor | None,
    keys: Tensor,
    *,
    retain: int,
    buffer: int,
    last_positions: Sequence[int],
    frequencies: Tensor,
    layer: int,
    sketch: int = 48,
) -> Tensor:
    """Choose the KV pairs of a window to keep, per sequence and KV head.

    Args:
        queries: not used.
        keys: `[S, Hkv, W, d]`, rotated, of successive positions.
        retain: KV pairs kept of the W; everything is kept if `retain >= W`.
        buffer: the last KV pairs of the window, always kept. Their keys count in the span.
        last_positions: for each sequence the position of its last key.
        frequencies: float32 `[d / 2]`, of the rotary embedding.
        layer: the layers of a model are projected differently.
        sketch: channels that keys are projected to; none are lost if `sketch >= d`. Among fewer keys than channels, all
            have the same leverage.

    Returns:
        int64 `[S, Hkv, min(retain, W)]`: ascending offsets in the window.
    """
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    sequences = zip(keys, last_positions, strict=True)
    found = torch.stack([scores(unrotate(*each, frequencies), layer, sketch) for each in sequences])
    # In the first layer a repeated token has an equal key. Rounding makes these equal again, so that the first wins.
    found = found.round(decimals=4)
    return with_buffer(top_indices(found[..., : keys.shape[2] - buffer], retain - buffer), keys, buffer)


@torch.no_grad()
def scores(keys: Tensor, layer: int, sketch: int) -> Tensor:
    """Leverage of each key of one sequence among all of them; the heads share a projection.

    Args:
        keys: `[Hkv, n, d]`, not rotated.

    Returns:
        float32 `[Hkv, n]`, from 0 to 1.
    """
    # In float64 the ridge is enough for a factor to exist, whatever the keys are.
    centred = keys.double()
    centred = centred - centred.mean(dim=1, keepdim=True)
    if sketch < keys.shape[2]:
        centred = centred @ _projection(keys.shape[2], sketch, layer).to(keys.device)
    ridge = RIDGE * torch.eye(centred.shape[2], dtype=torch.float64, device=keys.device)
    factor, _ = torch.linalg.cholesky_ex(centred.mT @ centred + ridge)
    return torch.linalg.solve_triangular(factor, centred.mT, upper=False).square().sum(dim=1).float()


def _projection(head_dim: int, sketch: int, layer: int) -> Tensor:
    """A Gaussian matrix, the same one on any device: float64 `[head_dim, sketch]`."""
    return torch.from_numpy(np.random.default_rng(layer).standard_normal((head_dim, sketch)) / math.sqrt(sketch))


register(
    MethodSpec(
        "leverage",
        "the keys that others cannot stand in for",
        options=(SKETCH,),
        unrotates=True,
    ),
    select,
)
