"""What layers lose with the KV pairs that a text looks up: the losses of `kvllm.layer_shares`."""

from __future__ import annotations

import torch

STEPS = 100
DISTANCE = 128
"""Tokens from a KV pair to the first query that counts. Nearer ones see it before any compression."""


class LayerLoss:
    """Sums over the texts of one layer."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.total = torch.zeros(STEPS + 1, dtype=torch.float64)
        self.count = 0

    def add(self, queries: torch.Tensor, keys: torch.Tensor) -> None:
        """queries: `[T, Hq, d]`, keys: `[T, Hkv, d]`, rotated, of one text from its beginning on."""
        length, num_kv_heads = keys.shape[:2]
        if length <= DISTANCE:
            return
        behind = torch.arange(length, device=keys.device)[:, None] - torch.arange(length, device=keys.device)
        of_heads = queries.float().unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)  # [Hkv, group, T, d]
        kept = torch.linspace(0, length, STEPS + 1).round().long()
        for group, of_head in zip(of_heads, keys.float().transpose(0, 1), strict=True):
            scores = (self.scale * group @ of_head.T).masked_fill_(behind < 0, -torch.inf)
            looked_up = scores.softmax(-1).square_().masked_fill_(behind < DISTANCE, 0).sum((0, 1))
            found = looked_up.sort(descending=True).values.double().cumsum(0).cpu()
            lost = found[-1] - torch.cat((found.new_zeros(1), found))
            self.total += lost[kept] / length
            self.count += 1

    def losses(self) -> list[float]:
        return (self.total / max(1, self.count)).tolist()
