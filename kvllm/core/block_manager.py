"""The block tables of sequences: how they grow, shrink and share what is equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Sequences
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from kvllm.core.block_pool import BlockPool
from kvllm.core.group_table import GroupTable
from kvllm.core.prefix_cache import PrefixCache, block_hash, part_hash, root_hash
from kvllm.core.sequence import Sequence
from kvllm.kvcache.groups import UNIFORM, KVGroup, full_groups, has_full, sliding_blocks


class PrefixHit(NamedTuple):
    """Cached blocks that hold the first `num_blocks` blocks of a text.

    full: those of the first group, if its layers attend all tokens. others: for each other group those that the next
    token attends. host: for each of the blocks after them that a tier below the pool has, the host block that holds
    it, or its digest if it is on the disk.
    """

    num_blocks: int
    full: list[int]
    others: list[list[int]]
    host: Sequences[int | bytes] = ()


class BlockManager:
    """Block tables of sequences over one pool. Pure accounting: the data is moved by the workers.

    A sequence has a `block_table` in the first group, if its layers attend all tokens, and a GroupTable in each other
    group.

    most_idle: see BlockPool. kv_cache_dtype: a part of the identity of a block's content. others: the groups in which
    sequences have a GroupTable. has_windows: whether some of these have a window. full_parts: parts of all groups whose
    layers attend all tokens.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        most_idle: dict[str, int] | None = None,
        kv_cache_dtype: str = "auto",
        groups: Sequences[KVGroup] = UNIFORM,
    ) -> None:
        self.pool = BlockPool(num_blocks, enable_prefix_caching, most_idle)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.kv_cache_dtype = kv_cache_dtype
        self.has_full = has_full(groups)
        self.others = list(groups[1:] if self.has_full else groups)
        self.has_windows = any(group.window is not None for group in self.others)
        self.full_parts = sum(len(group.parts) for group in full_groups(groups))
        ends = list(accumulate((len(group.parts) for group in self.others), initial=int(self.has_full)))
        self._parts = [range(*ends) for ends in pairwise(ends)]  # of each other group, among those of all groups

    @property
    def no_hit(self) -> PrefixHit:
        return PrefixHit(0, [], [[] for _ in self.others])

    @property
    def prefix_cache(self) -> PrefixCache | None:
        return self.pool.prefix_cache

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now: free ones and idle cached ones."""
        return self.pool.num_available

    @property
    def num_idle(self) -> int:
        """Blocks that no sequence owns, with a prefix that a later one may share."""
        return self.prefix_cache.num_idle if self.prefix_cache else 0

    @property
    def num_owned(self) -> int:
        return self.num_blocks - self.num_available

    def blocks_for(self, num_pairs: int) -> int:
        return -(-num_pairs // self.block_size)

    def num_exclusive(self, seq: Sequence) -> int:
        """Blocks that become available when `seq` lets go of its blocks."""
        tables = (seq.block_table, *(table.blocks for table in seq.others))
        return sum(self.pool.references[block] == 1 for table in tables for block in table)

    # Growth

    def blocks_to_admit(self, seq: Sequence, full_blocks: int, chunk: int, hit: PrefixHit) -> int:
        """Blocks that leave the available ones when a sequence starts with `hit` and is computed, `chunk` tokens a step
        at most.

        full_blocks: most blocks that its tables of all tokens have to hold meanwhile.
        """
        others = (blocks for group, blocks in zip(self.others, hit.others, strict=True) if group.window is None)
        owned_hits = sum(1 for block in chain(hit.full, *others) if self.pool.references[block])
        # A table with a window lets go of what it shares while the prompt is computed: that saves no block.
        return full_blocks - owned_hits + sliding_blocks(self.others, seq.num_tokens, self.block_size, chunk)

    def blocks_to_restore(self, counts: Iterable[int], hit: PrefixHit) -> int:
        """Blocks that leave the available ones by `restore`."""
        return sum(counts) - sum(1 for block in hit.full if self.pool.references[block])

    def share(self, seq: Sequence, hit: PrefixHit) -> None:
        """Begin the tables of `seq` with cached or owned blocks."""
        self.pool.own(hit.full)
        seq.block_table.extend(hit.full)
        length = hit.num_blocks * self.block_size
        for group, parts, blocks in zip(self.others, self._parts, hit.others, strict=True):
            self.pool.own(blocks)
            seq.others.append(GroupTable(group, parts, self.block_size, length, blocks[:]))

    def restore(self, seq: Sequence, hit: PrefixHit, counts: list[int]) -> None:
        """Give a sequence tables of as many blocks as `counts` says for each, the first of them those that are found
        cached."""
        self.pool.own(hit.full)
        seq.block_table = hit.full + self.pool.allocate(counts[0] - len(hit.full))
        for group, parts, count, first in zip(self.others, self._parts, counts[1:], seq.host_firsts, strict=True):
            table = GroupTable(group, parts, self.block_size, seq.logical_length, self.pool.allocate(count))
            table.first = first
            seq.others.append(table)
        # From here on all tables hold what is offered to later sequences, if nothing was compressed.
        seq.hashed_blocks = max([len(hit.full), *(table.first for table in seq.others)])

    def blocks_to_append(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that `append` and `append_table` will allocate."""
        # Asked of every sequence at every step: calls of `num_missing`, `_writes_shared` and the like would show.
        needed, references = 0, self.pool.references
        if self.has_full:
            cached, blocks = seq.cached_length, seq.block_table
            missing = -(-(cached + num_tokens) // self.block_size) - len(blocks)
            index, offset = divmod(cached, self.block_size)
            needed = missing if missing > 0 else 0
            needed += offset > 0 and references[blocks[index]] > 1
        if seq.others:
            end = -(-(seq.logical_length + num_tokens) // self.block_size)
            index, offset = divmod(seq.logical_length, self.block_size)
            if offset and end == index + 1 and self.has_full and not needed:
                # Last blocks are shared in all tables of a kind or in none. But a whole cache that was compressed has
                # one of its own where those of windows, whose groups are the last, are still shared.
                last = seq.others[-1]
                tail = (index - last.first) * len(last.parts)
                if references[last.blocks[tail]] == 1:
                    return 0
            for table in seq.others:
                num_parts = len(table.parts)
                missing = end - table.first - len(table.blocks) // num_parts
                if missing > 0:
                    needed += missing * num_parts
                if offset and references[table.blocks[(index - table.first) * num_parts]] > 1:
                    needed += num_parts
        return needed

    def append(self, seq: Sequence, num_tokens: int) -> tuple[list[int], int | None]:
        """Make room for `num_tokens` KV pairs after the cached ones in the first group.

        Returns the blocks appended to the table, and the index of a table entry that was replaced because the block
        there is shared and is about to be written (copy on write), if any.
        """
        if not self.has_full:
            return [], None
        replaced = None
        if self._writes_shared_block(seq):
            replaced = seq.cached_length // self.block_size
            shared = seq.block_table[replaced]
            seq.block_table[replaced] = self.pool.allocate(1)[0]
            self.pool.release([shared])
        missing = self.blocks_for(seq.cached_length + num_tokens) - len(seq.block_table)
        new_blocks = self.pool.allocate(missing) if missing > 0 else []
        seq.block_table.extend(new_blocks)
        return new_blocks, replaced

    def append_table(self, table: GroupTable, length: int, num_tokens: int) -> tuple[list[int], list[int]]:
        """Make room for `num_tokens` tokens after the first `length` in the table of another group.

        Returns the blocks that replaced those of the last block of the text, because these are shared and about to be
        written, and the blocks appended.
        """
        copies: list[int] = []
        if self._writes_shared(table, length):
            written = table.at(length)
            shared = table.blocks[written]
            table.blocks[written] = copies = self.pool.allocate(len(shared))
            self.pool.release(shared)
        new_blocks = self.pool.allocate(table.num_missing(length + num_tokens))
        table.blocks += new_blocks
        return copies, new_blocks

    def fork(self, child: Sequence) -> None:
        """`child` was made by `Sequence.fork` and holds copies of its parent's tables: count their references."""
        self.pool.own(child.block_table)
        for table in child.others:
            self.pool.own(table.blocks)

    def _writes_shared_block(self, seq: Sequence) -> bool:
        index, offset = divmod(seq.cached_length, self.block_size)
        return offset > 0 and self.pool.is_shared(seq.block_table[index])

    def _writes_shared(self, table: GroupTable, length: int) -> bool:
        return length % self.block_size > 0 and self.pool.is_shared(table.blocks[table.at(length)][0])

    # Prefix caching

    def match_prefix(self, seq: Sequence, limit: int) -> PrefixHit:
        """Cached blocks that hold the first tokens of `seq`, at most `limit` tokens. Owns nothing yet."""
        cache, count = self.prefix_cache, limit // self.block_size
        if cache is None:
            return self.no_hit
        self._extend_hashes(seq, count)
        hashes = seq.block_hashes[:count]
        full = cache.match(hashes) if self.has_full else []
        count = len(full) if self.has_full else count
        if not self.others:
            return PrefixHit(count, full, [])
        while (missing := self._missing_block(cache, hashes, count)) is not None:
            count = missing
        others = [self._window(cache, hashes, count, i) for i in range(len(self.others))]
        return PrefixHit(count, full[:count], others)

    def match_unchanged(self, seq: Sequence) -> PrefixHit:
        """Cached blocks that hold the beginning of a sequence's cache, as far as nothing was compressed, or carries
        scores. Those of sliding groups are not looked for."""
        cache, limit = self.prefix_cache, min([seq.cached_length, *(region.start for region in seq.compressions)])
        if cache is None or not self.has_full:
            return self.no_hit
        if seq.is_scored:
            limit = min(limit, seq.prompt_length)
        count = limit // self.block_size
        self._extend_hashes(seq, count)
        full = cache.match(seq.block_hashes[:count])
        return self.no_hit._replace(num_blocks=len(full), full=full)

    def cache_full_blocks(self, seq: Sequence) -> None:
        """Offer the full blocks of `seq` to later sequences. Does nothing once `seq` was compacted."""
        cache = self.pool.prefix_cache
        if cache is None or seq.was_compacted:
            return
        full = seq.logical_length // self.block_size
        if full == seq.hashed_blocks:
            return
        self._extend_hashes(seq, full)
        for index in range(seq.hashed_blocks, full):
            digest = seq.block_hashes[index]
            if not self.others:
                cache.insert(digest, seq.block_table[index], seq.tenant)
                continue
            # Where a window was missing, blocks were computed again of which idle ones are there.
            if self.has_full:
                self.pool.renew(digest, seq.block_table[index], seq.tenant)
            for table in seq.others:
                for part, block in zip(table.parts, table.of_block(index), strict=True):
                    self.pool.renew(part_hash(digest, part), block, seq.tenant)
        seq.hashed_blocks = full

    def forget_prefixes(self) -> None:
        """Let later sequences find nothing of what is cached so far. Owners keep their blocks."""
        self.pool.forget_prefixes()

    def _extend_hashes(self, seq: Sequence, num_blocks: int) -> None:
        for index in range(len(seq.block_hashes), num_blocks):
            parent = seq.block_hashes[-1] if seq.block_hashes else root_hash(seq.cache_salt, self.kv_cache_dtype)
            tokens = seq.token_ids[index * self.block_size : (index + 1) * self.block_size]
            seq.block_hashes.append(block_hash(parent, tokens))

    def _missing_block(self, cache: PrefixCache, hashes: list[bytes], count: int) -> int | None:
        """The last block of a text that a group lacks of those that the token after `count` blocks attends."""
        for group, parts in zip(self.others, self._parts, strict=True):
            first = group.first_block(count * self.block_size, self.block_size)
            for index in range(count - 1, first - 1, -1):
                if any(cache.find(part_hash(hashes[index], part)) is None for part in parts):
                    return index
        return None

    def _window(self, cache: PrefixCache, hashes: list[bytes], count: int, other: int) -> list[int]:
        """The blocks of another group that the token after `count` blocks attends, all of which are cached."""
        first = self.others[other].first_block(count * self.block_size, self.block_size)
        keys = [part_hash(digest, part) for digest in hashes[first:count] for part in self._parts[other]]
        return [block for key in keys if (block := cache.find(key)) is not None]

    # Shrinking

    def release_behind(self, seq: Sequence) -> None:
        """Let go of the blocks after the windows of the next token."""
        for table in seq.others:
            if not table.is_full:
                self.pool.release(table.take_behind(seq.logical_length))

    def blocks_to_compact(self, table: list[int] | GroupTable, first: int, count: int, keep: int) -> int:
        """Blocks that `compact` must allocate before it can release any: none in place, as many as survive if one is
        shared."""
        if isinstance(table, GroupTable):
            parts = len(table.parts)
            return self.blocks_to_compact(table.blocks, first * parts, count * parts, keep * parts)
        return keep if any(self.pool.is_shared(block) for block in table[first : first + count]) else 0

    def compact(self, table: list[int] | GroupTable, first: int, count: int, keep: int) -> list[int]:
        """Replace blocks `first .. first + count` of a table by the `keep` blocks that will hold the survivors.

        In place when every block of the region is exclusively owned: their hashes are dropped, the first `keep` stay.
        Otherwise the survivors go to fresh blocks and the sources are let go untouched; so they are if none survives.
        Returns the destinations: for each block one for each part.
        """
        if isinstance(table, GroupTable):
            parts = len(table.parts)
            table.first += count - keep
            table.sent = table.first  # which the workers learn by the compression itself
            return self.compact(table.blocks, first * parts, count * parts, keep * parts)
        region = table[first : first + count]
        if not keep or self.blocks_to_compact(table, first, count, keep):
            destinations = self.pool.allocate(keep)
            self.pool.release(region)
        else:
            destinations = region[:keep]
            if self.prefix_cache:
                for block in region:
                    self.prefix_cache.remove(block)
            self.pool.release(region[keep:])
        table[first : first + count] = destinations
        return destinations

    def release(self, seq: Sequence) -> None:
        """Let go of all blocks of `seq`."""
        self.pool.release(seq.block_table)
        seq.block_table = []
        for table in seq.others:
            self.pool.release(table.blocks)
        seq.others = []

    # Integrity

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise RuntimeError unless every block is free, cached or owned, and owned as often as tables name it; and
        every table holds what it has to."""
        sequences = list(sequences)
        tables = [table for seq in sequences for table in (seq.block_table, *(each.blocks for each in seq.others))]
        self.pool.check(Counter(block for table in tables for block in table))
        for table in tables:
            if len(set(table)) != len(table):
                raise RuntimeError(f"a block table names a block twice: {table}")
        for seq in sequences:
            if self.has_full and len(seq.block_table) < self.blocks_for(seq.cached_length):
                raise RuntimeError(f"{len(seq.block_table)} blocks cannot hold {seq.cached_length} KV pairs")
            for table in seq.others:
                if table.num_missing(seq.logical_length):
                    raise RuntimeError(f"a table of sequence {seq.seq_id} lacks blocks that its next token attends")
                window = table.group.first_block(seq.logical_length, self.block_size)
                if not table.is_full and table.first != window:
                    raise RuntimeError(f"a window of sequence {seq.seq_id} is not what its next token attends")
