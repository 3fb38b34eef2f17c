"""Drafts that are looked up: in a request's own text, and in earlier outputs."""

from __future__ import annotations

from kvllm.core.drafting.base import NO_DRAFT, Draft, Drafter
from kvllm.core.drafting.index import RunIndex
from kvllm.core.sequence import ExtraKeys, Sequence

SHORTEST = 3
"""Last tokens that have to stand elsewhere."""
LONGEST = 64
"""Last tokens that are compared."""
MOST_TOKENS = 1 << 16
"""Of outputs of one cache salt: twice as many are remembered, then the older half is forgotten."""
MOST_SALTS = 64


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


class SuffixDrafter(Drafter):
    """What came after as many of a text's last tokens as stand anywhere: in this text, or in the output of an earlier
    request (after Oliaro et al. 2024, "SuffixDecoding", arXiv 2411.04975; a bounded hash chain in place of their suffix
    trees). Requests see outputs of an equal cache salt and adapter alone, as they see cached prefixes: how fast a text
    comes would tell what others hold."""

    def __init__(self) -> None:
        self._own: dict[int, RunIndex] = {}
        self._outputs: dict[ExtraKeys, list[RunIndex]] = {}  # of each the last two, by their last use

    def propose(self, seq: Sequence, most: int) -> Draft:
        own = self._own.get(seq.seq_id)
        if own is None:
            own = self._own[seq.seq_id] = RunIndex(SHORTEST)
        own.extend(seq.token_ids[len(own.token_ids) :])
        best, found = NO_DRAFT, [own, *reversed(self._outputs.get(seq.extra_keys, ()))]
        for index in found:
            matched, place = index.longest(own.token_ids, LONGEST, is_own=index is own)
            if matched > best.matched and (token_ids := index.following(place, most)):
                best = Draft(token_ids, matched)
        return best

    def finish(self, seq: Sequence) -> None:
        own = self._own.pop(seq.seq_id, None)
        if own is None or not seq.num_generated:
            return
        outputs = self._outputs.pop(seq.extra_keys, None) or [RunIndex(SHORTEST)]
        self._outputs[seq.extra_keys] = outputs  # the last one that is forgotten
        if len(outputs[-1].token_ids) > MOST_TOKENS:
            outputs[:] = [outputs[-1], RunIndex(SHORTEST)]
        outputs[-1].extend(own.token_ids[seq.prompt_length :])
        if len(self._outputs) > MOST_SALTS:
            del self._outputs[next(iter(self._outputs))]
