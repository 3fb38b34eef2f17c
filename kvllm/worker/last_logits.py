"""The logits that a step samples from, one row for each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvllm.worker.transfer import to_device


class LastLogits(NamedTuple):
    """logits: `[S, V]`. chosen: int64 `[S]`, the most likely token of each row, if a rank that samples has looked for
    it already."""

    logits: torch.Tensor
    chosen: torch.Tensor | None = None

    def rows(self, rows: Sequence[int]) -> LastLogits:
        """Some rows, any of them as often as it is wanted."""
        if rows == range(len(rows)) or rows == list(range(len(rows))):
            return self._first(len(rows))
        index = to_device(rows, self.logits.device)
        return LastLogits(self.logits[index], None if self.chosen is None else self.chosen[index])

    def room_for(self, num_rows: int) -> LastLogits:
        """Memory for as many rows like these."""
        chosen = None if self.chosen is None else self.chosen.new_empty(num_rows)
        return LastLogits(self.logits.new_empty(num_rows, self.logits.shape[1]), chosen)

    def take(self, source: LastLogits) -> LastLogits:
        """Copy rows into this memory -> the first ones of it."""
        found = self._first(len(source.logits))
        found.logits.copy_(source.logits)
        if found.chosen is not None and source.chosen is not None:
            found.chosen.copy_(source.chosen)
        return found

    def _first(self, num_rows: int) -> LastLogits:
        return LastLogits(self.logits[:num_rows], None if self.chosen is None else self.chosen[:num_rows])
