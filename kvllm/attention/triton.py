"""The Triton kernels as an attention backend: needs nothing but torch and Triton, and reads blocks in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvllm.attention.base import AttentionBackend, AttentionBatch
from kvllm.attention.layer import LayerAttention
from kvllm.kernels.codes import as_kernels_read
from kvllm.kernels.decode import Observed, Partials, paged_decode
from kvllm.kernels.hadamard import hadamard
from kvllm.kernels.layer_inputs import LayerInputs
from kvllm.kernels.mass import add_mass
from kvllm.kernels.observed_scores import KeptScores, add_squares
from kvllm.kernels.prefill import paged_prefill
from kvllm.kernels.prefill_tiles import PrefillTiles
from kvllm.kvcache.cache import PagedKVCache


@dataclass(frozen=True)
class TritonPlan:
    """The batch, and memory that its layers use one after the other."""

    batch: AttentionBatch
    partials: Partials
    tiles: PrefillTiles | None
    observed: Observed | None
    kept: KeptScores | None


class TritonBackend(AttentionBackend[TritonPlan]):
    """See `registry.why_not_triton` for what it can do.

    Sequences with one query token and with several go to different kernels, which find their own: no length is read
    back to the host, so a plan costs no synchronization. With 16 bits, a query token's bits depend on which of the two
    takes it, and on nothing else in the batch. KV pairs that a later token of a sequence attends must be finite.
    """

    name = "triton"
    capturable = True
    captures_chunks = True
    adds_mass = True
    adds_scores = True

    def __init__(
        self, cache: PagedKVCache, num_query_heads: int, scale: float, layers: Sequence[LayerAttention] = ()
    ) -> None:
        super().__init__(cache, num_query_heads, scale, layers)
        self.keys, self.values = as_kernels_read(self.keys), as_kernels_read(self.values)

    def plan(self, batch: AttentionBatch) -> TritonPlan:
        num_sequences, num_blocks = batch.block_tables.shape
        max_kv_pairs = num_blocks * self.cache.shape.block_size
        group = self.num_query_heads // self.cache.shape.num_kv_heads
        sizes = (self.num_query_heads, max_kv_pairs, self.cache.shape.head_dim, group)
        partials = Partials.of(batch.query_start_loc, batch.last_kv_index, *sizes)
        observed = None if batch.mass is None else Observed.allocate(partials, len(batch.last_kv_index), max_kv_pairs)
        kept = None
        if batch.scored_from is not None:
            scores = partials.total.new_empty(num_sequences, self.num_query_heads, max_kv_pairs)
            kept = KeptScores(scores, batch.scored_from)
        tiles = None
        if len(batch.last_kv_index) > num_sequences:
            tiles = PrefillTiles.of(
                batch.query_start_loc,
                batch.last_kv_index,
                self.keys[0],
                self.num_query_heads,
                self.cache.shape.head_dim,
                self.cache.shape.dtype,
                shared=self.cache.shape.shared,
                ragged=batch.packed_len is not None,
            )
        return TritonPlan(batch, partials, tiles, observed, kept)

    def run(
        self, layer: int, queries: torch.Tensor, plan: TritonPlan, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not self.cache.shape.rotated:
            return self._attend(layer, queries, plan, sinks)
        return hadamard(self._attend(layer, hadamard(queries), plan, sinks))

    def _attend(self, layer: int, queries: torch.Tensor, plan: TritonPlan, sinks: torch.Tensor | None) -> torch.Tensor:
        options = self.layers[layer]
        if options.window is not None:
            plan = TritonPlan(plan.batch.of_window, plan.partials, plan.tiles, None, None)
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        batch = plan.batch
        inputs = LayerInputs(
            queries,
            self.keys[layer],
            self.values[layer],
            batch.query_start_loc,
            batch.last_kv_index,
            batch.block_tables,
            batch.packed_len,
            None if batch.head_lengths is None else batch.head_lengths[layer],
            self.scale,
            options.window,
            options.soft_cap,
            sinks,
            self.cache.shape.shared,
        )
        paged_decode(inputs, plan.partials, plan.observed, plan.kept, output)
        if plan.tiles:
            paged_prefill(inputs, plan.tiles, plan.observed, output)
        if batch.mass is not None and plan.observed is not None and batch.table_slots is not None:
            add_mass(inputs, plan.observed, batch.mass[layer], batch.table_slots)
        scores = self.cache.scores_of(layer)
        if plan.kept is not None and scores is not None:
            add_squares(inputs, plan.kept, scores)
        return output
