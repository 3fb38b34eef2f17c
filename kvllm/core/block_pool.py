"""The pool of KV blocks. Every block is free, cached (idle in the prefix cache) or owned."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvllm.core.prefix_cache import PrefixCache
from kvllm.errors import OutOfBlocksError


class BlockPool:
    """Allocates and releases blocks. Pure accounting: the data is moved by the workers.

    most_idle: most idle cached blocks of a tenant, by its name; others have no limit.
    prefix_cache: None if sequences share no prefixes.
    keeps_evicted: whether `take_evicted` tells what was evicted.
    references: how many table entries name each block.
    """

    def __init__(self, num_blocks: int, enable_prefix_caching: bool, most_idle: dict[str, int] | None) -> None:
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self.most_idle = most_idle
        self.keeps_evicted = False
        self.clear()

    def clear(self) -> None:
        """Make all blocks free: their content is lost. No sequence may own one."""
        self.prefix_cache = PrefixCache(self.most_idle) if self.enable_prefix_caching else None
        self.references = [0] * self.num_blocks
        self._free = deque(range(self.num_blocks))
        self._evicted: list[tuple[bytes, int]] = []

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now: free ones and idle cached ones."""
        return len(self._free) + (self.prefix_cache.num_idle if self.prefix_cache else 0)

    def is_shared(self, block: int) -> bool:
        return self.references[block] > 1

    def allocate(self, count: int) -> list[int]:
        """Take blocks, idle ones where none is free. Raises OutOfBlocksError if there are too few."""
        if count > self.num_available:
            raise OutOfBlocksError(f"{count} blocks were asked for, {self.num_available} of {self.num_blocks} are free")
        blocks = []
        for _ in range(count):
            block = self._free.popleft() if self._free or self.prefix_cache is None else self._evict(self.prefix_cache)
            self.references[block] = 1
            blocks.append(block)
        return blocks

    def _evict(self, cache: PrefixCache) -> int:
        digest, block = cache.evict()
        if self.keeps_evicted:
            self._evicted.append((digest, block))
        return block

    def take_evicted(self) -> list[tuple[bytes, int]]:
        """Content and block of each cached block that was evicted since the last call, in order. No step has written to
        it since."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def own(self, blocks: Iterable[int]) -> None:
        """Count one more table entry for each of some cached or owned blocks."""
        for block in blocks:
            self.references[block] += 1
            if self.prefix_cache:
                self.prefix_cache.set_owned(block)

    def release(self, blocks: list[int]) -> None:
        """Count one table entry less for each of some blocks."""
        # Last block first: a prefix is only worth keeping as long as what precedes it, so its end is evicted first.
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block]:
                continue
            if self.prefix_cache and block in self.prefix_cache:
                block = self.prefix_cache.set_idle(block)
            if block is not None:
                self._free.append(block)

    def forget(self, blocks: Iterable[int]) -> None:
        """The content of some owned blocks is about to change."""
        if self.prefix_cache:
            for block in blocks:
                self.prefix_cache.remove(block)

    def renew(self, digest: bytes, block: int, tenant: str) -> None:
        """Offer an owned block to later sequences in place of an idle one with the same content, which becomes free: it
        would be evicted first."""
        cache = self.prefix_cache
        if cache is None:
            return
        old = cache.find(digest)
        if old is not None and cache.is_idle(old):
            cache.remove(old)
            self._free.append(old)
        cache.insert(digest, block, tenant)

    def forget_prefixes(self) -> None:
        """Let later sequences find nothing of what is cached so far. Owners keep their blocks."""
        if self.prefix_cache is not None:
            self._free.extend(self.prefix_cache.clear())

    def check(self, owned: list[int]) -> None:
        """Raise RuntimeError unless every block is free, cached or owned, and owned as often as tables name it.

        owned: the blocks of all tables.
        """
        named = [0] * self.num_blocks
        for block in owned:
            named[block] += 1
        if named != self.references:
            raise RuntimeError("a block's reference count is not the number of block table entries that name it")
        idle = self.prefix_cache.idle if self.prefix_cache else ()
        uses = [*self._free, *idle, *set(owned)]
        if len(uses) != self.num_blocks or len(set(uses)) != self.num_blocks:
            wrong = [block for block in range(self.num_blocks) if uses.count(block) != 1]
            raise RuntimeError(f"blocks must be exactly one of free, cached and owned, which these are not: {wrong}")
