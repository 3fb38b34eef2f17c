"""State that some compression methods keep beside the cache: lengths for each layer and head, and attention mass.

Both are tables with a slot for each running sequence, like the block tables. An engine whose method needs none has
none.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from kvllm._extension import has_cuda_operators, operator
from kvllm.attention.base import AttentionBackend, AttentionBatch
from kvllm.compression.mass import Softmax, batched_attention_mass
from kvllm.kvcache.cache import CacheShape
from kvllm.kvcache.compaction import pad
from kvllm.kvcache.ops.base import KVOperations
from kvllm.worker.transfer import to_device


class RaggedLengths:
    """KV pairs that a layer's head keeps of the first `packed_len` of a sequence's cache (PyramidKV, AdaKV).

    Heads share block tables, so one that keeps fewer than others has slots without a pair: index e is evicted for head
    h of layer l if `head_lengths[l, h] <= e < packed_len`. From `packed_len` on, all heads have their pairs.

    packed_len: int32 `[num_slots]`; head_lengths: int32 `[layers, num_slots, kv_heads]`. On the host.
    """

    def __init__(self, shape: CacheShape, num_slots: int, device: torch.device) -> None:
        self.device = device
        self.packed_len = np.zeros(num_slots, dtype=np.int32)
        self.head_lengths = np.zeros((shape.num_layers, num_slots, shape.num_kv_heads), dtype=np.int32)

    @property
    def heads(self) -> tuple[int, int]:
        """Layers, and KV heads of each."""
        return self.head_lengths.shape[0], self.head_lengths.shape[2]

    def clear(self, table_slot: int) -> None:
        self.packed_len[table_slot] = 0

    def save(self, table_slot: int) -> tuple[int, np.ndarray]:
        """All that is known of a sequence, for `restore`."""
        return int(self.packed_len[table_slot]), self.head_lengths[:, table_slot].copy()

    def restore(self, table_slot: int, saved: tuple[int, np.ndarray]) -> None:
        self.packed_len[table_slot], self.head_lengths[:, table_slot] = saved

    def set(self, table_slots: list[int], starts: list[int], kept: torch.Tensor, retain: list[int]) -> None:
        """Note that heads keep `kept` of the KV pairs from `starts` on, in room for `retain`.

        kept: int64 `[layers, S, kv_heads]`.
        """
        self.packed_len[table_slots] = np.add(starts, retain)
        self.head_lengths[:, table_slots] = np.array(starts)[:, None] + kept.cpu().numpy()

    def of(self, table_slots: list[int]) -> dict[str, torch.Tensor]:
        """The fields of an AttentionBatch for the sequences in `table_slots`."""
        return {
            "packed_len": to_device(self.packed_len[table_slots], self.device),
            "head_lengths": to_device(self.head_lengths[:, table_slots], self.device),
        }

    def evicted_mask(self, layer: int, table_slots: list[int], starts: list[int], size: int) -> torch.Tensor:
        """bool `[S, kv_heads, size]`, over as many indices of each sequence's cache, from `starts` on."""
        index = np.array(starts)[:, None, None] + np.arange(size)
        behind_head = index >= self.head_lengths[layer, table_slots][:, :, None]
        return to_device(behind_head & (index < self.packed_len[table_slots][:, None, None]), self.device)


