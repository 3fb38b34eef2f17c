"""Drafts of the layer that a checkpoint has for them, over a KV pool of its own."""

from __future__ import annotations

from typing import Self

import numpy as np
import torch

from kvllm.attention.base import AttentionBackend
from kvllm.config import EngineConfig
from kvllm.models.mtp import MTPDecoder
from kvllm.worker.draft_model import CachedText, DraftModel
from kvllm.worker.drafter import Text
from kvllm.worker.features.base import StepFeature, WorkerParts
from kvllm.worker.forward_pass import Place
from kvllm.worker.graph_sizes import GraphSizes
from kvllm.worker.last_logits import LastLogits
from kvllm.worker.step_batch import StepBatch
from kvllm.worker.transfer import to_device


class LastHidden(StepFeature):
    """Keeps what a pass has made of the last token of each sequence: `rows`, `[S, hidden_size]`."""

    reads_hidden = True
    rows: torch.Tensor

    @classmethod
    def make(cls, worker: WorkerParts) -> Self | None:
        return cls()

    def computed(self, batch: StepBatch, positions: np.ndarray, hidden: torch.Tensor) -> None:
        self.rows = hidden[to_device(batch.last_tokens, hidden.device)]  # the memory may be that of all passes


class MTPModel(DraftModel):
    """The first token of a draft follows from what the model has made of the text, the others from what the layer has
    made of the draft, which is computed again when the model has made something of it.

    The layer attends to tokens from the first one on whose hidden state is there: not to those of a cached prefix.
    """

    reads_hidden = True
    model: MTPDecoder

    def __init__(
        self, model: MTPDecoder, backend: AttentionBackend, config: EngineConfig, bytes_per_block: int, most: int
    ) -> None:
        self._last = LastHidden()
        super().__init__(model, backend, config, bytes_per_block, most, [self._last])
        sizes = GraphSizes.with_chunks(config.max_num_seqs, config.max_num_batched_tokens)
        num_tokens = max(config.max_num_seqs, sizes.most_chunk_tokens)
        # Graphs read hidden states where they are when these are captured.
        model.hidden = self._read_by_graphs = model.hidden.new_zeros(num_tokens, model.hidden.shape[1])

    def _num_right(self, text: Text, begin: int, drafted: list[int]) -> int:
        return 0

    def _pass(
        self, found: list[tuple[Text, CachedText]], tokens: list[list[int]], place: Place | None = None
    ) -> LastLogits:
        rows = []
        for (text, cached), each in zip(found, tokens, strict=True):
            assert text.hidden
            rows.append(cached.hidden if text.draft and cached.hidden is not None else text.hidden.take(len(each)))
        hidden, static = torch.cat(rows), self._read_by_graphs
        if len(hidden) <= len(static):
            static[: len(hidden)] = hidden
        else:
            self.model.hidden = hidden
        try:
            last = super()._pass(found, tokens, place)
        finally:
            self.model.hidden = static
        for (_, cached), row in zip(found, self._last.rows.split(1), strict=True):
            cached.hidden = row
        return last
