"""Shares of a window for each layer: from what a checkpoint's layers lose, or falling from layer to layer.

What layers lose stands in a file beside the checkpoint, which `kvllm calibrate --layer-losses` writes. This module
imports no torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from kvllm.compression.layer_budgets import layer_budgets
from kvllm.config import CompressionConfig, LayerGroup
from kvllm.core.policies import WindowOptions
from kvllm.errors import CheckpointError

LAYER_LOSSES_FILE = "kv_layer_losses.json"


class LayerLosses(Struct, frozen=True):
    """The losses of a checkpoint's layers.

    shares: of the KV pairs of a window in front of its buffer, ascending from 0 to 1.
    losses: for each layer what the model loses when this layer alone keeps each of the shares, and all others keep
        everything: the divergence KL(full || compressed) of its predictions, in nats a token. Each row is convex.
    text, tokens: what they were measured on.
    """

    shares: list[float]
    losses: list[list[float]]
    text: str
    tokens: int

    def at(self, layer: int, share: float) -> float:
        """The loss of a layer that keeps a share of its KV pairs."""
        of_layer, shares = self.losses[layer], self.shares
        after = min(max(1, bisect_left(shares, share)), len(shares) - 1)
        place = (share - shares[after - 1]) / (shares[after] - shares[after - 1])
        return of_layer[after - 1] + place * (of_layer[after] - of_layer[after - 1])

    def smoothed(self) -> LayerLosses:
        """Losses of which each falls by no greater factor, for its step of the share, than the one before it.

        Where much is kept, a loss is of few tokens that look up what was dropped. A text of some ten thousand tokens
        may have none of them, which tells that they are rare and not that there are none.
        """
        return structs.replace(self, losses=[self._smoothed(of_layer) for of_layer in self.losses])

    def _smoothed(self, losses: Sequence[float]) -> list[float]:
        steps = [after - before for before, after in pairwise(self.shares)]
        found = list(losses[:2])
        for i in range(2, len(losses) - 1):
            factor = found[-1] / found[-2] if found[-2] > 0 else 0.0
            found.append(max(losses[i], found[-1] * factor ** (steps[i - 1] / steps[i - 2])))
        return convex(self.shares, [*found, *losses[len(found) :]])


def read_losses(folder: Path, num_layers: int) -> LayerLosses:
    """Raises CheckpointError if the checkpoint's folder has no such file, or one that is not of this model."""
    path = folder / LAYER_LOSSES_FILE
    command = f"write it with `kvllm calibrate {folder} --layer-losses`"
    if not path.is_file():
        raise CheckpointError(f'{folder} has no {LAYER_LOSSES_FILE}, which layer_groups="auto" needs: {command}')
    try:
        found = msgspec.json.decode(path.read_bytes(), type=LayerLosses)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path} is not readable ({error}): {command}") from None
    shares = found.shares
    ascends = shares == sorted({0.0, *shares, 1.0})
    if not ascends or len(found.losses) != num_layers or any(len(row) != len(shares) for row in found.losses):
        raise CheckpointError(f"{path} is not of this model, which has {num_layers} layers: {command}")
    return found


def resolve(
    compression: CompressionConfig, folder: Path, windows: Sequence[int | None], block_size: int
) -> CompressionConfig:
    """A configuration with a method in place of `method="auto"`, and groups of layers in place of `layer_groups="auto"`
    or "pyramid".

    windows: of each layer, None where it attends all tokens. Raises CheckpointError as `read_losses` does.
    """
    compression = compression.with_method()
    if not isinstance(compression.layer_groups, str):
        return compression
    layers = [layer for layer, window in enumerate(windows) if window is None]
    if compression.layer_groups == "pyramid":
        blocks = falling_line(len(layers), compression, block_size)
    else:
        blocks = propose(read_losses(folder, len(windows)).smoothed(), layers, compression, block_size)
    groups = [
        LayerGroup(tuple(layer for layer, own in zip(layers, blocks, strict=True) if own == kept), kept)
        for kept in sorted(set(blocks))
    ]
    return structs.replace(compression, layer_groups=tuple(groups))


def propose(losses: LayerLosses, layers: Sequence[int], compression: CompressionConfig, block_size: int) -> list[int]:
    """Blocks of a window that each of some layers keeps, `retain_blocks` in the mean. Together they lose least."""
    windows: WindowOptions = compression.policy
    most, buffer = windows.window_blocks, compression.buffer
    least = _least_blocks(compression, block_size)
    scored = most * block_size - buffer

    def loss(layer: int, blocks: int) -> float:
        return losses.at(layer, (blocks * block_size - buffer) / scored)

    def gain(index: int) -> float:
        layer, blocks = layers[index], kept[index]
        return loss(layer, blocks) - loss(layer, blocks + 1) if blocks < most else -1.0

    kept = [least] * len(layers)
    for _ in range((windows.blocks_kept - least) * len(layers)):
        kept[max(range(len(layers)), key=gain)] += (
            1  # losses fall ever more slowly, so the next block goes where most is
        )
    return kept


def convex(shares: Sequence[float], losses: Sequence[float]) -> list[float]:
    """The highest convex curve that is nowhere above losses at some shares. Few texts measure less evenly."""

    def slope(left: int, right: int) -> float:
        return (losses[right] - losses[left]) / (shares[right] - shares[left])

    hull: list[int] = []
    for i in range(len(shares)):
        while len(hull) > 1 and slope(hull[-2], hull[-1]) >= slope(hull[-1], i):
            hull.pop()
        hull.append(i)
    found = []
    for i, share in enumerate(shares):
        left = max(point for point in hull if point <= i)
        right = min(point for point in hull if point >= i)
        found.append(losses[left] + (slope(left, right) * (share - shares[left]) if right > left else 0))
    return found


def falling_line(num_layers: int, compression: CompressionConfig, block_size: int) -> list[int]:
    """Blocks of a window that each of some layers keeps, `retain_blocks` in the mean: budgets of PyramidKV."""
    windows: WindowOptions = compression.policy
    least = min(_least_blocks(compression, block_size), windows.blocks_kept)
    budgets = layer_budgets(num_layers, windows.window_blocks, windows.blocks_kept, least)
    return [least + budget for budget in budgets]


def _least_blocks(compression: CompressionConfig, block_size: int) -> int:
    """Blocks that hold the buffer, which every layer keeps."""
    return max(1, -(-compression.buffer // block_size))
