"""Which KV pairs layers and heads keep, for requests that ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import torch

from kvllm.core.protocol import CompressionJob, KeptPairs, SequenceStart, StepPlan, StepResult
from kvllm.worker.features.base import Restore, StepFeature, WorkerParts
from kvllm.worker.state import SequenceState, part_of_layers
from kvllm.worker.windows import Move


class Known(NamedTuple):
    """Positions of the first KV pairs of a sequence in some layers: int32 `[layers, kv_heads, n]`, -1 in a slot that
    has none. From position `end` on, all are left."""

    layers: Sequence[int]
    positions: torch.Tensor
    end: int

    def bits(self, first: int, end: int) -> dict[int, list[bytes]]:
        """Of each layer and there of each head, which of some positions are left, as in `KeptPairs`."""
        length = end - first
        is_left = torch.zeros((*self.positions.shape[:2], length + 1), dtype=torch.bool)  # the last one is no position
        offsets = self.positions.long() - first
        is_left.scatter_(-1, offsets.where((offsets >= 0) & (offsets < length), length), True)
        is_left[..., max(0, self.end - first) :] = True
        packed = np.packbits(is_left[..., :length].numpy(), axis=-1, bitorder="little")
        return {layer: [row.tobytes() for row in rows] for layer, rows in zip(self.layers, packed, strict=True)}


class KeptPairsReports(StepFeature):
    """Follows the positions of a sequence's KV pairs through compressions, and reports what each has left. What recall
    exchanges between them is not seen.

    layers: those that attend all tokens.
    """

    def __init__(self, layers: list[int], num_kv_heads: int) -> None:
        self.layers = layers
        self.num_kv_heads = num_kv_heads
        self._known: dict[int, dict[int, Known]] = {}  # by table slots, and there by the first layers of parts
        self._changed: dict[int, tuple[int, int]] = {}  # positions from and up to, by table slots
        self._reports: list[KeptPairs] = []

    @classmethod
    def make(cls, worker: WorkerParts) -> Self | None:
        if worker.config.active_compression is None:
            return None
        parts = part_of_layers(worker.config, worker.shape.num_layers)
        return cls([i for i, part in enumerate(parts) if part < worker.tables.full_parts], worker.shape.num_kv_heads)

    def reset(self) -> None:
        self._known, self._changed, self._reports = {}, {}, []

    def start(self, table_slot: int, start: SequenceStart) -> None:
        self._known.pop(table_slot, None)

    def save(self, table_slot: int) -> Restore:
        known = dict(self._known.get(table_slot, {}))
        return lambda table_slot: self._known.update({table_slot: known})

    def move(self, moves: Sequence[Move]) -> None:
        for move in moves:
            if move.state.sample_row.params.report_kept_pairs:
                self._follow(move)

    def _follow(self, move: Move) -> None:
        of_slot = self._known.setdefault(move.state.table_slot, {})
        kept, dropped = move.kept.cpu(), move.state.logical_length - move.cached
        if known := of_slot.get(move.layers[0]):
            positions = known.positions
        else:
            positions = torch.empty((*kept.shape[:2], 0), dtype=torch.int32)
        index = torch.arange(positions.shape[-1], move.end, dtype=torch.int32)
        positions = torch.cat((positions, (index + dropped).expand(*kept.shape[:2], -1)), dim=-1)
        before, region, after = positions.tensor_split((move.start, move.end), dim=-1)
        survivors = region.gather(-1, kept.clamp(min=0)).masked_fill(kept < 0, -1)
        end = int(positions.max()) + 1
        of_slot[move.layers[0]] = Known(move.layers, torch.cat((before, survivors, after), dim=-1), end)
        first, last = int(region[region >= 0].min()), int(region.max()) + 1
        earlier = self._changed.get(move.state.table_slot, (first, last))
        self._changed[move.state.table_slot] = min(first, earlier[0]), max(last, earlier[1])

    def compacted(self, job: CompressionJob, state: SequenceState) -> None:
        if (changed := self._changed.pop(state.table_slot, None)) is None:
            return
        length = changed[1] - changed[0]
        whole = np.packbits(np.ones(length, dtype=np.bool_), bitorder="little").tobytes()
        bits = {layer: [whole] * self.num_kv_heads for layer in self.layers}
        for known in self._known[state.table_slot].values():
            bits |= known.bits(*changed)
        self._reports.append(KeptPairs(job.seq_id, *changed, self.layers, [*bits.values()]))

    def reports(self, plan: StepPlan) -> bool:
        return bool(self._reports)

    def after_pass(self, plan: StepPlan, result: StepResult) -> None:
        result.kept_pairs, self._reports = self._reports, []
