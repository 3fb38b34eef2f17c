"""The attention that KV pairs have received so far (H2O)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Generic, NamedTuple, Self

import numpy as np
import torch

from kvllm._extension import has_cuda_operators, operator
from kvllm.attention.base import AttentionBackend, AttentionBatch, Plan
from kvllm.compression.mass import Softmax, batched_attention_mass
from kvllm.compression.registry import MethodInputs
from kvllm.config import EngineConfig
from kvllm.core.protocol import SequenceStart
from kvllm.kvcache.cache import CacheShape
from kvllm.kvcache.compaction import pad
from kvllm.kvcache.ops.base import KVOperations
from kvllm.stats import MemoryField
from kvllm.worker.features.base import PassAttention, Restore, StepFeature, WorkerParts
from kvllm.worker.step_inputs import StepInputs, StepTensor, write
from kvllm.worker.transfer import to_device
from kvllm.worker.windows import Move, PartWindows


class AttentionMass(StepFeature):
    """The attention that each cached KV pair has received from all queries so far (H2O). It moves with the pair.

    mass: float32 `[layers, num_slots + 1, kv_heads, max_pairs]`. The last slot is for what fills up a batch.
    backend: around an attention backend that does not add it up.
    """

    def __init__(self, shape: CacheShape, num_slots: int, max_pairs: int, device: torch.device) -> None:
        self.mass = torch.zeros(shape.num_layers, num_slots + 1, shape.num_kv_heads, max_pairs, device=device)

        self.backend: MassBackend | None = None
        self.tensors = (StepTensor("table_slots", padding=num_slots),)

    @classmethod
    def make(cls, worker: WorkerParts) -> Self | None:
        config, backend = worker.config, worker.backend
        if not config.adds_mass:
            return None
        feature = cls(worker.shape, config.max_num_seqs, config.max_model_len, worker.device)
        if not backend.adds_mass:
            feature.backend = MassBackend(backend, worker.operations, feature)
            feature.captures = False
        return feature

    @classmethod
    def num_bytes(cls, config: EngineConfig, shape: CacheShape) -> dict[MemoryField, int]:
        if not config.adds_mass:
            return {}
        pairs = (config.max_num_seqs + 1) * config.max_model_len
        return {"method_state_bytes": shape.num_layers * shape.num_kv_heads * pairs * 4}

    def start(self, table_slot: int, start: SequenceStart) -> None:
        self.mass[:, table_slot] = 0

    def fork(self, parent: int, child: int) -> None:
        self.mass[:, child] = self.mass[:, parent]

    def save(self, table_slot: int) -> Restore:
        saved = self.mass[:, table_slot].cpu().clone()

        def restore(table_slot: int) -> None:
            self.mass[:, table_slot] = saved.to(self.mass.device)

        return restore

    def add(self, layer: int, table_slot: int, mass: torch.Tensor) -> None:
        """mass: float32 `[kv_heads, n]`, of a sequence's first n pairs."""
        self.mass[layer, table_slot, :, : mass.shape[1]] += mass

    def write(self, inputs: StepInputs, table_slots: np.ndarray, kv_lengths: np.ndarray, *, is_new: bool) -> None:
        if is_new:
            write(inputs.array("table_slots"), table_slots, padding=self.tensors[0].padding)

    def attend(self, attention: PassAttention) -> None:
        if self.backend:
            attention.backend = self.backend
        else:
            attention.fields[0]["mass"] = self.mass

    def method_inputs(self, layers: Sequence[int], windows: PartWindows) -> MethodInputs:
        return {"mass": self.gather(layers[0], windows.table_slots, windows.starts, windows.size)}

    def gather(self, layer: int, table_slots: list[int], starts: list[int], size: int) -> torch.Tensor:
        """`[S, kv_heads, size]`, of each sequence from index `starts` on."""
        places = zip(table_slots, starts, strict=True)
        return torch.stack([self.mass[layer, slot, :, start : start + size] for slot, start in places])

    def move(self, moves: Sequence[Move]) -> None:
        regions = [(move.state.table_slot, move.start, move.end, move.cached) for move in moves]
        self.compact(regions, [move.kept for move in moves])

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


class MassSequence(NamedTuple):
    """Query tokens `begin .. end - 1` of a pass. length: KV pairs that the last one attends. last_kv_index: `[T]`."""

    table_slot: int
    begin: int
    end: int
    length: int
    last_kv_index: torch.Tensor


class MassBackend(AttentionBackend[tuple[Plan, AttentionBatch, list[MassSequence]]], Generic[Plan]):
    """A backend whose attention mass is added up by a second product of queries and keys."""

    name = "mass"

    def __init__(self, backend: AttentionBackend[Plan], operations: KVOperations, mass: AttentionMass) -> None:
        super().__init__(backend.cache, backend.num_query_heads, backend.scale, backend.layers)
        self.backend = backend
        self.operations = operations
        self.mass = mass

    def plan(self, batch: AttentionBatch) -> tuple[Plan, AttentionBatch, list[MassSequence]]:
        assert batch.table_slots is not None
        starts, last_kv_index = batch.query_start_loc.tolist(), batch.last_kv_index.long()
        lengths = (last_kv_index + 1).tolist()
        sequences = [
            MassSequence(table_slot, begin, end, lengths[end - 1], last_kv_index[begin:end])
            for table_slot, (begin, end) in zip(batch.table_slots.tolist(), pairwise(starts), strict=True)
        ]
        return self.backend.plan(batch), batch, sequences

    def run(
        self,
        layer: int,
        queries: torch.Tensor,
        plan: tuple[Plan, AttentionBatch, list[MassSequence]],
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        inner, batch, sequences = plan
        softmax = Softmax(self.scale, self.layers[layer].soft_cap, sinks)
        for i, (table_slot, begin, end, length, last_kv_index) in enumerate(sequences):
            blocks = batch.block_tables[i : i + 1, : -(-length // self.cache.shape.block_size)]
            keys = self.operations.gather_keys([layer], blocks, length)
            of_sequence = queries[None, begin:end].transpose(1, 2)
            mass = batched_attention_mass(of_sequence, keys, length, last_kv_index, softmax=softmax)
            self.mass.add(layer, table_slot, mass[0])
        return self.backend.run(layer, queries, inner, sinks)
