"""Drafts of a draft model, after the passes of the plans that order them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvllm.core.protocol import StepPlan, StepResult
from kvllm.worker.features.base import StepFeature, WorkerParts
from kvllm.worker.sample_row import SampleRow
from kvllm.worker.state import SequenceState
from kvllm.worker.step_batch import StepBatch

if TYPE_CHECKING:  # which is made of parts that know all features
    from kvllm.worker.draft_model import DraftModel


@dataclass
class Text:
    """A sequence, `count` tokens of which are to be drafted after its `token_ids` and `new` ones.

    row: what its request asks for, with the output of all these; its output grows with the draft.
    """

    seq_id: int
    token_ids: list[int]
    new: list[int]
    row: SampleRow
    count: int
    draft: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids) + len(self.new)

    def after(self, begin: int) -> list[int]:
        """The tokens from index `begin` on."""
        return self.token_ids[begin:] + self.new[max(0, begin - len(self.token_ids)) :]


class Drafts(StepFeature):
    """Asks the draft model. Plans that order drafts are never overlapped by the next one."""

    def __init__(self, model: DraftModel) -> None:
        self.model = model
        self._states: Mapping[int, SequenceState] = {}
        self._batch: StepBatch | None = None

    @classmethod
    def make(cls, worker: WorkerParts) -> Drafts | None:
        return cls(worker.draft) if worker.draft else None

    def reset(self) -> None:
        self.model.reset()

    def before_plan(self, plan: StepPlan, states: Mapping[int, SequenceState]) -> None:
        self.model.drop(plan.dropped_seq_ids)
        self._states = states

    def before_pass(self, plan: StepPlan, batch: StepBatch) -> None:
        self._batch = batch

    def reports(self, plan: StepPlan) -> bool:
        return bool(plan.drafts)

    def after_pass(self, plan: StepPlan, result: StepResult) -> None:
        assert self._batch
        self._batch.take_tokens()
        new, texts = _new_tokens(plan, result), list[Text]()
        for order in plan.drafts:
            state, token_ids = self._states[order.seq_id], new[order.seq_id]
            row = state.sample_row.branch(token_ids)
            texts.append(Text(order.seq_id, state.token_ids, token_ids, row, order.num_tokens))
        self.model.draft(texts)
        result.drafts = [text.draft for text in texts]


def _new_tokens(plan: StepPlan, result: StepResult) -> dict[int, list[int]]:
    """The tokens that a step brought sequences, but forks."""
    tokens, found = iter(result.tokens), dict[int, list[int]]()
    for seq_id in plan.decodes.seq_ids:
        found[seq_id] = [next(tokens).token_id]
    for chunk in plan.chunks:
        if chunk.samples:
            found[chunk.seq_id] = [next(tokens).token_id]
            for _ in chunk.forks:
                next(tokens)
    for each, verified in zip(plan.verifications, result.verified, strict=True):
        found[each.seq_id] = [token.token_id for token in verified]
    return found
