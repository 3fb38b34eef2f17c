"""The sequences of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvllm.core.protocol import StepPlan
from kvllm.worker.sampler import SampleRows
from kvllm.worker.state import SequenceState


@dataclass(frozen=True)
class StepBatch:
    """The sequences of a step in the plan's order, `num_decodes` that decode first, and their query tokens.

    table_slots: int64 `[S]`.
    """

    states: list[SequenceState]
    num_tokens: list[int]
    num_decodes: int
    table_slots: np.ndarray

    @property
    def decoding(self) -> list[SequenceState]:
        return self.states[: self.num_decodes]

    @cached_property
    def decode_rows(self) -> SampleRows:
        """Of those that decode."""
        return rows_of(self.decoding)

    @classmethod
    def of(cls, plan: StepPlan, states: dict[int, SequenceState]) -> StepBatch:
        decodes = plan.decodes.seq_ids
        of_step = [*[states[seq_id] for seq_id in decodes], *[states[chunk.seq_id] for chunk in plan.chunks]]
        num_tokens = [1] * len(decodes) + [chunk.num_tokens for chunk in plan.chunks]
        return cls(of_step, num_tokens, len(decodes), np.array([state.table_slot for state in of_step]))


def rows_of(states: list[SequenceState]) -> SampleRows:
    """What sequences ask for, in their order."""
    return SampleRows([state.sample_row for state in states])


class BatchKeeper:
    """Makes the batch of each step. Most steps only decode the sequences of the step before, and get its batch."""

    def __init__(self) -> None:
        self._seq_ids: list[int] = []
        self._batch: StepBatch | None = None

    def follow(self, plan: StepPlan) -> None:
        """Forget the batch if sequences start or are dropped, which also a plan may do that computes nothing: one that
        starts again has another state under its id."""
        if plan.reset or plan.dropped_seq_ids or plan.new_seqs:
            self._batch = None

    def batch(self, plan: StepPlan, states: dict[int, SequenceState]) -> StepBatch:
        """states: of all sequences."""
        if self._batch is None or plan.chunks or plan.decodes.seq_ids != self._seq_ids:
            batch = StepBatch.of(plan, states)
            self._batch = None if plan.chunks else batch
            self._seq_ids = plan.decodes.seq_ids
            return batch
        return self._batch
