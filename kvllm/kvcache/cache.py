"""The paged KV cache: one allocation for all layers, and its slot arithmetic.

Layout `[layers, 2, blocks, kv_heads, block_size, head_dim]`: the vectors of one head in one block are contiguous, so a
decode kernel streams them, and a compaction moves each head on its own. A slot is `block * block_size + offset`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvllm.memory_pages import use_huge_pages


@dataclass(frozen=True)
class CacheShape:
    """Sizes of what one rank stores for each token: enough to size the pool before anything is allocated.

    scored: every KV pair has a float32 score beside it, in each layer and head.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    scored: bool = False

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers: keys, values and scores."""
        of_pair = 2 * self.head_dim * self.dtype.itemsize + (4 if self.scored else 0)
        return self.num_layers * self.num_kv_heads * self.block_size * of_pair


class PagedKVCache:
    """Keys (after RoPE) and values of all layers, addressed by block id.

    The tensor is allocated with `torch.empty`: slots that no sequence's cached length covers hold garbage, and no
    kernel may read them into a result.

    scores: float32 `[layers, blocks, kv_heads, block_size]`, if the shape has them.
    """

    def __init__(self, shape: CacheShape, num_blocks: int, device: torch.device | str = "cpu") -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        size = (shape.num_layers, 2, num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
        self.data = use_huge_pages(torch.empty(size, dtype=shape.dtype, device=device))
        self.scores: torch.Tensor | None = None
        if shape.scored:
            size = (shape.num_layers, num_blocks, shape.num_kv_heads, shape.block_size)
            self.scores = torch.empty(size, dtype=torch.float32, device=device)

    def keys(self, layer: int) -> torch.Tensor:
        """`[blocks, kv_heads, block_size, head_dim]`, a view."""
        return self.data[layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """`[blocks, kv_heads, block_size, head_dim]`, a view."""
        return self.data[layer, 1]
