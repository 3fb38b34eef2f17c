"""Drafts of a model, after the passes of the plans that order them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from kvllm.config import EngineConfig
from kvllm.core.protocol import StepPlan, StepResult
from kvllm.kvcache.cache import CacheShape
from kvllm.stats import MemoryField
from kvllm.worker.drafter import Drafter, HiddenStates, Text
from kvllm.worker.features.base import StepFeature, WorkerParts
from kvllm.worker.state import SequenceState
from kvllm.worker.step_batch import StepBatch


class Drafts(StepFeature):
    """Asks the model that drafts. Plans that order drafts are never overlapped by the next one.

    A model that reads hidden states gets those that nobody has asked for yet, too: as many of all sequences together
    as its pool has tokens, then they are forgotten.
    """

    def __init__(self, model: Drafter) -> None:
        self.model = model
        self.reads_hidden = model.reads_hidden
        self._hidden: dict[int, HiddenStates] = {}
        self._states: Mapping[int, SequenceState] = {}
        self._batch: StepBatch | None = None

    @classmethod
    def num_bytes(cls, config: EngineConfig, shape: CacheShape) -> dict[MemoryField, int]:
        return {"draft_pool_bytes": config.num_draft_blocks * shape.bytes_per_block} if config.num_draft_blocks else {}

    @classmethod
    def make(cls, worker: WorkerParts) -> Drafts | None:
        return cls(worker.draft) if worker.draft else None

    def reset(self) -> None:
        self.model.reset()
        self._hidden.clear()

    def before_plan(self, plan: StepPlan, states: Mapping[int, SequenceState]) -> None:
        self.model.drop(plan.dropped_seq_ids)
        for seq_id in plan.dropped_seq_ids:
            self._hidden.pop(states[seq_id].table_slot, None)
        self._states = states

    def before_pass(self, plan: StepPlan, batch: StepBatch) -> None:
        self._batch = batch

    def computed(self, batch: StepBatch, positions: np.ndarray, hidden: torch.Tensor) -> None:
        cache, held = self.model.cache, sum(each.num_tokens for each in self._hidden.values())
        if held > cache.num_blocks * cache.shape.block_size:
            self._hidden.clear()
        begin = 0
        for state, rows in zip(batch.states, hidden.split(batch.num_tokens), strict=True):
            position = int(positions[begin])
            self._hidden.setdefault(state.table_slot, HiddenStates(position)).put(position, rows.clone())
            begin += len(rows)

    def fork(self, parent: int, child: int) -> None:
        if self.reads_hidden:
            self._hidden[child] = self._hidden[parent].fork()

    def reports(self, plan: StepPlan) -> bool:
        return bool(plan.drafts)

    def after_pass(self, plan: StepPlan, result: StepResult) -> None:
        assert self._batch
        self._batch.take_tokens()
        new, texts = _new_tokens(plan, result), list[Text]()
        for order in plan.drafts:
            state, token_ids = self._states[order.seq_id], new[order.seq_id]
            row = state.sample_row.branch(token_ids)
            hidden = self._hidden.get(state.table_slot)
            texts.append(Text(order.seq_id, state, token_ids, row, order.num_tokens, hidden))
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
