"""Recall on one rank: what compressions drop is held in the host's memory, and changes places with residents.

Within a layer's attention, before its softmax, the step's own queries score what their sequence has dropped. What they
attend more than the residents of compressed windows changes places with the least attended of these. Lengths and tables
stay as they are, whatever the queries are, and blocks of compressed windows belong to one sequence alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Self

import numpy as np
import torch

from kvllm.config import CompressionConfig, EngineConfig
from kvllm.core.protocol import CompressionJob, MissingMass, StepPlan, StepResult
from kvllm.kvcache.cache import CacheShape
from kvllm.kvcache.formats import KV_FORMATS, KVFormat
from kvllm.kvcache.ops.base import KVOperations
from kvllm.kvcache.tiers.chunks import CHUNK
from kvllm.kvcache.tiers.dropped_pairs import DroppedPairs, read_pairs, write_pairs
from kvllm.worker.features.base import Attend, PassAttention, StepFeature, WorkerParts
from kvllm.worker.features.recalling_backend import CompressedSequence, RecallGroup, RecallingBackend
from kvllm.worker.state import BlockTables, SequenceState
from kvllm.worker.step_batch import StepBatch
from kvllm.worker.windows import Move


class Recall(StepFeature):
    """Takes what a compression drops, and names what takes part in the exchanges of a step.

    sequences: those that were compressed, by id.
    """

    overlaps = False

    def __init__(
        self, operations: KVOperations, tables: BlockTables, dropped: DroppedPairs, config: CompressionConfig
    ) -> None:
        self.operations = operations
        self.cache = operations.cache
        self.tables = tables
        self.dropped = dropped
        self.config = config
        self.sequences: dict[int, CompressedSequence] = {}
        self._groups: list[RecallGroup] = []
        self._incomplete: list[int] = []

    @classmethod
    def make(cls, worker: WorkerParts) -> Self | None:
        config, compression = worker.config, worker.config.active_compression
        if compression is None or worker.store is None or not config.num_host_chunks:
            return None
        dropped = DroppedPairs(worker.shape, _kv_format(config, worker.shape), config.num_host_chunks)
        return cls(worker.operations, worker.tables.parts[0], dropped, compression)

    def before_plan(self, plan: StepPlan, states: Mapping[int, SequenceState]) -> None:
        """What suspended sequences have dropped waits for them."""
        for seq_id in {*plan.dropped_seq_ids}.difference(plan.suspended).union(plan.forgotten):
            self.release(seq_id)

    def release(self, seq_id: int) -> None:
        """Give up what a sequence has dropped, if it has."""
        if sequence := self.sequences.pop(seq_id, None):
            self.dropped.chunks.release(sequence.held.chunks)

    def reset(self) -> None:
        for seq_id in list(self.sequences):
            self.release(seq_id)
        self._groups, self._incomplete = [], []

    # Compressions

    def before_choice(self, job: CompressionJob, blocks: np.ndarray) -> None:
        """Bring the pairs of a region into the order of their positions, since methods and movements rely on it."""
        sequence, start = self.sequences.get(job.seq_id), job.parts[0].first_block * self.cache.shape.block_size
        if sequence is None or sequence.is_ordered or sequence.positions.shape[-1] <= start:
            return
        of_region = sequence.positions[..., start:]
        order = of_region.argsort(dim=-1)
        index = torch.arange(order.shape[-1]).expand(order.shape[1], -1)
        for layer, old in enumerate(order):
            pairs = read_pairs(self.cache, layer, self._places(blocks, old))
            write_pairs(self.cache, layer, self._places(blocks, index), pairs)
        sequence.positions[..., start:] = of_region.gather(-1, order)
        sequence.is_ordered = True

    def move(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self.take(move)

    def take(self, move: Move) -> None:
        """Hold what a compression is about to drop."""
        job, kept = move.job, move.kept
        start = job.first_block * self.cache.shape.block_size
        tail = kept.shape[-1] - (job.span - job.dropped)
        size = job.span + tail
        sequence = self._of(move.seq_id)
        known = sequence.positions.shape[-1]
        rest = torch.arange(known, max(known, start + size), dtype=torch.int32) + move.state.dropped
        positions = torch.cat((sequence.positions, rest.expand(*kept.shape[:2], -1)), dim=-1)
        region = positions[..., start : start + size]
        is_dropped = torch.ones(region.shape, dtype=torch.bool).scatter_(-1, kept, False)
        offsets = is_dropped.nonzero()[:, 2].view(*kept.shape[:2], -1)
        self._hold(sequence, move.blocks, offsets, region.gather(-1, offsets))
        sequence.positions = torch.cat((positions[..., :start], region.gather(-1, kept)), dim=-1)
        movable = torch.zeros(sequence.positions.shape[-1], dtype=torch.bool)
        movable[: min(start, known)] = sequence.movable[:start]
        overlap = job.size - job.stride  # which the next window compresses again
        movable[start : start + kept.shape[-1] - tail - overlap] = True
        sequence.movable = movable

    def _of(self, seq_id: int) -> CompressedSequence:
        shape = self.cache.shape
        if seq_id not in self.sequences:
            none = torch.empty((shape.num_layers, shape.num_kv_heads, 0), dtype=torch.int32)
            self.sequences[seq_id] = CompressedSequence(none, torch.empty(0, dtype=torch.bool))
        return self.sequences[seq_id]

    def _hold(
        self, sequence: CompressedSequence, blocks: np.ndarray, offsets: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Copy pairs at `offsets` of a region, int64 `[layers, kv_heads, D]`, to the sequence's chunks."""
        held, count = sequence.held, offsets.shape[-1]
        if not held.add(count, self.dropped.chunks):
            return
        index = torch.arange(held.count - count, held.count).expand(offsets.shape[1], -1)
        head = torch.arange(offsets.shape[1])[:, None]
        places = torch.tensor(held.chunks)[index // CHUNK], head, index % CHUNK
        for layer, of_layer in enumerate(offsets):
            pairs = read_pairs(self.cache, layer, self._places(blocks, of_layer))
            self.dropped.store(layer, places, pairs, positions[layer])

    def _places(self, blocks: np.ndarray, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Places in the pool of offsets in a region, `[kv_heads, n]`."""
        block_size = self.cache.shape.block_size
        ids = torch.from_numpy(blocks.astype(np.int64))
        return ids[offsets // block_size], torch.arange(len(offsets))[:, None], offsets % block_size

    # Steps

    def before_pass(self, plan: StepPlan, batch: StepBatch) -> Attend | None:
        groups = self.groups(plan, batch.states)
        return partial(self._attend, groups) if groups else None

    def _attend(self, groups: list[RecallGroup], attention: PassAttention) -> None:
        attention.backend = RecallingBackend(attention.backend, groups, self.operations, self.dropped, self.config)

    def after_pass(self, plan: StepPlan, result: StepResult) -> None:
        if plan.num_seqs:
            result.missing_masses = self.missing_masses()
            result.recalled_bytes = sum(group.exchanged_bytes for group in self._groups)

    def groups(self, plan: StepPlan, states: Sequence[SequenceState]) -> list[RecallGroup]:
        """The sequences of a step that may recall something: one group for each number of query tokens."""
        members: dict[int, list[tuple[int, int, SequenceState]]] = {}
        self._incomplete = []
        begin = 0
        for (seq_id, num_tokens), state in zip(plan.query_tokens(), states, strict=True):
            sequence = self.sequences.get(seq_id)
            if sequence and not sequence.held.is_complete:
                self._incomplete.append(seq_id)
            if sequence and sequence.held.chunks and self.config.recalls_in(state.logical_length, num_tokens):
                members.setdefault(num_tokens, []).append((begin, seq_id, state))
            begin += num_tokens
        self._groups = [self._group(num_tokens, rows) for num_tokens, rows in members.items()]
        return self._groups

    def _group(self, num_tokens: int, members: list[tuple[int, int, SequenceState]]) -> RecallGroup:
        """members: of each sequence its first query token in the batch, its id and state."""
        begins, seq_ids, states = zip(*members, strict=True)
        tables = self.tables
        sequences = [self.sequences[seq_id] for seq_id in seq_ids]
        index = torch.arange(num_tokens)
        last = torch.tensor([state.cached_length for state in states], dtype=torch.int32)[:, None] + index.int()
        last_dropped = torch.tensor([sequence.held.count - 1 for sequence in sequences], dtype=torch.int32)
        num_blocks = int(last.max()) // tables.block_size + 1
        table = tables.table[[state.table_slot for state in states], :num_blocks]
        held = [sequence.held.chunks for sequence in sequences]
        most = max(map(len, held))
        chunks = [each + each[:1] * (most - len(each)) for each in held]
        return RecallGroup(
            seq_ids=seq_ids,
            sequences=sequences,
            rows=torch.tensor(begins)[:, None] + index,
            last_kv_index=last,
            tables=torch.from_numpy(np.ascontiguousarray(table)),
            chunks=torch.tensor(chunks, dtype=torch.int32),
            last_dropped=last_dropped[:, None].expand(-1, num_tokens).contiguous(),
            movable=_padded([each.movable for each in sequences], num_blocks * tables.block_size),
        )

    def missing_masses(self) -> list[MissingMass]:
        """The bounds of the step's sequences. Of one that has lost pairs nothing is known, so its bound is 1."""
        found = {seq_id: bound for group in self._groups for seq_id, bound in group.bounds()}
        found |= dict.fromkeys(self._incomplete, 1.0)
        return [MissingMass(seq_id, bound) for seq_id, bound in found.items()]


def _padded(rows: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    """bool `[R, length]`, False after the end of each row."""
    padded = torch.zeros((len(rows), length), dtype=torch.bool)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return padded


def _kv_format(config: EngineConfig, shape: CacheShape) -> KVFormat | None:
    """The format of dropped pairs; None for that of activations."""
    assert config.active_compression
    return KV_FORMATS.get(config.active_compression.recall_dtype, shape.kv_format)
