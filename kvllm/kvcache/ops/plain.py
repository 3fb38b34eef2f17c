"""The operations in plain torch, on any device: short enough to check by eye."""

from __future__ import annotations

import torch

from kvllm.kvcache.ops.base import KVOperations


class TorchOperations(KVOperations):
    """Waits for the device wherever a result's size depends on what a tensor holds."""

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        stored = slot_mapping >= 0
        slots, block_size = slot_mapping[stored], self.cache.shape.block_size
        for plane, vectors in zip(self.cache.planes, (keys, values), strict=True):
            for part, rows in zip(plane.parts, plane.encode(vectors[stored]), strict=True):
                part[self.cache.place(layer)][slots // block_size, :, slots % block_size] = rows

    def copy_blocks(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        for part in self.cache.parts:
            part[:, :, destinations] = part[:, :, sources]

    def compact(self, kept: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        block_size = self.cache.shape.block_size
        for layer, sequence, head in torch.cartesian_prod(*(torch.arange(n) for n in kept.shape[:3])).tolist():
            old = kept[layer, sequence, head]
            old = old[old >= 0]
            new = torch.arange(len(old), device=old.device)
            for part in self.cache.parts:
                region = part[layer, :, :, head]
                survivors = region[:, sources[sequence, old // block_size], old % block_size]
                region[:, destinations[sequence, new // block_size], new % block_size] = survivors
