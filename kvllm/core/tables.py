"""The block table of a sequence in one part of a KV group: it grows at its end, and loses what is dropped."""

from __future__ import annotations

import sys

from msgspec import Struct

from kvllm.core.block_pool import BlockPool
from kvllm.kvcache.groups import KVGroup


class TableStart(Struct, array_like=True, frozen=True):
    """What a table begins with.

    dropped: see BlockTable. blocks: ids, in the pool or on the host.
    """

    dropped: int
    blocks: list[int]


class BlockTable:
    """Blocks of one sequence in one part of a KV group, and its references to them.

    dropped: KV pairs of the text that it does not hold: those after the window of its layers, in whole blocks, or those
        that compressions have dropped. Any token after these has its KV pair at its position less `dropped`.
    blocks: ids, in order.
    """

    __slots__ = ("block_size", "blocks", "dropped", "group", "pool")

    def __init__(self, pool: BlockPool, block_size: int, group: KVGroup, dropped: int = 0) -> None:
        self.pool = pool
        self.block_size = block_size
        self.group = group
        self.dropped = dropped
        self.blocks: list[int] = []

    @property
    def is_full(self) -> bool:
        """Whether its layers attend all tokens."""
        return self.group.window is None

    @property
    def end(self) -> int:
        """Tokens of the text for which there is room."""
        return self.dropped + len(self.blocks) * self.block_size

    @property
    def slides_at(self) -> int:
        """The length of a text whose next token does not attend the first block."""
        window = self.group.window
        return sys.maxsize if window is None else self.dropped + self.block_size + window - 1

    # Growth

    def growth(self, end: int) -> int:
        """Blocks that it adds in all until the text has `end` tokens, if these come one by one and nothing is
        compressed."""
        if self.group.window is None:
            return self.num_missing(end)
        most = self.group.most_blocks(end, self.block_size, 1) // len(self.group.parts)
        return max(0, most - len(self.blocks))

    def num_missing(self, end: int) -> int:
        """Blocks to append until there is room for `end` tokens of the text."""
        missing = -(-(end - self.dropped) // self.block_size) - len(self.blocks)
        return missing if missing > 0 else 0

    def blocks_to_append(self, length: int, end: int) -> int:
        """Blocks that `append` will allocate."""
        return self.num_missing(end) + self._writes_shared(length)

    def append(self, length: int, end: int) -> tuple[list[int], int | None]:
        """Make room for the tokens of the text after the first `length`, up to `end` of them.

        Returns the blocks appended, and the index of a block that was replaced because it is shared and is about to be
        written (copy on write), if any.
        """
        replaced = None
        if self._writes_shared(length):
            replaced = (length - self.dropped) // self.block_size
            shared = self.blocks[replaced]
            self.blocks[replaced] = self.pool.allocate(1)[0]
            self.pool.release([shared])
        new_blocks = self.pool.allocate(self.num_missing(end))
        self.blocks += new_blocks
        return new_blocks, replaced

    def _writes_shared(self, length: int) -> bool:
        index, offset = divmod(length - self.dropped, self.block_size)
        return offset > 0 and self.pool.is_shared(self.blocks[index])

    # Shrinking

    def slide(self, length: int) -> None:
        """Let go of the blocks after the window of the next token, which is at position `length`."""
        if length >= self.slides_at:
            count = self.group.first_block(length, self.block_size) - self.dropped // self.block_size
            self.pool.release(self.blocks[:count])
            del self.blocks[:count]
            self.dropped += count * self.block_size

    def blocks_to_compact(self, first: int, count: int, keep: int) -> int:
        """Blocks that `compact` must allocate before it can release any: none in place, `keep` if one is shared."""
        return keep if any(map(self.pool.is_shared, self.blocks[first : first + count])) else 0

    def compact(self, first: int, count: int, keep: int, dropped: int) -> list[int]:
        """Replace blocks `first .. first + count` by the `keep` blocks that will hold what stays of their KV pairs, of
        which `dropped` go.

        In place when every block of the region is exclusively owned: their hashes are dropped, the first `keep` stay.
        Otherwise the survivors go to fresh blocks and the sources are let go untouched; so they are if none survives.
        Returns the destinations.
        """
        region = self.blocks[first : first + count]
        if not keep or self.blocks_to_compact(first, count, keep):
            destinations = self.pool.allocate(keep)
            self.pool.release(region)
        else:
            destinations = region[:keep]
            self.pool.forget(region)
            self.pool.release(region[keep:])
        self.blocks[first : first + count] = destinations
        self.dropped += dropped
        return destinations

    def release(self) -> None:
        """Let go of all blocks."""
        self.pool.release(self.blocks)
        self.blocks = []

    # Sharing

    def share(self, blocks: list[int]) -> None:
        """Begin with cached blocks, or those of another table."""
        self.pool.own(blocks)
        self.blocks = blocks[:]

    def fork(self) -> BlockTable:
        """A table that shares all blocks."""
        table = BlockTable(self.pool, self.block_size, self.group, self.dropped)
        table.share(self.blocks)
        return table

    # Integrity

    def check(self, length: int) -> None:
        """Raise RuntimeError unless it holds what the next token, at position `length`, attends, and no block after
        its window."""
        if len(set(self.blocks)) != len(self.blocks):
            raise RuntimeError(f"a block table names a block twice: {self.blocks}")
        if self.num_missing(length):
            raise RuntimeError(f"{len(self.blocks)} blocks cannot hold {length - self.dropped} KV pairs")
        if not self.is_full and self.dropped != self.group.first_block(length, self.block_size) * self.block_size:
            raise RuntimeError("a window is not what the next token attends")
