"""The logits that a step samples from, one row for each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvllm.worker.transfer import to_device


class LastLogits(NamedTuple):
    """logits: `[S, V]`. chosen: int64 `[S]`, the most likely token of each row, if a rank that samples has looked for
    it already. hidden: of a recorded pass, the states `[T, hidden_size]` of all query tokens, if a feature reads them.
    """

    logits: torch.Tensor
    chosen: torch.Tensor | None = None
    hidden: torch.Tensor | None = None

    def rows(self, rows: Sequence[int]) -> LastLogits:
        """Some rows, any of them as often as it is wanted."""
        if rows == range(len(rows)) or rows == list(range(len(rows))):
            return self._first(len(rows))
        index = to_device(rows, self.logits.device)
        return LastLogits(self.logits[index], None if self.chosen is None else self.chosen[index])

    def split(self, num_rows: int) -> tuple[LastLogits, LastLogits]:
        """The first rows, and the others."""
        others = None if self.chosen is None else self.chosen[num_rows:]
        return self._first(num_rows), LastLogits(self.logits[num_rows:], others)

    def room_for(self, num_rows: int, num_tokens: int) -> LastLogits:
        """Memory for as many rows, and hidden states, like these."""
        chosen = None if self.chosen is None else self.chosen.new_empty(num_rows)
        hidden = None if self.hidden is None else self.hidden.new_empty(num_tokens, self.hidden.shape[1])
        return LastLogits(self.logits.new_empty(num_rows, self.logits.shape[1]), chosen, hidden)

    def take(self, source: LastLogits) -> LastLogits:
        """Copy all but the logits, which are here already, into this memory -> the first rows of it."""
        num_tokens = 0 if source.hidden is None else len(source.hidden)
        found = self._first(len(source.logits), num_tokens)
        for into, given in ((found.chosen, source.chosen), (found.hidden, source.hidden)):
            if into is not None and given is not None:
                into.copy_(given)
        return found

    def _first(self, num_rows: int, num_tokens: int = 0) -> LastLogits:
        chosen = None if self.chosen is None else self.chosen[:num_rows]
        return LastLogits(self.logits[:num_rows], chosen, None if self.hidden is None else self.hidden[:num_tokens])
