"""Lengths for each layer and head, where these keep different numbers of KV pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch

from kvllm.compression.registry import MethodInputs
from kvllm.core.protocol import SequenceStart
from kvllm.kvcache.cache import CacheShape
from kvllm.worker.features.base import Restore, StepFeature, WorkerParts
from kvllm.worker.step_inputs import StepInputs, StepTensor, write
from kvllm.worker.transfer import to_device
from kvllm.worker.windows import Move, PartWindows


class RaggedLengths(StepFeature):
    """KV pairs that a layer's head keeps of the first `packed_len` of a sequence's cache (PyramidKV, AdaKV).

    Heads share block tables, so one that keeps fewer than others has slots without a pair: index e is evicted for head
    h of layer l if `head_lengths[l, h] <= e < packed_len`. From `packed_len` on, all heads have their pairs.

    packed_len: int32 `[num_slots]`; head_lengths: int32 `[layers, num_slots, kv_heads]`. On the host.
    """

    def __init__(self, shape: CacheShape, num_slots: int, device: torch.device) -> None:
        self.device = device
        self.tensors = (
            StepTensor("packed_len"),
            StepTensor("head_lengths", before=(shape.num_layers,), after=(shape.num_kv_heads,)),
        )
        self.packed_len = np.zeros(num_slots, dtype=np.int32)
        self.head_lengths = np.zeros((shape.num_layers, num_slots, shape.num_kv_heads), dtype=np.int32)

    @classmethod
    def make(cls, worker: WorkerParts) -> Self | None:
        compression = worker.config.active_compression
        if compression is None or not compression.spec.ragged:
            return None
        return cls(worker.shape, worker.config.max_num_seqs, worker.device)

    def start(self, table_slot: int, start: SequenceStart) -> None:
        self.packed_len[table_slot] = 0

    def save(self, table_slot: int) -> Restore:
        packed_len, head_lengths = self.packed_len[table_slot], self.head_lengths[:, table_slot].copy()

        def restore(table_slot: int) -> None:
            self.packed_len[table_slot], self.head_lengths[:, table_slot] = packed_len, head_lengths

        return restore

    def move(self, moves: Sequence[Move]) -> None:
        counts = torch.stack([(move.chosen[:, 0] >= 0).sum(-1) for move in moves], dim=1)
        table_slots, starts = [move.state.table_slot for move in moves], [move.start for move in moves]
        self.set(table_slots, starts, counts, [move.job.retain for move in moves])

    def set(self, table_slots: list[int], starts: list[int], kept: torch.Tensor, retain: list[int]) -> None:
        """Note that heads keep `kept` of the KV pairs from `starts` on, in room for `retain`.

        kept: int64 `[layers, S, kv_heads]`.
        """
        self.packed_len[table_slots] = np.add(starts, retain)
        self.head_lengths[:, table_slots] = np.array(starts)[:, None] + kept.cpu().numpy()

    def write(self, inputs: StepInputs, table_slots: np.ndarray, kv_lengths: np.ndarray, *, is_new: bool) -> None:
        if is_new:
            write(inputs.array("packed_len"), self.packed_len[table_slots])
            head_lengths = self.head_lengths[:, table_slots].swapaxes(0, 1)
            write(inputs.array("head_lengths").swapaxes(0, 1), head_lengths)

    def read_fields(self, table_slots: list[int]) -> dict[str, torch.Tensor]:
        return {
            "packed_len": to_device(self.packed_len[table_slots], self.device),
            "head_lengths": to_device(self.head_lengths[:, table_slots], self.device),
        }

    def method_inputs(self, layers: Sequence[int], windows: PartWindows) -> MethodInputs:
        evicted = self.evicted_mask(layers[0], windows.table_slots, windows.starts, windows.size)
        return {"capacity": windows.windows[0].retain, "evicted_mask": evicted}

    def evicted_mask(self, layer: int, table_slots: list[int], starts: list[int], size: int) -> torch.Tensor:
        """bool `[S, kv_heads, size]`, over as many indices of each sequence's cache, from `starts` on."""
        index = np.array(starts)[:, None, None] + np.arange(size)
        behind_head = index >= self.head_lengths[layer, table_slots][:, :, None]
        return to_device(behind_head & (index < self.packed_len[table_slots][:, None, None]), self.device)
