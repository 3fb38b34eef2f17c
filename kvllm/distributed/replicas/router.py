"""Which of several engines a request goes to: to the one that has its prefix, else to the one with most free blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvllm.core.prefix_cache import block_hash

FULLER = 0.25
"""An engine is clearly fuller than another with so much more in use, as a share, and besides"""
HIT_WEIGHT = 4
"""so many times the blocks that are found there already."""
SEQUENCES_AHEAD = 2
"""An engine is given this many times the sequences that it runs at once, so that it never waits for the next."""


def needed_blocks(num_tokens: int, num_sequences: int, block_size: int) -> int:
    """What a request is expected to take at first: its tokens, and a block that each of its sequences writes."""
    return num_tokens // block_size + num_sequences


class Router:
    """Keeps account of engines that may do the same requests.

    num_blocks: of the pool of each.
    room: for each engine, the blocks that were free at its last report less those promised since. It falls below zero
        when sequences are preempted. An engine without room gets nothing, so those that are done sooner get more.
    """

    def __init__(self, num_blocks: Sequence[int], *, block_size: int, max_num_seqs: int, shares_prefixes: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_sequences = SEQUENCES_AHEAD * max_num_seqs
        self.shares_prefixes = shares_prefixes
        self.room = list(num_blocks)
        self.sequences = [0] * len(num_blocks)
        self._engine_of: OrderedDict[bytes, int] = OrderedDict()  # by the hash of a block, oldest first

    def place(self, token_ids: Sequence[int], num_sequences: int) -> int | None:
        """Choose the engine for a request, and promise it the blocks. None: no engine has room now.

        token_ids: all that are known. num_sequences: completions that branch off from these.
        """
        engines = [i for i, room in enumerate(self.room) if room > 0 and self.sequences[i] < self.max_sequences]
        if not engines:
            return None
        chosen = max(engines, key=lambda i: (self.room[i], -self.sequences[i]))
        hashes = self._hashes(token_ids)
        home, hits = self._find(hashes)
        if home in engines and not self._clearly_fuller(home, chosen, hits):
            chosen = home
        self._remember(hashes, chosen)
        self.promise(chosen, len(token_ids), num_sequences)
        self.sequences[chosen] += num_sequences
        return chosen

    def promise(self, engine: int, num_tokens: int, num_sequences: int) -> None:
        """A request goes to an engine that does not know of it yet."""
        self.room[engine] -= needed_blocks(num_tokens, num_sequences, self.block_size)

    def report(self, engine: int, room: int) -> None:
        """An engine says how many blocks are free, beside those for what waits there."""
        self.room[engine] = room

    def finish(self, engine: int, num_sequences: int) -> None:
        """Sequences of an engine have ended."""
        self.sequences[engine] -= num_sequences

    def lose(self, engine: int) -> None:
        """All that an engine had is lost. It gets nothing until it reports."""
        self.room[engine] = self.sequences[engine] = 0
        self._engine_of = OrderedDict((digest, i) for digest, i in self._engine_of.items() if i != engine)

    def _clearly_fuller(self, engine: int, other: int, hits: int) -> bool:
        used, used_by_other = (self.num_blocks[i] - self.room[i] for i in (engine, other))
        return used > used_by_other * (1 + FULLER) + HIT_WEIGHT * hits

    def _hashes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Of the full blocks."""
        hashes: list[bytes] = []
        if self.shares_prefixes:
            size = self.block_size
            for end in range(size, len(token_ids) + 1, size):
                hashes.append(block_hash(hashes[-1] if hashes else b"", token_ids[end - size : end]))
        return hashes

    def _find(self, hashes: list[bytes]) -> tuple[int | None, int]:
        """Where the longest known prefix went last, and its length in blocks."""
        for index in range(len(hashes) - 1, -1, -1):
            if hashes[index] in self._engine_of:
                return self._engine_of[hashes[index]], index + 1
        return None, 0

    def _remember(self, hashes: list[bytes], engine: int) -> None:
        for digest in reversed(hashes):  # the end of a prefix is forgotten first
            self._engine_of[digest] = engine
            self._engine_of.move_to_end(digest)
        while len(self._engine_of) > sum(self.num_blocks):
            self._engine_of.popitem(last=False)
