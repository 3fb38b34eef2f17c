"""Keys of windows where they lie: in the blocks of a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class PagedKeys:
    """Keys of the first `size` KV pairs of windows in some layers, which kernels read from the cache: `[layers * S,
    Hkv, size, d]` as methods see them, the windows in the first layer before those in the next.

    blocks: of each layer `[blocks, kv_heads, block_size, width]`; the dtype tells the format.
    tables: int `[S, n]`, contiguous: the windows' blocks.
    head_dim, dtype: of the keys outside of the cache. rotated: those in it are multiplied with a Hadamard matrix, which
        leaves products of keys as they are; what is multiplied with keys has to be rotated, too.
    """

    nbytes = 0
    """Bytes beside the cache."""

    def __init__(
        self,
        blocks: Sequence[Tensor],
        tables: Tensor,
        size: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        rotated: bool = False,
    ) -> None:
        self.blocks = blocks
        self.tables = tables.contiguous()
        self.shape = torch.Size((len(blocks) * len(tables), blocks[0].shape[1], size, head_dim))
        self.dtype = dtype
        self.rotated = rotated
        self.device = tables.device


Keys = Tensor | PagedKeys
