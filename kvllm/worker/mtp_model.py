"""Drafts of the layer that a checkpoint has for them, over a KV pool of its own."""

from __future__ import annotations

import torch

from kvllm.models.mtp import MTPDecoder
from kvllm.worker.draft_model import DraftModel, Held
from kvllm.worker.features.drafts import Text
from kvllm.worker.forward_pass import Place
from kvllm.worker.last_logits import LastLogits


class MTPModel(DraftModel):
    """The first token of a draft follows from what the model has made of the text, the others from what the layer has
    made of the draft, which is computed again when the model has made something of it.

    The layer attends to tokens from the first one on whose hidden state is there: not to those of a cached prefix.
    """

    reads_hidden = True
    captures = False  # what the layer reads is not among the inputs of a step
    model: MTPDecoder

    def _num_right(self, text: Text, begin: int, drafted: list[int]) -> int:
        return 0

    def _pass(self, found: list[tuple[Text, Held]], tokens: list[list[int]], place: Place | None = None) -> LastLogits:
        rows = []
        for (text, held), each in zip(found, tokens, strict=True):
            assert text.hidden
            rows.append(held.hidden if text.draft and held.hidden is not None else text.hidden.take(len(each)))
        self.model.hidden = torch.cat(rows)
        last = super()._pass(found, tokens, place)
        for (_, held), row in zip(found, self.model.hidden.unbind(0), strict=True):
            held.hidden = row.unsqueeze(0)
        return last
