"""Where a text repeats what stands in it, or in another one."""

from __future__ import annotations

from collections.abc import Sequence

MOST_PLACES = 8
"""Occurrences of a run of tokens that are remembered, the last ones."""


class RunIndex:
    """A text, and where each run of `length` tokens in it ends: a hash chain, as compressors find repetitions with.

    Memory is some 200 bytes a token.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.token_ids: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the text."""
        length = self.length
        for token_id in token_ids:
            self.token_ids.append(token_id)
            end = len(self.token_ids)
            if end >= length:
                ends = self._ends.setdefault(tuple(self.token_ids[end - length :]), [])
                ends.append(end)
                if len(ends) > MOST_PLACES:
                    del ends[0]

    def longest(self, token_ids: Sequence[int], most: int, *, is_own: bool) -> tuple[int, int]:
        """Where the last tokens of `token_ids` stand in the text, as many of them as do, up to `most`; the last place
        of those that are equally long.

        is_own: whether it is this text, whose end is not looked for.
        Returns how many tokens are equal, at least `length` of them, and the index of the token after them; (0, 0) if
        there is no such place.
        """
        best = (0, 0)
        end = len(token_ids)
        for place in reversed(self._ends.get(tuple(token_ids[end - self.length :]), ())):
            if is_own and place == end:
                continue
            equal = self.length
            while equal < most and equal < place and equal < end:
                if self.token_ids[place - equal - 1] != token_ids[end - equal - 1]:
                    break
                equal += 1
            if equal > best[0]:
                best = (equal, place)
            if equal >= most:
                break
        return best

    def following(self, place: int, most: int) -> list[int]:
        """At most `most` tokens of the text from index `place` on. If it ends before, it goes on as since there: it may
        be about to repeat that once more."""
        found = self.token_ids[place : place + most]
        if not found:
            return found
        return [found[i % len(found)] for i in range(most)]
