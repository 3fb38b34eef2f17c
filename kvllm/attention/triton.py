"""The Triton kernels as an attention backend: needs nothing but torch and Triton, and reads blocks in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvllm.attention.backend import AttentionBackend, AttentionBatch
from kvllm.attention.cache import PagedKVCache
from kvllm.attention.kernels.compact import compact
from kvllm.attention.kernels.copy_blocks import copy_blocks
from kvllm.attention.kernels.decode import Partials, paged_decode
from kvllm.attention.kernels.prefill import paged_prefill
from kvllm.attention.kernels.store import store_kv


@dataclass(frozen=True)
class TritonPlan:
    """The batch, and memory that its layers use one after the other."""

    batch: AttentionBatch
    partials: Partials


class TritonBackend(AttentionBackend):
    """See `backends.why_not_triton` for what it can do. Ids and slots are not checked: they live on the device.

    Sequences with one row and with several go to different kernels, which find their own: no length is read back to the
    host, so a plan costs no synchronization. With 16 bits a row's bits depend on which of the two takes it, and on
    nothing else in the batch. Entries that a later row of the same sequence attends must be finite.
    """

    name = "triton"

    def __init__(self, cache: PagedKVCache, num_query_heads: int, scale: float) -> None:
        super().__init__(cache, num_query_heads, scale)
        self._keys = [cache.keys(layer) for layer in range(cache.shape.num_layers)]
        self._values = [cache.values(layer) for layer in range(cache.shape.num_layers)]

    def plan(self, batch: AttentionBatch) -> TritonPlan:
        num_sequences, num_blocks = batch.block_tables.shape
        shape = self.cache.shape
        partials = Partials.allocate(
            num_sequences,
            self.num_query_heads,
            num_blocks * shape.block_size,
            shape.head_dim,
            self.cache.data.device,
        )
        return TritonPlan(batch, partials)

    def run(self, layer: int, queries: torch.Tensor, plan: TritonPlan) -> torch.Tensor:
        batch = plan.batch
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        arguments = (
            queries,
            self._keys[layer],
            self._values[layer],
            batch.query_starts,
            batch.query_index,
            batch.block_tables,
            batch.packed,
            None if batch.head_lengths is None else batch.head_lengths[layer],
            self.scale,
        )
        paged_decode(*arguments, plan.partials, output)
        if len(queries) > len(batch.block_tables):
            paged_prefill(*arguments, output)
        return output

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        store_kv(self._keys[layer], self._values[layer], keys, values, slots)

    def copy_blocks(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        copy_blocks(self.cache.data, sources, destinations)

    def compact(self, kept: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        compact(self.cache.data, kept.contiguous(), sources.contiguous(), destinations.contiguous())
