"""Attention in plain torch, on any device: short enough to check by eye, too slow to serve with."""

from __future__ import annotations

import itertools

import torch

from kvllm.attention.base import AttentionBackend, AttentionBatch
from kvllm.attention.layer import LayerAttention


class ReferenceBackend(AttentionBackend[AttentionBatch]):
    """One query token at a time, over a dense copy of the KV pairs that it attends."""

    name = "reference"

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def run(
        self, layer: int, queries: torch.Tensor, plan: AttentionBatch, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        options = self.layers[layer]
        block_size = self.cache.shape.block_size
        starts = plan.query_start_loc.tolist()
        index = plan.last_kv_index.tolist()
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for sequence, (start, end) in enumerate(itertools.pairwise(starts)):
            first = 0 if options.window is None else max(0, index[start] + 1 - options.window)
            kv_index = torch.arange(first, index[end - 1] + 1, device=queries.device)
            blocks = plan.block_tables[sequence].long()[kv_index // block_size]
            sequence_keys, sequence_values = (self._read(layer, plane, blocks, kv_index) for plane in (0, 1))
            for token in range(start, end):
                visible = (kv_index <= index[token]) & ~self._evicted_mask(layer, sequence, kv_index, plan)
                if options.window is not None:
                    visible &= kv_index > index[token] - options.window
                output[token] = self._attend(queries[token], sequence_keys, sequence_values, visible, options, sinks)
        return output

    def _read(self, layer: int, plane: int, blocks: torch.Tensor, kv_index: torch.Tensor) -> torch.Tensor:
        """Keys or values, float32 `[kv_heads, KV pairs, head_dim]`."""
        offsets = kv_index % self.cache.shape.block_size
        stored = self.cache.planes[plane]
        rows = [part[self.cache.place(layer)][blocks, :, offsets] for part in stored.parts]
        return stored.decode(rows, torch.float32).transpose(0, 1)

    def _evicted_mask(self, layer: int, sequence: int, kv_index: torch.Tensor, plan: AttentionBatch) -> torch.Tensor:
        """bool `[kv_heads, KV pairs]`, true where one was evicted."""
        if plan.packed_len is None or plan.head_lengths is None:
            return torch.zeros(self.cache.shape.num_kv_heads, len(kv_index), dtype=torch.bool, device=kv_index.device)
        head_lengths = plan.head_lengths[layer, sequence].unsqueeze(-1)
        return (head_lengths <= kv_index) & (kv_index < plan.packed_len[sequence])

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        visible: torch.Tensor,
        options: LayerAttention,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """`[query_heads, head_dim]` over the `visible` of `[kv_heads, KV pairs, head_dim]` -> the same shape."""
        output = []
        for head, head_queries in enumerate(query.float().unflatten(0, (keys.shape[0], -1))):
            seen = visible[head]  # nothing else is read: a slot without a KV pair may hold a NaN
            scores = head_queries @ keys[head, seen].T * self.scale
            if options.soft_cap is not None:
                scores = options.soft_cap * (scores / options.soft_cap).tanh()
            if sinks is not None:
                scores = torch.cat((scores, sinks.view(len(keys), -1, 1)[head]), dim=-1)
            output.append(scores.softmax(-1)[:, : int(seen.sum())] @ values[head, seen])
        return torch.cat(output).to(query.dtype)
