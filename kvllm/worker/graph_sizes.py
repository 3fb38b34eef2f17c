"""The sizes of steps that are recorded: few, so that a step is filled up to the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

LEAST_CHUNK_TOKENS = 512
"""Tokens of a step with chunks that is always recorded, if a step may have so many. Larger ones keep a device busy for
longer than the host needs to launch them."""


class GraphSize(NamedTuple):
    num_query_tokens: int
    num_seqs: int


@dataclass(frozen=True)
class GraphSizes:
    """max_num_seqs: of a step. most_chunk_tokens: of a recorded step in which a sequence has several query tokens: a
    chunk of its prompt, or a draft; 0: none is recorded. logits_per_seq: of a sequence, more than one with a draft.

    A step with chunks has room for one sequence more, which has all tokens that fill it up.
    """

    max_num_seqs: int
    most_chunk_tokens: int = 0
    logits_per_seq: int = 1

    @classmethod
    def with_chunks(cls, max_num_seqs: int, max_num_batched_tokens: int, logits_per_seq: int = 1) -> GraphSizes:
        """Sizes for decodes, and for steps with chunks beside as many decodes as there may be."""
        most_tokens = min(max_num_batched_tokens, max(LEAST_CHUNK_TOKENS, 2 * max_num_seqs))
        return cls(max_num_seqs, most_tokens, logits_per_seq)

    def of(self, num_tokens: Sequence[int]) -> GraphSize | None:
        """The least size for a step with so many query tokens of each sequence; None: it is not recorded."""
        total = sum(num_tokens)
        if total == len(num_tokens):
            size = self.of_decodes(total)
            return GraphSize(size, size)
        return self._of_chunks(total) if total <= self.most_chunk_tokens else None

    def of_decodes(self, num_seqs: int) -> int:
        """The least batch size for so many sequences. Of many, an eighth at most is padding."""
        bits = (num_seqs - 1).bit_length()
        size = 1 << bits if num_seqs <= 8 else _rounded_up(num_seqs, max(16, 1 << (bits - 4)))
        return min(size, self.max_num_seqs)

    def _of_chunks(self, num_tokens: int) -> GraphSize:
        """Fewer sizes than those of decodes: below some hundred tokens a step takes the time that weights are read."""
        bits = (num_tokens - 1).bit_length()
        size = max(16, 1 << bits) if num_tokens <= 64 else _rounded_up(num_tokens, max(64, 1 << (bits - 3)))
        size = min(size, self.most_chunk_tokens)
        return GraphSize(size, min(size - 1, self.max_num_seqs + 1))

    def num_logits(self, size: GraphSize) -> int:
        """Most query tokens that have logits in a step of a size."""
        return min(size.num_query_tokens, self.max_num_seqs * self.logits_per_seq)

    def all(self) -> list[GraphSize]:
        """Every size, the largest first, which takes most memory."""
        decodes = {self.of_decodes(number) for number in range(1, self.max_num_seqs + 1)}
        chunks = {self._of_chunks(number) for number in range(2, self.most_chunk_tokens + 1)}
        return sorted({GraphSize(size, size) for size in decodes} | chunks, reverse=True)


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step
