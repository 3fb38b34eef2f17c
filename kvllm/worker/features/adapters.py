"""Adapters of sequences: read when the first one begins, and given to the passes that compute it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import numpy as np

from kvllm.core.protocol import SequenceStart, StepPlan
from kvllm.lora.product import NO_ADAPTER
from kvllm.worker.features.base import PassAttention, StepFeature, WorkerParts
from kvllm.worker.loaded_adapters import LoadedAdapters
from kvllm.worker.state import SequenceState
from kvllm.worker.step_inputs import StepInputs, StepTensor, write

NUMBERS = "adapters"
"""Among the inputs of a step: that of each sequence's adapter."""


class AdapterFeature(StepFeature):
    """Follows which sequence has which adapter."""

    tensors = (StepTensor(NUMBERS, padding=NO_ADAPTER),)

    def __init__(self, adapters: LoadedAdapters) -> None:
        self._adapters = adapters

    @classmethod
    def make(cls, worker: WorkerParts) -> Self | None:
        return cls(worker.adapters) if worker.adapters else None

    def reset(self) -> None:
        self._adapters.reset()

    def before_plan(self, plan: StepPlan, states: Mapping[int, SequenceState]) -> None:
        for seq_id in plan.dropped_seq_ids:
            self._adapters.release(states[seq_id].table_slot)

    def start(self, table_slot: int, start: SequenceStart) -> None:
        self._adapters.use(table_slot, start.adapter)

    def before_compression(self, plan: StepPlan, states: Mapping[int, SequenceState]) -> None:
        if self._adapters.failures:
            for start in plan.new_seqs:
                state = states[start.seq_id]
                if failure := self._adapters.failures.get(state.table_slot):
                    state.sample_row.fail(failure.error)

    def write(self, inputs: StepInputs, table_slots: np.ndarray, kv_lengths: np.ndarray, *, is_new: bool) -> None:
        if is_new:
            write(inputs.array(NUMBERS), self._adapters.numbers[table_slots], padding=NO_ADAPTER)

    def attend(self, attention: PassAttention) -> None:
        for fields in attention.fields:
            fields.pop(NUMBERS)  # which attention itself has no use for
        attention.adapters = self._adapters.rows_of(attention.inputs, NUMBERS)

    def fork(self, parent: int, child: int) -> None:
        self._adapters.fork(parent, child)
