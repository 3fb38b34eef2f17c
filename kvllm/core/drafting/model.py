"""Drafts of a smaller model, which workers run after the pass of a step that orders them."""

from __future__ import annotations

from typing import ClassVar

from kvllm.core.drafting.base import NO_DRAFT, Draft, Drafter
from kvllm.core.sequence import Sequence


class ModelDrafter(Drafter):
    """Keeps what the last step has drafted for each sequence, until that has another token."""

    prior: ClassVar[float] = 0.75

    def __init__(self) -> None:
        self._drafts: dict[int, tuple[int, list[int]]] = {}

    def take(self, seq: Sequence, token_ids: list[int]) -> None:
        """A draft of what follows the tokens that a sequence has now."""
        if token_ids:
            self._drafts[seq.seq_id] = seq.num_tokens, token_ids

    def num_read(self, seq: Sequence) -> int:
        """Tokens of a sequence that the draft model has computed for its last draft."""
        return self._drafts.get(seq.seq_id, (0, []))[0]

    def propose(self, seq: Sequence, most: int) -> Draft:
        num_tokens, token_ids = self._drafts.get(seq.seq_id, (0, []))
        return Draft(token_ids[:most], 0) if num_tokens == seq.num_tokens else NO_DRAFT

    def finish(self, seq: Sequence) -> None:
        self._drafts.pop(seq.seq_id, None)
