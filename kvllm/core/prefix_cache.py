"""Chained content hashes of full, never compressed blocks; least recently used order of those without an owner."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Identity of a block: its tokens and, through `parent`, all tokens before them. 128 bits: equal means equal."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), key=parent, digest_size=16).digest()


def root_hash(cache_salt: str | None, kv_cache_dtype: str = "auto", adapter: str | None = None) -> bytes:
    """The `parent` of a sequence's first block: another one for each salt, dtype and adapter, so that nothing after it
    is equal. adapter: its digest."""
    root = b"" if cache_salt is None else hashlib.blake2b(cache_salt.encode(), digest_size=16).digest()
    if adapter is not None:
        root = hashlib.blake2b(adapter.encode(), key=root, person=b"adapter", digest_size=16).digest()
    if kv_cache_dtype == "auto":
        return root
    return hashlib.blake2b(kv_cache_dtype.encode(), key=root, digest_size=16).digest()


def part_hash(digest: bytes, part: int) -> bytes:
    """Identity of the block that a part of the KV groups has for the same tokens; `part` is its index."""
    return digest + part.to_bytes(2) if part else digest


class PrefixCache:
    """Which block holds which content. A block is idle when it is cached and no sequence owns it.

    most_idle: most idle blocks of a tenant, by its name; for tenants that are not named there is no limit. A block is
    of the tenant that computed it, whoever owned it last.
    """

    def __init__(self, most_idle: dict[str, int] | None = None) -> None:
        self._most_idle = most_idle or {}
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._tenant_of: dict[int, str] = {}  # of the blocks of tenants with a limit
        self._idle_of: dict[str, OrderedDict[int, None]] = {tenant: OrderedDict() for tenant in self._most_idle}

    def __contains__(self, block: int) -> bool:
        return block in self._hash_of

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def idle(self) -> Iterable[int]:
        """Blocks, the least recently used first."""
        return self._idle

    def idle_content(self) -> list[tuple[bytes, int]]:
        """What idle blocks hold, and these, the least recently used first."""
        return [(self._hash_of[block], block) for block in self._idle]

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known prefix."""
        blocks = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find(self, digest: bytes) -> int | None:
        """The block with this content, if there is one."""
        return self._block_of.get(digest)

    def insert(self, digest: bytes, block: int, tenant: str = "") -> None:
        """Offer a full block of a tenant to later sequences; the first block with this content stays."""
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest
            if tenant in self._most_idle:
                self._tenant_of[block] = tenant

    def remove(self, block: int) -> None:
        """The block's content is about to change, or stops being a prefix of anything."""
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
            self.set_owned(block)
            self._tenant_of.pop(block, None)

    def set_idle(self, block: int) -> int | None:
        """The last owner let go; the block is now the most recently used. Returns the block that is removed for it, if
        its tenant has too many that are idle: the least recently used of them."""
        self._idle[block] = None
        tenant = self._tenant_of.get(block)
        if tenant is None:
            return None
        idle = self._idle_of[tenant]
        idle[block] = None
        if len(idle) <= self._most_idle[tenant]:
            return None
        removed = next(iter(idle))
        self.remove(removed)
        return removed

    def set_owned(self, block: int) -> None:
        self._idle.pop(block, None)
        if block in self._tenant_of:
            self._idle_of[self._tenant_of[block]].pop(block, None)

    def clear(self) -> list[int]:
        """Forget all contents. Returns the blocks that were idle."""
        idle = list(self._idle)
        self._block_of.clear()
        self._hash_of.clear()
        self._idle.clear()
        self._tenant_of.clear()
        for idle_of_tenant in self._idle_of.values():
            idle_of_tenant.clear()
        return idle

    def evict(self) -> tuple[bytes, int]:
        """Take the least recently used idle block. Returns what it holds, too."""
        block = next(iter(self._idle))
        digest = self._hash_of[block]
        self.remove(block)
        return digest, block
