"""What some compression methods keep beside the cache: lengths for each layer and head, and attention mass.

Both are tables with a row for each running sequence, like the block tables. An engine whose method needs none has none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvllm._extension import has_cuda_operators, operator
from kvllm.attention.base import AttentionBackend, AttentionBatch
from kvllm.compression.mass import batched_attention_mass
from kvllm.kvcache.cache import CacheShape
from kvllm.kvcache.compaction import pad
from kvllm.kvcache.ops.base import KVOperations
from kvllm.worker.transfer import to_device


class RaggedLengths:
    """Entries that a layer's head has among the first `packed_len` entries of a sequence's cache (PyramidKV, AdaKV).

    Heads share block tables, so a head that keeps fewer than others has holes: entry e is one for head h of layer l if
    `head_lengths[l, h] <= e < packed`. Entries behind `packed_len` are there for all heads.
    """

    def __init__(self, shape: CacheShape, num_rows: int, device: torch.device) -> None:
        self.device = device
        self.packed_len = np.zeros(num_rows, dtype=np.int32)
        self.head_lengths = np.zeros((shape.num_layers, num_rows, shape.num_kv_heads), dtype=np.int32)

    @property
    def heads(self) -> tuple[int, int]:
        """Layers, and KV heads of each."""
        return self.head_lengths.shape[0], self.head_lengths.shape[2]

    def clear(self, row: int) -> None:
        self.packed_len[row] = 0

    def set(self, rows: list[int], starts: list[int], kept: torch.Tensor, retain: list[int]) -> None:
        """Of the entries from `starts` on, heads keep `kept`, int64 `[layers, S, kv_heads]`, in room for `retain`."""
        self.packed_len[rows] = np.add(starts, retain)
        self.head_lengths[:, rows] = np.array(starts)[:, None] + kept.cpu().numpy()

    def of(self, rows: Any) -> dict[str, torch.Tensor]:
        """The fields of an AttentionBatch for the sequences in `rows`."""
        return {
            "packed_len": to_device(self.packed_len[rows], self.device),
            "head_lengths": to_device(self.head_lengths[:, rows], self.device),
        }

    def evicted_mask(self, layer: int, rows: list[int], starts: list[int], size: int) -> torch.Tensor:
        """bool `[S, kv_heads, size]` over `size` entries of each sequence, from the one in `starts` on."""
        entries = np.array(starts)[:, None, None] + np.arange(size)
        behind_head = entries >= self.head_lengths[layer, rows][:, :, None]
        return to_device(behind_head & (entries < self.packed_len[rows][:, None, None]), self.device)


class AttentionMass:
    """Attention that each cached entry has received from all queries so far (H2O).

    mass: float32 `[layers, num_rows + 1, kv_heads, entries]`. The last row is for what fills up a batch.
    """

    def __init__(self, shape: CacheShape, num_rows: int, max_entries: int, device: torch.device) -> None:
        self.mass = torch.zeros(shape.num_layers, num_rows + 1, shape.num_kv_heads, max_entries, device=device)

    @staticmethod
    def bytes_for(shape: CacheShape, num_rows: int, max_entries: int) -> int:
        return shape.num_layers * (num_rows + 1) * shape.num_kv_heads * max_entries * 4

    def clear(self, row: int) -> None:
        self.mass[:, row] = 0

    def copy(self, source: int, row: int) -> None:
        self.mass[:, row] = self.mass[:, source]

    def add(self, layer: int, row: int, mass: torch.Tensor) -> None:
        """mass: float32 `[kv_heads, entries]`, of the first entries."""
        self.mass[layer, row, :, : mass.shape[1]] += mass

    def gather(self, layer: int, rows: list[int], starts: list[int], size: int) -> torch.Tensor:
        """`[S, kv_heads, size]` from an entry of each sequence on."""
        parts = [self.mass[layer, row, :, start : start + size] for row, start in zip(rows, starts, strict=True)]
        return torch.stack(parts)

    def compact(self, regions: list[tuple[int, int, int, int]], kept: list[torch.Tensor]) -> None:
        """Let the survivors of several sequences move up.

        regions: for each its row, the start and the end of the region, and the end of what is behind, which moves up
            with it. kept: offsets into the region, `[layers, kv_heads, K]`.
        """
        if self.mass.is_cuda and has_cuda_operators():
            numbers = [(offsets.shape[-1], *region) for region, offsets in zip(regions, kept, strict=True)]
            operator("compact_mass")(self.mass, pad(kept), *to_device(numbers, self.mass.device).T.contiguous())
            return
        for (row, start, end, length), offsets in zip(regions, kept, strict=True):
            mass = self.mass[:, row]
            survivors = mass[:, :, start:end].gather(-1, offsets)
            moved = torch.cat((survivors, mass[:, :, end:length]), dim=-1)
            mass[:, :, start:length] = 0
            mass[:, :, start : start + moved.shape[-1]] = moved


class ObservingBackend(AttentionBackend):
    """A backend whose attention mass is added up: by itself, or by a second product of queries and keys."""

    name = "observing"

    def __init__(self, backend: AttentionBackend, operations: KVOperations, mass: AttentionMass) -> None:
        super().__init__(backend.cache, backend.num_query_heads, backend.scale)
        self.backend = backend
        self.operations = operations
        self.mass = mass
        self.capturable = backend.capturable and backend.observes

    def plan(self, batch: AttentionBatch) -> Any:
        assert batch.rows is not None
        if self.backend.observes:
            return self.backend.plan(replace(batch, mass=self.mass.mass)), batch, []
        starts, row_index = batch.query_start_loc.tolist(), batch.last_kv_index.long()
        lengths = (row_index + 1).tolist()
        sequences = [
            (row, a, b, lengths[b - 1], row_index[a:b])
            for row, a, b in zip(batch.rows.tolist(), starts, starts[1:], strict=False)
        ]
        return self.backend.plan(batch), batch, sequences

    def run(self, layer: int, queries: torch.Tensor, plan: Any) -> torch.Tensor:
        inner, batch, sequences = plan
        for i, (row, begin, end, length, row_index) in enumerate(sequences):
            blocks = batch.block_tables[i : i + 1, : -(-length // self.cache.shape.block_size)]
            keys, rows = self.operations.gather_keys(layer, blocks), queries[begin:end].transpose(0, 1)
            self.mass.add(layer, row, batched_attention_mass(rows.unsqueeze(0), keys, length, row_index)[0])
        return self.backend.run(layer, queries, inner)
