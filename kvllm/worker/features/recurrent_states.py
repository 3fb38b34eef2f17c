"""The states of recurrent layers, one for each running sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from kvllm.config import EngineConfig
from kvllm.core.protocol import SequenceStart, StepPlan
from kvllm.kvcache.cache import CacheShape
from kvllm.kvcache.recurrent import RecordedChanges, RecurrentStates, RecurrentStep, StateChanges, StateShape
from kvllm.stats import MemoryField
from kvllm.worker.features.base import Attend, PassAttention, Restore, StepFeature, WorkerParts
from kvllm.worker.state import SequenceState
from kvllm.worker.step_batch import StepBatch
from kvllm.worker.step_inputs import LOGIT_TOKENS, StepInputs, StepTensor, write
from kvllm.worker.transfer import to_device

SLOTS = "state_slots"
"""Among the inputs of a step: the row of each sequence."""


MOST_RECORDED_ROWS = 64
"""Decodes and query tokens with drafts of a pass that a graph may hold: for so many there is memory to note changes."""


@dataclass
class _Drafted:
    """Sequences with drafts in a pass: the sequences before them, their table slots and query tokens, their states
    before it, and what it did."""

    first: int
    table_slots: list[int]
    counts: list[int]
    before: list[tuple[torch.Tensor, torch.Tensor]]
    changes: StateChanges


class RecurrentFeature(StepFeature):
    """Keeps the states of a model's recurrent layers, and hands a pass those of its sequences.

    A pass reads and writes them in place, so a sequence whose tokens are computed again starts again. The rows of table
    slots come first, then those of copies, then one for what fills up a recorded pass. Where a draft was wrong, the
    state from before the pass is changed by the right tokens, before the next plan.
    """

    def __init__(self, shape: StateShape, config: EngineConfig, device: torch.device) -> None:
        rows = _num_rows(config)
        self.states = RecurrentStates(shape, rows, device)
        self.first_copy = config.max_num_seqs
        self.tensors = (StepTensor(SLOTS, padding=rows - 1),)
        self._recorded = RecordedChanges(MOST_RECORDED_ROWS) if config.most_drafts else None
        self.reset()

    @classmethod
    def make(cls, worker: WorkerParts) -> Self | None:
        shape = worker.shape.recurrent
        return cls(shape, worker.config, worker.device) if shape else None

    @classmethod
    def num_bytes(cls, config: EngineConfig, shape: CacheShape) -> dict[MemoryField, int]:
        size = shape.recurrent.bytes_per_sequence if shape.recurrent else 0
        return {"recurrent_state_bytes": _num_rows(config) * size}

    def reset(self) -> None:
        self._drafted: _Drafted | None = None
        self._right: dict[int, int] = {}

    def accepted(self, states: Sequence[SequenceState], counts: Sequence[int]) -> None:
        self._right = {state.table_slot: count for state, count in zip(states, counts, strict=True)}

    def before_plan(self, plan: StepPlan, states: Mapping[int, SequenceState]) -> None:
        if self._drafted:
            self._take_back(self._drafted)
            self.reset()
        for copy in plan.state_copies:
            self.states.copy(states[copy.seq_id].table_slot, self.first_copy + copy.row)

    def _take_back(self, drafted: _Drafted) -> None:
        """Let states be those after the right tokens."""
        rows, slots, ends, begin = list[int](), list[int](), [0], drafted.first
        for table_slot, count, before in zip(drafted.table_slots, drafted.counts, drafted.before, strict=True):
            known = 1 + self._right.get(table_slot, 0)
            if known < count:
                self.states.restore(table_slot, before)
                slots.append(table_slot)
                rows += range(begin, begin + known)
                ends.append(len(rows))
            begin += count
        if slots:
            device = self.states.states.device
            of_slots, of_ends = (to_device(each, device, torch.int32) for each in (slots, ends))
            drafted.changes.repeat(RecurrentStep(self.states, of_slots, of_ends), to_device(rows, device))

    def before_pass(self, plan: StepPlan, batch: StepBatch) -> Attend | None:
        if not batch.num_verified:
            return None
        first, last = batch.num_decodes, batch.num_decodes + batch.num_verified
        counts, table_slots = batch.num_tokens[first:last], batch.table_slots[first:last].tolist()
        before, num_rows = [self.states.save(slot) for slot in table_slots], first + sum(counts)
        # Those of a graph; a pass that is none says so (`attend`).
        changes = self._recorded or StateChanges()
        self._drafted = _Drafted(first, table_slots, counts, before, changes)
        return _no_graph if num_rows > MOST_RECORDED_ROWS else None

    def start(self, table_slot: int, start: SequenceStart) -> None:
        if start.state_row is None:
            self.states.clear(table_slot)
        else:
            self.states.copy(self.first_copy + start.state_row, table_slot)

    def save(self, table_slot: int) -> Restore:
        saved = self.states.save(table_slot)
        return lambda table_slot: self.states.restore(table_slot, saved)

    def write(self, inputs: StepInputs, table_slots: np.ndarray, kv_lengths: np.ndarray, *, is_new: bool) -> None:
        if is_new:
            write(inputs.array(SLOTS), table_slots, padding=self.tensors[0].padding)

    def attend(self, attention: PassAttention) -> None:
        for fields in attention.fields:
            fields.pop(SLOTS)  # which attention itself has no use for
        inputs, changes = attention.inputs, None
        if inputs.recordings[0]:
            tokens = inputs.by_name.get(LOGIT_TOKENS)
            changes = self._recorded.begin(tokens) if self._recorded and tokens is not None else None
        elif drafted := self._drafted:
            changes = drafted.changes = StateChanges(slice(0, drafted.first + sum(drafted.counts)))
        attention.recurrent = RecurrentStep(self.states, inputs.by_name[SLOTS], inputs.query_start_loc, changes)


def _no_graph(attention: PassAttention) -> None:
    """Changes nothing."""


def _num_rows(config: EngineConfig) -> int:
    return config.max_num_seqs + config.num_state_snapshots + 1
