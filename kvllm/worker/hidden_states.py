"""Hidden states of a text that somebody has yet to read."""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
