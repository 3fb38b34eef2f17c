"""Which chunks of host memory hold the KV pairs that a sequence has dropped. Accounting alone, free of torch.

A chunk has room for `CHUNK` pairs in every layer and KV head, and belongs to one sequence. All layers and heads of a
sequence drop equally many pairs, so its chunks are filled alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

CHUNK = 16
POSITION_BYTES = ERROR_BYTES = 4
"""Of a pair beside its key and value."""


class ChunkPool:
    """Chunks by their ids, of which each is free or belongs to a sequence."""

    def __init__(self, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        self._free = list(reversed(range(num_chunks)))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Ids of so many chunks; `num_free` says how many there are."""
        return [self._free.pop() for _ in range(count)]

    def release(self, chunks: Sequence[int]) -> None:
        self._free.extend(chunks)


@dataclass(slots=True)
class HeldPairs:
    """What is held of a sequence.

    chunks: ids. count: pairs in them, in each layer and KV head.
    is_complete: whether all that was dropped found room there.
    """

    chunks: list[int] = field(default_factory=list)
    count: int = 0
    is_complete: bool = True

    def add(self, count: int, pool: ChunkPool) -> bool:
        """Take room for more pairs, after those that are there. False if there is none: these are lost."""
        missing = -(-(self.count + count) // CHUNK) - len(self.chunks)
        if missing > pool.num_free:
            self.is_complete = False
            return False
        self.chunks += pool.allocate(missing)
        self.count += count
        return True
