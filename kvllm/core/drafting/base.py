"""The interface of what drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from kvllm.core.sequence import Sequence


class Draft(NamedTuple):
    """Tokens that may come next. matched: how many of the last tokens they came after elsewhere."""

    token_ids: list[int]
    matched: int


NO_DRAFT = Draft([], 0)


class Drafter(ABC):
    """Guesses the next tokens of texts. A guess may be anything: the model says which tokens of it are right.

    prior: how probable it is that a token is right, as long as nothing is known.
    """

    prior: ClassVar[float] = 0.5

    @abstractmethod
    def propose(self, seq: Sequence, most: int) -> Draft:
        """At most `most` tokens that may follow those of a sequence, none of which is PENDING. NO_DRAFT if it knows
        none."""

    @abstractmethod
    def finish(self, seq: Sequence) -> None:
        """A sequence ends, whatever the reason. Idempotent."""
