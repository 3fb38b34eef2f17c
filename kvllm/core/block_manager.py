"""The block tables of sequences: how they grow, shrink and share what is equal."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sequences
from itertools import accumulate
from typing import NamedTuple

from kvllm.core.block_pool import BlockPool
from kvllm.core.prefix_cache import PrefixCache, block_hash, part_hash, root_hash
from kvllm.core.protocol import BlockCopy
from kvllm.core.sequence import Sequence
from kvllm.core.state_snapshots import StateSnapshots
from kvllm.core.tables import BlockTable
from kvllm.kvcache.groups import UNIFORM, KVGroup, full_groups, sliding_blocks


class PrefixHit(NamedTuple):
    """Cached blocks that hold the first `num_blocks` blocks of a text.

    tables: for each part of the KV groups those that the next token attends. host: for each of the blocks after them
    that a tier below the pool has, the host block that holds it, or its digest if it is on the disk. state_row: where
    the recurrent state after them is.
    """

    num_blocks: int
    tables: list[list[int]]
    host: Sequences[int | bytes] = ()
    state_row: int | None = None


class BlockManager:
    """Block tables of sequences over one pool. Pure accounting: the data is moved by the workers.

    most_idle: see BlockPool. kv_cache_dtype: a part of the identity of a block's content. groups: those of the model.
    group_of: the group of each part, in the order of a sequence's tables. is_uniform: whether there is a single part,
    whose layers attend all tokens. full_parts: parts whose layers do; they are the first ones.
    snapshots: of recurrent states, without which no prefix of a model with such layers is of use.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        most_idle: dict[str, int] | None = None,
        kv_cache_dtype: str = "auto",
        groups: Sequences[KVGroup] = UNIFORM,
        num_state_snapshots: int = 0,
    ) -> None:
        self.pool = BlockPool(num_blocks, enable_prefix_caching, most_idle)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.kv_cache_dtype = kv_cache_dtype
        self.snapshots = StateSnapshots(num_state_snapshots, block_size) if num_state_snapshots else None
        self.groups = groups
        self.group_of = [group for group in groups for _ in group.parts]
        self.full_parts = sum(len(group.parts) for group in full_groups(groups))
        counts = [len(group.parts) for group in groups]
        self._groups = list(zip(counts, accumulate(counts, initial=0), strict=False))  # parts of each, the first one
        self.is_uniform = self.full_parts == len(self.group_of) == 1

    @property
    def no_hit(self) -> PrefixHit:
        return PrefixHit(0, [[] for _ in self.group_of])

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
        return sum(self.pool.references[block] == 1 for table in seq.tables for block in table.blocks)

    # Growth

    def blocks_to_admit(self, seq: Sequence, full_blocks: int, chunk: int, hit: PrefixHit) -> int:
        """Blocks that leave the available ones when a sequence starts with `hit` and is computed, `chunk` tokens a step
        at most.

        full_blocks: most blocks that its tables of all tokens have to hold meanwhile.
        """
        # A table with a window lets go of what it shares while the prompt is computed: that saves no block.
        full_blocks -= self._num_owned_in(hit)
        return full_blocks + sliding_blocks(self.groups, seq.num_tokens, self.block_size, chunk)

    def blocks_to_restore(self, seq: Sequence, hit: PrefixHit) -> int:
        """Blocks that leave the available ones by `restore`."""
        return sum(len(table.blocks) for table in seq.host_tables or ()) - self._num_owned_in(hit)

    def _num_owned_in(self, hit: PrefixHit) -> int:
        """Blocks of a hit that sequences own, in the tables of all tokens."""
        return sum(self.pool.references[block] > 0 for table in hit.tables[: self.full_parts] for block in table)

    def share(self, seq: Sequence, hit: PrefixHit) -> None:
        """Begin the tables of `seq` with cached or owned blocks."""
        length = hit.num_blocks * self.block_size
        for group, blocks in zip(self.group_of, hit.tables, strict=True):
            dropped = group.first_block(length, self.block_size) * self.block_size
            seq.tables.append(BlockTable(self.pool, self.block_size, group, dropped))
            seq.tables[-1].share(blocks)

    def restore(self, seq: Sequence, hit: PrefixHit) -> None:
        """Give a sequence tables like those on the host, of which the pool still has the first blocks that `hit`
        says."""
        for group, found, host in zip(self.group_of, hit.tables, seq.host_tables or (), strict=True):
            seq.tables.append(BlockTable(self.pool, self.block_size, group, host.dropped))
            seq.tables[-1].share(found)
        for table, host in zip(seq.tables, seq.host_tables or (), strict=True):
            table.append(table.dropped, table.dropped + len(host.blocks) * self.block_size)
        # From here on all tables hold what is offered to later sequences, if nothing was compressed.
        sliding = (table.dropped // self.block_size for table in seq.tables[self.full_parts :])
        seq.hashed_blocks = max(*map(len, hit.tables), *sliding, 0)

    def blocks_to_append(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that `append` will allocate."""
        length = seq.logical_length
        end = length + num_tokens
        if end <= seq.room_end:  # asked of every sequence at every step: to ask the tables would show
            return 0
        return sum(table.blocks_to_append(length, end) for table in seq.tables)

    def growth(self, seq: Sequence, end: int) -> int:
        """Blocks that its tables add in all until it has `end` tokens, as of BlockTable."""
        growth = 0  # asked of every sequence at every step: to ask all tables of a group, which grow alike, would show
        for parts, first in self._groups:
            growth += parts * seq.tables[first].growth(end)
        return growth

    def append(
        self, seq: Sequence, num_tokens: int, reserved: int | None = None
    ) -> tuple[list[list[int]], list[BlockCopy]]:
        """Make room for `num_tokens` tokens after those that are computed; in tables of all tokens for `reserved`.

        Returns the blocks appended to each table, and the copies (on write) that are due.
        """
        length, new_blocks, copies = seq.logical_length, [], []
        for part, table in enumerate(seq.tables):
            room = reserved if reserved and table.is_full else num_tokens
            blocks, replaced = table.append(length, length + room)
            new_blocks.append(blocks)
            if replaced is not None:
                copies.append(BlockCopy(seq.seq_id, replaced, table.blocks[replaced], part))
        seq.room_end = min(table.end for table in seq.tables)
        return new_blocks, copies

    # Prefix caching

    def match_prefix(self, seq: Sequence, limit: int) -> PrefixHit:
        """Cached blocks that hold the first tokens of `seq`, at most `limit` tokens. Owns nothing yet."""
        cache, count = self.prefix_cache, limit // self.block_size
        if cache is None:
            return self.no_hit
        self._extend_hashes(seq, count)
        hashes, full = seq.block_hashes[:count], []
        for part in range(self.full_parts):
            full.append(cache.match(_keys(hashes[:count], part)))
            count = len(full[-1])
        while (shorter := self._shorter(cache, hashes, count)) is not None:
            count = shorter
        windows = (self._window(cache, hashes, count, part) for part in range(self.full_parts, len(self.group_of)))
        row = self.snapshots.row(hashes[count - 1]) if self.snapshots and count else None
        return PrefixHit(count, [*(blocks[:count] for blocks in full), *windows], state_row=row)

    def match_unchanged(self, seq: Sequence) -> PrefixHit:
        """Cached blocks that hold the beginning of a sequence's cache, as far as nothing was compressed, or carries
        scores. Those of sliding groups are not looked for."""
        cache, limit = self.prefix_cache, min([seq.cached_length, *(region.start for region in seq.compressions)])
        if cache is None or not self.full_parts:
            return self.no_hit
        if seq.is_scored:
            limit = min(limit, seq.prompt_length)
        count = limit // self.block_size
        self._extend_hashes(seq, count)
        full = [cache.match(_keys(seq.block_hashes[:count], part)) for part in range(self.full_parts)]
        return PrefixHit(min(map(len, full)), full + self.no_hit.tables[self.full_parts :])

    def _offer_full_blocks(self, seq: Sequence) -> None:
        """Offer the full blocks of `seq` to later sequences. Does nothing once `seq` was compacted."""
        cache = self.pool.prefix_cache
        if cache is None or seq.was_compacted:
            return
        full = seq.logical_length // self.block_size
        self._extend_hashes(seq, full)
        # Where a window was missing, blocks were computed again of which idle ones are there.
        offer = cache.insert if self.is_uniform else self.pool.renew
        for index in range(seq.hashed_blocks, full):
            digest = seq.block_hashes[index]
            for part, table in enumerate(seq.tables):
                offer(part_hash(digest, part), table.blocks[index - table.dropped // self.block_size], seq.tenant)
        seq.hashed_blocks = full

    def clear(self) -> None:
        """Start over: nobody owns a block, and nothing is cached."""
        self.pool.clear()
        if self.snapshots:
            self.snapshots.forget()

    def forget_prefixes(self) -> None:
        """Let later sequences find nothing of what is cached so far. Owners keep their blocks."""
        self.pool.forget_prefixes()
        if self.snapshots:
            self.snapshots.forget()

    def _extend_hashes(self, seq: Sequence, num_blocks: int) -> None:
        for index in range(len(seq.block_hashes), num_blocks):
            parent = seq.block_hashes[-1] if seq.block_hashes else self._root(seq)
            tokens = seq.token_ids[index * self.block_size : (index + 1) * self.block_size]
            seq.block_hashes.append(block_hash(parent, tokens))

    def _root(self, seq: Sequence) -> bytes:
        salt, adapter = seq.extra_keys
        return root_hash(salt, self.kv_cache_dtype, adapter)

    def _shorter(self, cache: PrefixCache, hashes: list[bytes], count: int) -> int | None:
        """Where to look next if the token after `count` blocks of a text cannot be computed, as no recurrent state is
        known there, or a sliding part lacks a block that it attends."""
        if self.snapshots and (known := self.snapshots.longest(hashes, count)) < count:
            return known
        for part in range(self.full_parts, len(self.group_of)):
            first = self.group_of[part].first_block(count * self.block_size, self.block_size)
            for index in range(count - 1, first - 1, -1):
                if cache.find(part_hash(hashes[index], part)) is None:
                    return index
        return None

    def _window(self, cache: PrefixCache, hashes: list[bytes], count: int, part: int) -> list[int]:
        """The blocks of a sliding part that the token after `count` blocks attends, all of which are cached."""
        first = self.group_of[part].first_block(count * self.block_size, self.block_size)
        return cache.match(_keys(hashes[first:count], part))

    # Shrinking

    def settle(self, seq: Sequence, *, prefilled: bool) -> None:
        """Offer full blocks to later sequences, and let go of those after the windows of the next token."""
        self._offer_full_blocks(seq)
        if self.snapshots:
            self.snapshots.computed(seq, prefilled=prefilled)
        seq.settles_at = (seq.logical_length // self.block_size + 1) * self.block_size
        for table in seq.tables[self.full_parts :]:
            table.slide(seq.logical_length)
            seq.settles_at = min(seq.settles_at, table.slides_at)

    def release(self, seq: Sequence) -> None:
        """Let go of all blocks of `seq`."""
        for table in seq.tables:
            table.release()
        seq.tables = []
        seq.room_end = 0

    # Integrity

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise RuntimeError unless every block is free, cached or owned, and owned as often as tables name it; and
        every table holds what it has to."""
        sequences = list(sequences)
        self.pool.check([block for seq in sequences for table in seq.tables for block in table.blocks])
        for seq in sequences:
            for table in seq.tables:
                table.check(seq.logical_length)
                if seq.room_end > seq.logical_length and table.blocks_to_append(seq.logical_length, seq.room_end):
                    raise RuntimeError(f"a table of sequence {seq.seq_id} has less room than is counted on")
            if self.full_parts and seq.logical_length - seq.tables[0].dropped != seq.cached_length:
                raise RuntimeError(f"the first table of sequence {seq.seq_id} holds other KV pairs than it counts")


def _keys(hashes: list[bytes], part: int) -> list[bytes]:
    return [part_hash(digest, part) for digest in hashes] if part else hashes
