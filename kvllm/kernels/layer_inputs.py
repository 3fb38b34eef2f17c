"""What the attention kernels of one layer are launched with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from kvllm.kernels.layer_shape import LayerShape
from kvllm.kernels.tiles import LOG2_E


@dataclass(frozen=True)
class LayerInputs:
    """The query tokens of a step in one layer, and the paged cache that they attend.

    queries: `[T, query_heads, head_dim]`, the heads of a token contiguous. keys, values: one layer of the cache,
        contiguous `[blocks, kv_heads, block_size, head_dim]` of the same dtype, or quantized.
    query_start_loc, last_kv_index, block_tables, packed_len: as in AttentionBatch; head_lengths: of this layer,
        `[S, kv_heads]`.
    window, soft_cap: as in LayerAttention; a window neither beside `packed_len` nor where scores are observed or kept.
    sinks: as in `AttentionBackend.run`. shared: values are the keys.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    query_start_loc: torch.Tensor
    last_kv_index: torch.Tensor
    block_tables: torch.Tensor
    packed_len: torch.Tensor | None
    head_lengths: torch.Tensor | None
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: torch.Tensor | None
    shared: bool

    @property
    def lengths(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """`packed_len` and `head_lengths`; others, which are not read, where all heads hold the same KV pairs."""
        if self.packed_len is None:
            return self.last_kv_index, self.last_kv_index
        return self.packed_len, self.head_lengths

    @property
    def base_2_scale(self) -> float:
        return self.scale * LOG2_E

    @cached_property
    def shape(self) -> LayerShape:
        num_heads, head_dim = self.queries.shape[1:]
        _, kv_heads, block_size, _ = self.keys.shape
        return LayerShape(
            kv_heads,
            num_heads // kv_heads,
            block_size,
            head_dim,
            shared=self.shared,
            ragged=self.packed_len is not None,
            window=self.window or 0,
            soft_cap=(self.soft_cap or 0.0) * LOG2_E,
        )
