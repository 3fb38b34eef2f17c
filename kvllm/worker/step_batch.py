"""The sequences of a step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kvllm.core.protocol import StepPlan
from kvllm.worker.sampler import SampleRows
from kvllm.worker.state import SequenceState


@dataclass(frozen=True)
class StepBatch:
    """The sequences of a step in the plan's order, `num_decodes` that decode first, and their query tokens.

    num_verified: how many come after these with a draft. num_known: int64 `[S]`, query tokens that are no draft.
    table_slots: int64 `[S]`.
    untaken: new tokens of those that decode, int64 `[num_decodes]` of each step, which they do not have yet.
    """

    states: list[SequenceState]
    num_tokens: list[int]
    num_decodes: int
    table_slots: np.ndarray
    num_verified: int
    num_known: np.ndarray
    untaken: deque[np.ndarray] = field(default_factory=deque)

    @property
    def only_decodes(self) -> bool:
        return self.num_decodes == len(self.states)

    @cached_property
    def decoding(self) -> list[SequenceState]:
        return self.states[: self.num_decodes]

    @cached_property
    def counts(self) -> np.ndarray:
        """`num_tokens`, int64 `[S]`."""
        return np.array(self.num_tokens)

    @cached_property
    def verified(self) -> list[SequenceState]:
        """Those with a draft."""
        return self.states[self.num_decodes : self.num_decodes + self.num_verified]

    def has_draft(self, number: int) -> bool:
        return self.num_decodes <= number < self.num_decodes + self.num_verified

    @property
    def num_rows(self) -> list[int]:
        """How many query tokens of each sequence, the last ones, have logits: all of one with a draft, else one."""
        return [count if self.has_draft(i) else 1 for i, count in enumerate(self.num_tokens)]

    @property
    def last_tokens(self) -> np.ndarray:
        """The query tokens that have logits: int64 `[R]`."""
        ends = self.counts.cumsum()
        if not self.num_verified:
            return ends - 1
        return np.concatenate([np.arange(end - rows, end) for end, rows in zip(ends, self.num_rows, strict=True)])

    @cached_property
    def decode_rows(self) -> SampleRows:
        """Of those that decode."""
        return rows_of(self.decoding)

    def extend(self, token_ids: np.ndarray) -> None:
        """Give a token to each sequence that decodes, at once if sampling asks for it. Otherwise it has time, and a
        pass begins earlier."""
        if self.only_decodes and not self.decode_rows.special:
            self.untaken.append(token_ids)
        else:
            self._give(token_ids)

    def take_tokens(self) -> None:
        while self.untaken:
            self._give(self.untaken.popleft())

    def _give(self, token_ids: np.ndarray) -> None:
        for state, token_id in zip(self.decoding, token_ids.tolist(), strict=True):
            state.token_ids.append(token_id)
            state.sample_row.output_token_ids.append(token_id)

    @classmethod
    def of(cls, plan: StepPlan, states: dict[int, SequenceState]) -> StepBatch:
        seq_ids, num_tokens = zip(*plan.query_tokens(), strict=True)
        of_step = [states[seq_id] for seq_id in seq_ids]
        num_decodes, num_verified = len(plan.decodes.seq_ids), len(plan.verifications)
        num_known = np.array(num_tokens)
        num_known[num_decodes : num_decodes + num_verified] = 1
        table_slots = np.array([state.table_slot for state in of_step])
        return cls(of_step, list(num_tokens), num_decodes, table_slots, num_verified, num_known)


def rows_of(states: list[SequenceState]) -> SampleRows:
    """What sequences ask for, in their order."""
    return SampleRows([state.sample_row for state in states])


def number_rows(states: list[SequenceState]) -> None:
    """Let sequences know the rows of the logits that they sample from."""
    for row, state in enumerate(states):
        state.sampled_row = row


class BatchKeeper:
    """Makes the batch of each step. Most steps only decode the sequences of the step before, and get its batch."""

    def __init__(self) -> None:
        self._seq_ids: list[int] = []
        self._batch: StepBatch | None = None

    def keeps(self, plan: StepPlan) -> bool:
        """Whether a plan does nothing but to decode the sequences of the last step once more."""
        changes = plan.dropped_seq_ids or plan.scored or not plan.only_decodes
        return self._batch is not None and not changes and plan.decodes.seq_ids == self._seq_ids

    def follow(self, plan: StepPlan) -> None:
        """Let sequences take their last tokens. Forget the batch if sequences start or are dropped, which also a plan
        may do that computes nothing: one that starts again has another state under its id."""
        if self._batch:
            self._batch.take_tokens()
        if plan.reset or plan.dropped_seq_ids or plan.new_seqs:
            self._batch = None

    def batch(self, plan: StepPlan, states: dict[int, SequenceState]) -> StepBatch:
        """states: of all sequences."""
        has_others = bool(plan.chunks or plan.verifications)
        if self._batch is None or has_others or plan.decodes.seq_ids != self._seq_ids:
            batch = StepBatch.of(plan, states)
            self._batch = None if has_others else batch
            self._seq_ids = plan.decodes.seq_ids
            return batch
        return self._batch
