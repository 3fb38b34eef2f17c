"""Copies of recurrent states at the ends of blocks, from which later sequences with the same beginning go on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Sequences

from kvllm.core.protocol import StateCopy
from kvllm.core.sequence import Sequence

DISTANCE = 256
"""Tokens from a snapshot to the next while a sequence decodes, or a block, if that is longer."""


class StateSnapshots:
    """Which row of the workers holds the state after which prefix. The least recently used one makes way.

    A state is copied right before the step after the one that computed it, so the row may be read in that step already.
    Only the ends of blocks have a name, the block's hash: chunks of prefills therefore end there (`chunk`), and
    sequences that decode come by every DISTANCE tokens.
    """

    def __init__(self, num_rows: int, block_size: int) -> None:
        self.block_size = block_size
        self._distance = max(1, DISTANCE // block_size) * block_size
        self._row_of: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(num_rows))
        self._due: list[StateCopy] = []

    def chunk(self, seq: Sequence, num_tokens: int) -> int:
        """`num_tokens` query tokens of a prefill, or as many less that the chunk ends with a block."""
        begin, end = seq.logical_length, seq.logical_length + num_tokens
        if end == seq.num_tokens:
            end -= 1  # which is always computed, so no later sequence could begin after it
        end = end // self.block_size * self.block_size
        return end - begin if end > begin else num_tokens

    def most_drafts(self, seq: Sequence) -> int:
        """How many drafted tokens leave the end of a block alone at which a sequence that decodes comes by."""
        return self._distance - seq.logical_length % self._distance - 1

    def longest(self, hashes: Sequences[bytes], count: int) -> int:
        """The most blocks, up to `count`, after which a state is known."""
        return next((known for known in range(count, 0, -1) if hashes[known - 1] in self._row_of), 0)

    def row(self, digest: bytes) -> int:
        """Where the state after a block is that `longest` has found."""
        self._row_of.move_to_end(digest)
        return self._row_of[digest]

    def computed(self, seq: Sequence, *, prefilled: bool) -> None:
        """A sequence has its tokens in the cache: take a snapshot if it is at the end of a block."""
        step = self.block_size if prefilled else self._distance
        if seq.was_compacted or not seq.logical_length or seq.logical_length % step:
            return
        digest = seq.block_hashes[seq.logical_length // self.block_size - 1]
        if digest in self._row_of:
            self._row_of.move_to_end(digest)
            return
        row = self._free.pop() if self._free else self._row_of.popitem(last=False)[1]
        self._row_of[digest] = row
        self._due.append(StateCopy(seq.seq_id, row))

    def take_due(self) -> list[StateCopy]:
        """The copies that the next plan makes."""
        due, self._due = self._due, []
        return due

    def forget(self) -> None:
        """Let later sequences find nothing."""
        self._free += self._row_of.values()
        self._row_of.clear()
        self._due = []
