"""The owner of each block. Every block is free, cached (idle in the prefix cache) or owned."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from kvllm.core.prefix_cache import PrefixCache, block_hash, root_hash
from kvllm.core.sequence import Sequence
from kvllm.errors import OutOfBlocksError


class BlockManager:
    """Block tables of sequences over one pool. Pure accounting: the data is moved by the workers.

    most_idle: most idle cached blocks of a tenant, by its name; others have no limit. kv_cache_dtype: a part of the
    identity of a block's content.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        most_idle: dict[str, int] | None = None,
        kv_cache_dtype: str = "auto",
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.most_idle = most_idle
        self.kv_cache_dtype = kv_cache_dtype
        self.clear()

    def clear(self) -> None:
        """Make all blocks free: their content is lost. No sequence may own one."""
        self.prefix_cache = PrefixCache(self.most_idle) if self.enable_prefix_caching else None
        self._free = deque(range(self.num_blocks))
        self._references = [0] * self.num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now: free ones and idle cached ones."""
        return len(self._free) + self.num_idle

    @property
    def num_idle(self) -> int:
        """Blocks that no sequence owns, with a prefix that a later one may share."""
        return self.prefix_cache.num_idle if self.prefix_cache else 0

    @property
    def num_owned(self) -> int:
        return self.num_blocks - self.num_available

    def blocks_for(self, num_pairs: int) -> int:
        return -(-num_pairs // self.block_size)

    def is_shared(self, block: int) -> bool:
        return self._references[block] > 1

    def num_exclusive(self, seq: Sequence) -> int:
        """Blocks that become available when `seq` lets go of its blocks."""
        return sum(self._references[block] == 1 for block in seq.block_table)

    # Growth

    def match_prefix(self, seq: Sequence, limit: int) -> list[int]:
        """Cached blocks that hold the first tokens of `seq`, at most `limit` tokens. Owns nothing yet."""
        if self.prefix_cache is None:
            return []
        self._extend_hashes(seq, limit // self.block_size)
        return self.prefix_cache.match(seq.block_hashes[: limit // self.block_size])

    def blocks_to_admit(self, num_pairs: int, hits: list[int]) -> int:
        """Blocks that leave the available ones when `num_pairs` are allocated of which `hits` are found cached."""
        owned_hits = sum(1 for block in hits if self._references[block])
        return self.blocks_for(num_pairs) - owned_hits

    def share(self, seq: Sequence, blocks: list[int]) -> None:
        """Append cached or owned blocks to the table of `seq`."""
        for block in blocks:
            self._references[block] += 1
            if self.prefix_cache:
                self.prefix_cache.set_owned(block)
        seq.block_table.extend(blocks)

    def blocks_to_append(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that `append` will allocate."""
        # Asked of every sequence at every step: the calls of `blocks_for` and `_writes_shared_block` would show.
        cached, table = seq.cached_length, seq.block_table
        missing = -(-(cached + num_tokens) // self.block_size) - len(table)
        index, offset = divmod(cached, self.block_size)
        shared = offset > 0 and self._references[table[index]] > 1
        return (missing if missing > 0 else 0) + shared

    def append(self, seq: Sequence, num_tokens: int) -> tuple[list[int], int | None]:
        """Make room for `num_tokens` KV pairs behind the cached ones.

        Returns the blocks appended to the table, and the index of a table entry that was replaced because the block
        there is shared and is about to be written (copy on write), if any.
        """
        replaced = None
        if self._writes_shared_block(seq):
            replaced = seq.cached_length // self.block_size
            shared = seq.block_table[replaced]
            seq.block_table[replaced] = self._allocate(1)[0]
            self._release([shared])
        missing = self.blocks_for(seq.cached_length + num_tokens) - len(seq.block_table)
        new_blocks = self._allocate(missing) if missing > 0 else []
        seq.block_table.extend(new_blocks)
        return new_blocks, replaced

    def fork(self, child: Sequence) -> None:
        """`child` was made by `Sequence.fork` and holds a copy of its parent's table: count its references."""
        for block in child.block_table:
            self._references[block] += 1

    def _writes_shared_block(self, seq: Sequence) -> bool:
        index, offset = divmod(seq.cached_length, self.block_size)
        return offset > 0 and self.is_shared(seq.block_table[index])

    # Prefix caching

    def cache_full_blocks(self, seq: Sequence) -> None:
        """Offer the full blocks of `seq` to later sequences. Does nothing once `seq` was compacted."""
        if self.prefix_cache is None or seq.was_compacted:
            return
        full = seq.cached_length // self.block_size
        if full == seq.hashed_blocks:
            return
        self._extend_hashes(seq, full)
        for index in range(seq.hashed_blocks, full):
            self.prefix_cache.insert(seq.block_hashes[index], seq.block_table[index], seq.tenant)
        seq.hashed_blocks = full

    def _extend_hashes(self, seq: Sequence, num_blocks: int) -> None:
        for index in range(len(seq.block_hashes), num_blocks):
            parent = seq.block_hashes[-1] if seq.block_hashes else root_hash(seq.cache_salt, self.kv_cache_dtype)
            tokens = seq.token_ids[index * self.block_size : (index + 1) * self.block_size]
            seq.block_hashes.append(block_hash(parent, tokens))

    def forget_prefixes(self) -> None:
        """Let later sequences find nothing of what is cached so far. Owners keep their blocks."""
        if self.prefix_cache is not None:
            self._free.extend(self.prefix_cache.clear())

    # Shrinking

    def blocks_to_compact(self, seq: Sequence, first: int, count: int, keep: int) -> int:
        """Blocks that `compact` must allocate before it can release any: none in place, `keep` if one is shared."""
        return keep if any(self.is_shared(block) for block in seq.block_table[first : first + count]) else 0

    def compact(self, seq: Sequence, first: int, count: int, keep: int) -> list[int]:
        """Replace blocks `first .. first + count` of the table by the `keep` blocks that will hold the survivors.

        In place when every block of the region is exclusively owned: their hashes are dropped, the first `keep` stay.
        Otherwise the survivors go to fresh blocks and the sources are let go untouched; so they are if none survives.
        Returns the destinations.
        """
        region = seq.block_table[first : first + count]
        if not keep or self.blocks_to_compact(seq, first, count, keep):
            destinations = self._allocate(keep)
            self._release(region)
        else:
            destinations = region[:keep]
            if self.prefix_cache:
                for block in region:
                    self.prefix_cache.remove(block)
            self._release(region[keep:])
        seq.block_table[first : first + count] = destinations
        return destinations

    def release(self, seq: Sequence) -> None:
        """Let go of all blocks of `seq`."""
        self._release(seq.block_table)
        seq.block_table = []

    def _allocate(self, count: int) -> list[int]:
        if count > self.num_available:
            raise OutOfBlocksError(f"{count} blocks were asked for, {self.num_available} of {self.num_blocks} are free")
        blocks = []
        for _ in range(count):
            block = self._free.popleft() if self._free or self.prefix_cache is None else self.prefix_cache.evict()
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def _release(self, blocks: list[int]) -> None:
        # Last block first: a prefix is only worth keeping as long as what precedes it, so its end is evicted first.
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self.prefix_cache and block in self.prefix_cache:
                block = self.prefix_cache.set_idle(block)
            if block is not None:
                self._free.append(block)

    # Integrity

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise RuntimeError unless every block is free, cached or owned, and owned as often as tables name it."""
        sequences = list(sequences)
        owned = Counter(block for seq in sequences for block in seq.block_table)
        if any(self._references[block] != owned[block] for block in range(self.num_blocks)):
            raise RuntimeError("a block's reference count is not the number of block table entries that name it")
        free = Counter(self._free)
        for block in range(self.num_blocks):
            idle = self.prefix_cache is not None and self.prefix_cache.is_idle(block)
            if free[block] + idle + bool(owned[block]) != 1:
                raise RuntimeError(f"block {block} must be exactly one of free, cached and owned")
        for seq in sequences:
            if len(seq.block_table) < self.blocks_for(seq.cached_length):
                raise RuntimeError(f"{len(seq.block_table)} blocks cannot hold {seq.cached_length} KV pairs")
            if len(set(seq.block_table)) != len(seq.block_table):
                raise RuntimeError(f"the block table of sequence {seq.seq_id} names a block twice")
