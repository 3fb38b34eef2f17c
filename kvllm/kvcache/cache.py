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
    """Sizes of what one rank stores for each token: enough to size the pool before anything is allocated."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers, keys and values together."""
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize


class PagedKVCache:
    """Keys (after RoPE) and values of all layers, addressed by block id.

    The tensor is allocated with `torch.empty`: slots that no sequence's cached length covers hold garbage, and no
    kernel may read them into a result.
    """

    def __init__(self, shape: CacheShape, num_blocks: int, device: torch.device | str = "cpu") -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        size = (shape.num_layers, 2, num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
        self.data = use_huge_pages(torch.empty(size, dtype=shape.dtype, device=device))

    def keys(self, layer: int) -> torch.Tensor:
        """`[blocks, kv_heads, block_size, head_dim]`, a view."""
        return self.data[layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """`[blocks, kv_heads, block_size, head_dim]`, a view."""
        return self.data[layer, 1]
