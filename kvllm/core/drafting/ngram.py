"""Drafts from a request's own text (Saxena 2023, "Prompt lookup decoding"; method "ngram" of vLLM)."""

from __future__ import annotations

from kvllm.core.drafting.base import NO_DRAFT, Draft, Drafter
from kvllm.core.drafting.index import RunIndex
from kvllm.core.sequence import Sequence


class NgramDrafter(Drafter):
    """What came after the last tokens of a text when they stood in it before, the last time that as many did.

    least, most: how many tokens are looked for.
    """

    def __init__(self, least: int, most: int) -> None:
        self.least = least
        self.most = most
        self._indices: dict[int, RunIndex] = {}

    def propose(self, seq: Sequence, most: int) -> Draft:
        index = self._indices.get(seq.seq_id)
        if index is None:
            index = self._indices[seq.seq_id] = RunIndex(self.least)
        index.extend(seq.token_ids[len(index.token_ids) :])
        matched, place = index.longest(index.token_ids, self.most, is_own=True)
        return Draft(index.following(place, most), matched) if matched else NO_DRAFT

    def finish(self, seq: Sequence) -> None:
        self._indices.pop(seq.seq_id, None)
