"""Adapters of sequences: read when the first one begins, and given to the passes that compute it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Self

from kvllm.core.protocol import SequenceStart, StepPlan
from kvllm.lora.product import AdapterRows
from kvllm.worker.features.base import Attend, PassAttention, StepFeature, WorkerParts
from kvllm.worker.loaded_adapters import LoadedAdapters
from kvllm.worker.state import SequenceState
from kvllm.worker.step_batch import StepBatch


class AdapterFeature(StepFeature):
    """Follows which sequence has which adapter. A pass with one is not replayed from a graph."""

    def __init__(self, adapters: LoadedAdapters) -> None:
        self._adapters = adapters
        self._last: tuple[StepBatch, AdapterRows | None] | None = None

    @classmethod
    def make(cls, worker: WorkerParts) -> Self | None:
        return cls(worker.adapters) if worker.adapters else None

    def reset(self) -> None:
        self._adapters.reset()
        self._last = None

    def before_plan(self, plan: StepPlan, states: Mapping[int, SequenceState]) -> None:
        for seq_id in plan.dropped_seq_ids:
            self._adapters.release(states[seq_id].table_slot)
        if not plan.only_decodes:
            self._last = None

    def start(self, table_slot: int, start: SequenceStart) -> None:
        self._adapters.use(table_slot, start.adapter)

    def before_compression(self, plan: StepPlan, states: Mapping[int, SequenceState]) -> None:
        if self._adapters.failures:
            for start in plan.new_seqs:
                state = states[start.seq_id]
                if failure := self._adapters.failures.get(state.table_slot):
                    state.sample_row.fail(failure.error)

    def before_pass(self, plan: StepPlan, batch: StepBatch) -> Attend | None:
        if self._last is None or self._last[0] is not batch:
            self._last = batch, self._adapters.rows(batch.table_slots, batch.num_tokens)
        rows = self._last[1]
        return None if rows is None else partial(_attend, rows)

    def fork(self, parent: int, child: int) -> None:
        self._adapters.fork(parent, child)


def _attend(rows: AdapterRows, attention: PassAttention) -> None:
    attention.adapters = rows
