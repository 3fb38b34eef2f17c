"""Attention over the whole prompts of one pass, which lie one after the other and keep nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from kvllm.attention.base import AttentionBatch, HostRows
from kvllm.attention.context import Attention, AttentionContext
from kvllm.attention.registry import make_backend
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.ops.registry import make_operations
from kvllm.models.config import ModelConfig
from kvllm.worker.transfer import to_device


class CausalPasses:
    """Passes in which tokens attend those before them, with the backends and kernels of generation.

    The pool is that of one pass, and of one layer: no other needs its keys and values when the next one is computed.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, block_size: int, backend: str, device: torch.device
    ) -> None:
        self._config = config
        self._device = device
        self._name = backend
        self._shape = CacheShape(
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            block_size,
            dtype,
            places=(0,) * config.num_layers,
            shared=config.latent is not None,
        )
        self._grow(1)

    def attention(self, lengths: Sequence[int]) -> Attention:
        """That of prompts of these lengths."""
        block_size, sizes = self._shape.block_size, np.array(lengths)
        num_blocks = -(-sizes // block_size)
        ends = np.cumsum(num_blocks)
        if ends[-1] > self._backend.cache.num_blocks:
            self._grow(1 << int(ends[-1] - 1).bit_length())
        first = ends - num_blocks
        tables = first[:, None] + np.arange(num_blocks.max())  # what is beyond a prompt's blocks is not read
        starts = np.concatenate([[0], np.cumsum(sizes)])
        index = np.arange(starts[-1]) - np.repeat(starts[:-1], sizes)
        rows = HostRows(starts.astype(np.int32), index.astype(np.int32))
        batch = AttentionBatch(
            query_start_loc=to_device(rows.query_start_loc, self._device),
            last_kv_index=to_device(rows.last_kv_index, self._device),
            block_tables=to_device(np.minimum(tables, ends[-1] - 1).astype(np.int32), self._device),
            on_host=rows,
        )
        slots = to_device(np.repeat(first * block_size, sizes) + index, self._device)
        return AttentionContext(self._backend, self._operations, self._backend.plan(batch), slots)

    def _grow(self, num_blocks: int) -> None:
        cache, config = PagedKVCache(self._shape, num_blocks, self._device), self._config
        self._backend = make_backend(self._name, cache, config.num_query_heads, config.scale, config.layers)
        self._operations = make_operations(cache)


class BidirectionalPass:
    """A pass in which tokens attend those after them, too; a window of w tokens reaches w - 1 to either side."""

    recurrent = None
    adapters = None

    def __init__(self, config: ModelConfig, lengths: Sequence[int]) -> None:
        self._windows = config.windows
        self._scale = config.scale
        self._lengths = list(lengths)

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """As `Attention.store`: for `run` of the same layer."""
        self._pairs = keys, values

    def run(self, layer: int, queries: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """As `Attention.run`."""
        parts = zip(*(each.split(self._lengths) for each in (queries, *self._pairs)), strict=True)
        return torch.cat([self._attend(self._windows[layer], *part) for part in parts])

    def _attend(
        self, window: int | None, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Of one prompt, `[tokens, heads, head_dim]` each."""
        mask = None
        if window is not None and window < len(queries):
            place = torch.arange(len(queries), device=queries.device)
            mask = (place[:, None] - place).abs() < window
        by_head = (each.transpose(0, 1).unsqueeze(0) for each in (queries, keys, values))
        attended = F.scaled_dot_product_attention(*by_head, attn_mask=mask, scale=self._scale, enable_gqa=True)
        return attended.squeeze(0).transpose(0, 1)
