"""The states of recurrent layers, one for each running sequence."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Self

import torch

from kvllm.config import EngineConfig
from kvllm.core.protocol import SequenceStart, StepPlan
from kvllm.kvcache.cache import CacheShape
from kvllm.kvcache.recurrent import RecurrentStates, RecurrentStep
from kvllm.worker.features.base import Attend, PassAttention, StepFeature, WorkerParts
from kvllm.worker.state import SequenceState
from kvllm.worker.step_batch import StepBatch
from kvllm.worker.transfer import to_device


class RecurrentFeature(StepFeature):
    """Keeps the states of a model's recurrent layers, and hands a pass those of its sequences.

    A pass reads and writes them in place, so a sequence whose tokens are computed again starts again.
    """

    captures = False

    def __init__(self, states: RecurrentStates, config: EngineConfig) -> None:
        self.states = states
        self.first_snapshot = config.max_num_seqs  # the rows before it are those of table slots

    @classmethod
    def make(cls, worker: WorkerParts) -> Self | None:
        shape = worker.shape.recurrent
        config = worker.config
        if shape is None:
            return None
        return cls(RecurrentStates(shape, config.max_num_seqs + config.num_state_snapshots, worker.device), config)

    @classmethod
    def num_bytes(cls, config: EngineConfig, shape: CacheShape) -> dict[str, int]:
        size = shape.recurrent.bytes_per_sequence if shape.recurrent else 0
        return {"recurrent_state_bytes": (config.max_num_seqs + config.num_state_snapshots) * size}

    def before_plan(self, plan: StepPlan, states: Mapping[int, SequenceState]) -> None:
        for copy in plan.state_copies:
            self.states.copy(states[copy.seq_id].table_slot, self.first_snapshot + copy.row)

    def start(self, table_slot: int, start: SequenceStart) -> None:
        if start.state_row is None:
            self.states.clear(table_slot)
        else:
            self.states.copy(self.first_snapshot + start.state_row, table_slot)

    def save(self, table_slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.states.save(table_slot)

    def restore(self, table_slot: int, saved: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.states.restore(table_slot, saved)

    def before_pass(self, plan: StepPlan, batch: StepBatch) -> Attend:
        return partial(self._attend, batch)

    def _attend(self, batch: StepBatch, attention: PassAttention) -> None:
        starts = attention.inputs.query_start_loc
        slots = to_device(batch.table_slots, starts.device)
        attention.recurrent = RecurrentStep(self.states, slots, starts, batch.num_tokens)