class AttentionMass:
    """The attention that each cached KV pair has received from all queries so far (H2O). It moves with the pair.

    mass: float32 `[layers, num_slots + 1, kv_heads, max_pairs]`. The last slot is for what fills up a batch.
    """

    def __init__(self, shape: CacheShape, num_slots: int, max_pairs: int, device: torch.device) -> None:
        self.mass = torch.zeros(shape.num_layers, num_slots + 1, shape.num_kv_heads, max_pairs, device=device)

    @staticmethod
    def bytes_for(shape: CacheShape, num_slots: int, max_pairs: int) -> int:
        return shape.num_layers * (num_slots + 1) * shape.num_kv_heads * max_pairs * 4

    def clear(self, table_slot: int) -> None:
        self.mass[:, table_slot] = 0

    def copy(self, source: int, table_slot: int) -> None:
        self.mass[:, table_slot] = self.mass[:, source]

    def save(self, table_slot: int) -> torch.Tensor:
        """All that is known of a sequence, for `restore`."""
        return self.mass[:, table_slot].cpu().clone()

    def restore(self, table_slot: int, saved: torch.Tensor) -> None:
        self.mass[:, table_slot] = saved.to(self.mass.device)

    def add(self, layer: int, table_slot: int, mass: torch.Tensor) -> None:
        """mass: float32 `[kv_heads, n]`, of a sequence's first n pairs."""
        self.mass[layer, table_slot, :, : mass.shape[1]] += mass

    def gather(self, layer: int, table_slots: list[int], starts: list[int], size: int) -> torch.Tensor:
        """`[S, kv_heads, size]`, of each sequence from index `starts` on."""
        places = zip(table_slots, starts, strict=True)
        return torch.stack([self.mass[layer, slot, :, start : start + size] for slot, start in places])

    def compact(self, regions: list[tuple[int, int, int, int]], kept: list[torch.Tensor]) -> None:
        """Let the survivors of several sequences move up.

        regions: for each its table slot, the start and the end of the region, and the end of what follows, which
            moves up with it. kept: offsets into the region, `[layers, kv_heads, K]`.
        """
        if self.mass.is_cuda and has_cuda_operators():
            numbers = [(offsets.shape[-1], *region) for region, offsets in zip(regions, kept, strict=True)]
            operator("compact_mass")(self.mass, pad(kept), *to_device(numbers, self.mass.device).T.contiguous())
            return
        for (table_slot, start, end, length), offsets in zip(regions, kept, strict=True):
            mass = self.mass[:, table_slot]
            survivors = mass[:, :, start:end].gather(-1, offsets)
            moved = torch.cat((survivors, mass[:, :, end:length]), dim=-1)
            mass[:, :, start:length] = 0
            mass[:, :, start : start + moved.shape[-1]] = moved


class ObservingBackend(AttentionBackend):
    """A backend whose attention mass is added up: by itself, or by a second product of queries and keys."""

    name = "observing"

    def __init__(self, backend: AttentionBackend, operations: KVOperations, mass: AttentionMass) -> None:
        super().__init__(backend.cache, backend.num_query_heads, backend.scale, backend.layers)
        self.backend = backend
        self.operations = operations
        self.mass = mass
        self.capturable = backend.capturable and backend.observes
        self.captures_chunks = backend.captures_chunks and backend.observes

    def plan(self, batch: AttentionBatch) -> Any:
        assert batch.table_slots is not None
        if self.backend.observes:
            return self.backend.plan(replace(batch, mass=self.mass.mass)), batch, []
        starts, last_kv_index = batch.query_start_loc.tolist(), batch.last_kv_index.long()
        lengths = (last_kv_index + 1).tolist()
        sequences = [
            (table_slot, begin, end, lengths[end - 1], last_kv_index[begin:end])
            for table_slot, (begin, end) in zip(batch.table_slots.tolist(), pairwise(starts), strict=True)
        ]
        return self.backend.plan(batch), batch, sequences

    def run(self, layer: int, queries: torch.Tensor, plan: Any, sinks: torch.Tensor | None = None) -> torch.Tensor:
        inner, batch, sequences = plan
        softmax = Softmax(self.scale, self.layers[layer].soft_cap, sinks)
        for i, (table_slot, begin, end, length, last_kv_index) in enumerate(sequences):
            blocks = batch.block_tables[i : i + 1, : -(-length // self.cache.shape.block_size)]
            keys = self.operations.gather_keys([layer], blocks, length)
            of_sequence = queries[None, begin:end].transpose(1, 2)
            mass = batched_attention_mass(of_sequence, keys, length, last_kv_index, softmax=softmax)
            self.mass.add(layer, table_slot, mass[0])
        return self.backend.run(layer, queries, inner, sinks)
