"""The compiled CPU operators (csrc/cpu) as an attention backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvllm._extension import operator
from kvllm.attention.base import AttentionBackend, AttentionBatch
from kvllm.attention.layer import LayerAttention
from kvllm.kvcache.cache import PagedKVCache
from kvllm.kvcache.residual import ResidualStep


class CpuBackend(AttentionBackend[AttentionBatch]):
    """Reads keys and values in place, any block size; sums are in float32. See `registry.why_not_cpu`."""

    name = "cpu"
    capturable = True
    adds_scores = True

    def __init__(
        self, cache: PagedKVCache, num_query_heads: int, scale: float, layers: Sequence[LayerAttention] = ()
    ) -> None:
        super().__init__(cache, num_query_heads, scale, layers)
        self._attention = operator("paged_attention")
        self.all_keys, self.all_values = cache.tensors[0][:, 0], cache.tensors[-1][:, -1]
        self.places = [cache.place(layer) for layer in range(cache.shape.num_layers)]
        self.sliding_windows = [options.window or 0 for options in self.layers]
        """Of each layer, 0 where it has none."""

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def run(
        self, layer: int, queries: torch.Tensor, plan: AttentionBatch, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        options = self.layers[layer]
        if options.window is not None:
            plan = plan.of_window
        return self._attention(
            queries,
            self.keys[layer],
            self.values[layer],
            plan.query_start_loc,
            plan.last_kv_index,
            plan.block_tables,
            plan.packed_len,
            None if plan.head_lengths is None else plan.head_lengths[layer],
            None if plan.scored_from is None else self.cache.scores_of(layer),
            plan.scored_from,
            self.scale,
            options.window or 0,
            options.soft_cap or 0.0,
            sinks,
            *_residual_arguments(plan.residual, layer),
        )


def _residual_arguments(step: ResidualStep | None, layer: int) -> tuple[torch.Tensor | None, ...]:
    """A layer's pairs, slots, first positions, positions, new keys and new values, as the operator takes them."""
    if step is None:
        return (None,) * 6
    assert step.new_pairs is not None  # the step's pairs are stored before they are attended
    return step.pairs[layer], step.slots, step.first, step.positions, *step.new_pairs
