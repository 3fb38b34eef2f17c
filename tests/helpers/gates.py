"""Gates with random weights."""

from __future__ import annotations

import torch

from kvllm.compression.gates import Gates

UNITS = 6


def random_gates(num_layers: int, num_kv_heads: int, head_dim: int, first: int = 0) -> Gates:
    """Each head has its own, by its number from `first` on, whatever heads there are beside it."""
    of_heads = []
    for head in range(first, first + num_layers * num_kv_heads):
        generator = torch.Generator().manual_seed(head)
        shapes = ((UNITS, 2 * head_dim), (UNITS,), (UNITS,), ())
        of_heads.append([torch.randn(shape, generator=generator) for shape in shapes])
    return Gates(*(torch.stack(each).unflatten(0, (num_layers, -1)) for each in zip(*of_heads, strict=True)))
