"""Which blocks in host memory are free, which belong to suspended sequences, and which hold prefixes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class HostBlocks:
    """Pure accounting, as BlockPool for the blocks of the pool: the data is moved by the workers.

    Blocks of prefixes are the first to make room, the least recently used before others. Those that a load of the same
    plan reads stay, because a plan's stores come before its loads.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))
        self._prefixes: OrderedDict[bytes, int] = OrderedDict()
        self._read = set[int]()

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def begin_plan(self) -> None:
        """A new plan. What the one before reads may be stored over."""
        self._read.clear()

    def read(self, blocks: Iterable[int]) -> None:
        """The plan has a load of these blocks."""
        self._read.update(blocks)

    def allocate(self, count: int) -> list[int] | None:
        """Take blocks, or none at all if there are too few."""
        while len(self._free) < count and self._evict():
            pass
        if len(self._free) < count:
            return None
        return [self._free.pop() for _ in range(count)]

    def release(self, blocks: Iterable[int]) -> None:
        self._free.extend(blocks)

    # Prefixes

    def find(self, digest: bytes) -> int | None:
        """The block that holds a prefix block, if there is one. It is the most recently used now."""
        block = self._prefixes.get(digest)
        if block is not None:
            self._prefixes.move_to_end(digest)
        return block

    def insert(self, digest: bytes) -> int | None:
        """The block that is to hold a prefix block; None if that is there already, or nothing makes room for it."""
        if digest in self._prefixes:
            self._prefixes.move_to_end(digest)
            return None
        blocks = self.allocate(1)
        if blocks is None:
            return None
        self._prefixes[digest] = blocks[0]
        return blocks[0]

    def remove(self, blocks: Iterable[int]) -> None:
        """Forget the prefixes that these blocks were to hold, if there are such blocks."""
        gone = set(blocks)
        for digest in [digest for digest, block in self._prefixes.items() if block in gone]:
            self._free.append(self._prefixes.pop(digest))

    def forget_prefixes(self) -> None:
        self._free.extend(self._prefixes.values())
        self._prefixes.clear()

    def _evict(self) -> bool:
        """Free the block of the least recently used prefix that no load of the plan reads."""
        for digest, block in self._prefixes.items():
            if block not in self._read:
                del self._prefixes[digest]
                self._free.append(block)
                return True
        return False

    def check(self, suspended: Iterable[int]) -> None:
        """Raise RuntimeError unless every block is free, holds a prefix, or belongs to one of the suspended."""
        uses = [*self._free, *self._prefixes.values(), *suspended]
        if len(uses) != self.num_blocks or len(set(uses)) != self.num_blocks:
            raise RuntimeError("a host block must be exactly one of free, a prefix's, and a suspended sequence's")


class DiskPrefixes:
    """Digests of the blocks that an engine may load from the disk.

    It outlives failed steps, after which workers tell again what is there: what was forgotten stays so.
    """

    def __init__(self) -> None:
        self._known = set[bytes]()
        self._written = set[bytes]()  # since the others were forgotten
        self._forgets_others = False

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._known

    def reported(self, digests: Iterable[bytes]) -> None:
        """Workers have found these."""
        self._known.update(self._written.intersection(digests) if self._forgets_others else digests)

    def written(self, digests: Iterable[bytes]) -> None:
        """A plan lets workers write these."""
        digests = list(digests)
        self._known.update(digests)
        if self._forgets_others:
            self._written.update(digests)

    def lost(self, digests: Iterable[bytes]) -> None:
        """These are not there any more."""
        self._known.difference_update(digests)

    def restart(self) -> None:
        """Nothing is known until workers report it."""
        self._known.clear()

    def forget(self) -> None:
        """Find nothing that is there now, whoever wrote it."""
        self._known.clear()
        self._written.clear()
        self._forgets_others = True
