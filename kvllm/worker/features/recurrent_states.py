"""The states of recurrent layers, one for each running sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import numpy as np
import torch

from kvllm.config import EngineConfig
from kvllm.core.protocol import SequenceStart, StepPlan
from kvllm.kvcache.cache import CacheShape
from kvllm.kvcache.recurrent import RecurrentStates, RecurrentStep, StateShape
from kvllm.worker.features.base import PassAttention, StepFeature, WorkerParts
from kvllm.worker.state import SequenceState
from kvllm.worker.step_inputs import StepInputs, StepTensor, write

SLOTS = "state_slots"
"""Among the inputs of a step: the row of each sequence."""


class RecurrentFeature(StepFeature):
    """Keeps the states of a model's recurrent layers, and hands a pass those of its sequences.

    A pass reads and writes them in place, so a sequence whose tokens are computed again starts again. The rows of table
    slots come first, then those of copies, then one for what fills up a recorded pass.
    """

    def __init__(self, shape: StateShape, config: EngineConfig, device: torch.device) -> None:
        rows = _num_rows(config)
        self.states = RecurrentStates(shape, rows, device)
        self.first_copy = config.max_num_seqs
        self.tensors = (StepTensor(SLOTS, padding=rows - 1),)

    @classmethod
    def make(cls, worker: WorkerParts) -> Self | None:
        shape = worker.shape.recurrent
        return cls(shape, worker.config, worker.device) if shape else None

    @classmethod
    def num_bytes(cls, config: EngineConfig, shape: CacheShape) -> dict[str, int]:
        size = shape.recurrent.bytes_per_sequence if shape.recurrent else 0
        return {"recurrent_state_bytes": _num_rows(config) * size}

    def before_plan(self, plan: StepPlan, states: Mapping[int, SequenceState]) -> None:
        for copy in plan.state_copies:
            self.states.copy(states[copy.seq_id].table_slot, self.first_copy + copy.row)

    def start(self, table_slot: int, start: SequenceStart) -> None:
        if start.state_row is None:
            self.states.clear(table_slot)
        else:
            self.states.copy(self.first_copy + start.state_row, table_slot)

    def save(self, table_slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.states.save(table_slot)

    def restore(self, table_slot: int, saved: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.states.restore(table_slot, saved)

    def write(self, inputs: StepInputs, table_slots: np.ndarray, kv_lengths: np.ndarray, *, is_new: bool) -> None:
        if is_new:
            write(inputs.array(SLOTS), table_slots, padding=self.tensors[0].padding)

    def attend(self, attention: PassAttention) -> None:
        for fields in attention.fields:
            fields.pop(SLOTS)  # which attention itself has no use for
        inputs = attention.inputs
        attention.recurrent = RecurrentStep(self.states, getattr(inputs, SLOTS), inputs.query_start_loc)


def _num_rows(config: EngineConfig) -> int:
    return config.max_num_seqs + config.num_state_snapshots + 1
