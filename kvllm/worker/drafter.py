"""What drafts, and the texts that it is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch

from kvllm.kvcache.cache import PagedKVCache
from kvllm.worker.sample_row import SampleRow
from kvllm.worker.state import SequenceState


class Drafter(Protocol):
    """A model that drafts. See DraftModel.

    reads_hidden: whether it needs the hidden states of texts. cache: its KV pool.
    """

    reads_hidden: ClassVar[bool]
    cache: PagedKVCache

    def reset(self) -> None:
        """Drop all sequences."""
        ...

    def drop(self, seq_ids: Iterable[int]) -> None:
        """Sequences end, or lose all that is cached of them. Others are ignored."""
        ...

    def draft(self, texts: Sequence[Text]) -> None:
        """Give texts their drafts."""
        ...


@dataclass
class Text:
    """A sequence, `count` tokens of which are to be drafted after its `token_ids` and `new` ones, of which all but the
    last one are computed.

    row: what its request asks for, with the output of all these; its output grows with the draft.
    hidden: what the model has made of the tokens, if the one that drafts reads that: the token after each, and not the
        first one of the text, is then what it reads at a position.
    """

    seq_id: int
    state: SequenceState
    new: list[int]
    row: SampleRow
    count: int
    hidden: HiddenStates | None = None
    draft: list[int] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return self.state.token_ids

    def __len__(self) -> int:
        return len(self.token_ids) + len(self.new) - (self.hidden is not None)

    def after(self, position: int) -> list[int]:
        """The tokens that are read from a position on."""
        begin = position + (self.hidden is not None)
        return self.token_ids[begin:] + self.new[max(0, begin - len(self.token_ids)) :]


class HiddenStates:
    """Those of the tokens at positions `begin` to `end` - 1.

    parts: `[n, hidden_size]` each.
    """

    def __init__(self, begin: int, parts: Sequence[torch.Tensor] = ()) -> None:
        self.begin = begin
        self.end = begin + sum(map(len, parts))
        self._parts = list(parts)

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin

    def put(self, position: int, rows: torch.Tensor) -> None:
        """Add those from a position on, in place of any there; without those before it, none of the others stay."""
        if not self.begin <= position <= self.end:
            self.begin = self.end = position
            self._parts = []
        while self.end > position:
            last = self._parts.pop()
            kept = last[: max(0, len(last) - (self.end - position))]
            self.end -= len(last) - len(kept)
            if len(kept):
                self._parts.append(kept)
        self._parts.append(rows)
        self.end += len(rows)

    def take(self, count: int) -> torch.Tensor:
        """The first ones, `[count, hidden_size]`, which are there no longer."""
        rows = torch.cat(self._parts)
        self._parts = [rows[count:]]
        self.begin += count
        return rows[:count]

    def fork(self) -> HiddenStates:
        return HiddenStates(self.begin, self._parts)
