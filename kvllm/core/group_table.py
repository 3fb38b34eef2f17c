"""The block table of a sequence in a KV group beside the first: it begins after what was dropped."""

from __future__ import annotations

from kvllm.kvcache.groups import KVGroup


class GroupTable:
    """Blocks of one sequence in one group.

    first: how many blocks it has less than the text. Of a group with a window these are the blocks after it, which are
        released; else those that compressions have saved. So after what is dropped, block i of the text is the
        table's block `i - first`.
    blocks: for each block of the table one for each part of the group, next to each other.
    parts: indices of these parts among those of all groups.
    sent: `first` as the workers have it.
    """

    __slots__ = ("block_size", "blocks", "first", "group", "parts", "sent")

    def __init__(self, group: KVGroup, parts: range, block_size: int, length: int, blocks: list[int]) -> None:
        """The table of a text of `length` tokens, of which the next token attends `blocks`."""
        self.group = group
        self.block_size = block_size
        self.parts = parts
        self.first = group.first_block(length, block_size)
        self.sent = 0
        self.blocks = blocks

    @property
    def is_full(self) -> bool:
        """Whether its layers attend all tokens."""
        return self.group.window is None

    def num_missing(self, end: int) -> int:
        """Blocks to append until there is room for `end` tokens of the text."""
        missing = -(-end // self.block_size) - self.first - len(self.blocks) // len(self.parts)
        return missing * len(self.parts) if missing > 0 else 0

    def at(self, position: int) -> slice:
        """Where in `blocks` those are that hold a token after what is dropped."""
        index = (position // self.block_size - self.first) * len(self.parts)
        return slice(index, index + len(self.parts))

    def of_block(self, index: int) -> list[int]:
        """The blocks that hold block `index` of the text."""
        return self.blocks[self.at(index * self.block_size)]

    def take_behind(self, length: int) -> list[int]:
        """Remove the blocks after the window of the next token, which is at position `length`, from a table that is
        not full."""
        first = self.group.first_block(length, self.block_size)
        if first == self.first:
            return []
        count = (first - self.first) * len(self.parts)
        behind, self.blocks = self.blocks[:count], self.blocks[count:]
        self.first = first
        return behind

    def fork(self) -> GroupTable:
        """A copy, for a sequence that shares the blocks."""
        copy = GroupTable(self.group, self.parts, self.block_size, 0, self.blocks[:])
        copy.first, copy.sent = self.first, self.sent
        return copy
