"""State of the sequences that a worker keeps between steps: tokens, lengths and block tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvllm.core.protocol import CompressionJob
from kvllm.worker.sample_row import SampleRow


class Lengths:
    """Lengths of all sequences of a worker by table slot, so that those of a batch are a slice and not a Python loop.

    logical, cached: int64 `[max_num_seqs]`, as in `kvllm.core.sequence.Sequence`.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.logical = np.zeros(max_num_seqs, dtype=np.int64)
        self.cached = np.zeros(max_num_seqs, dtype=np.int64)

    def start(self, table_slot: int, logical: int, cached: int) -> None:
        self.logical[table_slot] = logical
        self.cached[table_slot] = cached

    def advance(self, table_slots: np.ndarray, num_tokens: np.ndarray) -> None:
        """As many more tokens of each sequence are computed, and their KV pairs stored."""
        self.logical[table_slots] += num_tokens
        self.cached[table_slots] += num_tokens


@dataclass(slots=True, eq=False)
class SequenceState:
    """table_slot: where its block tables and lengths lie.

    sampled_row: of the samples of the step that sampled for it last, which are those of its last token.
    chosen: the survivors that steps before have chosen for a compression that goes on: of each step and part, offsets
        `[layers, windows, kv_heads, retain]`, None where all survives.
    """

    token_ids: list[int]
    table_slot: int
    lengths: Lengths
    sample_row: SampleRow
    sampled_row: int = 0
    chosen: list[list[torch.Tensor | None]] = field(default_factory=list)

    def set_token(self, index: int, token_id: int) -> None:
        """Put a token of the output in place of PENDING."""
        self.token_ids[index] = token_id
        self.sample_row.output_token_ids[index - len(self.sample_row.prompt_token_ids)] = token_id

    @property
    def logical_length(self) -> int:
        return int(self.lengths.logical[self.table_slot])

    @property
    def cached_length(self) -> int:
        return int(self.lengths.cached[self.table_slot])

    @property
    def dropped(self) -> int:
        """KV pairs evicted so far: an uncompressed pair's position less its index in the cache."""
        return self.logical_length - self.cached_length


class BlockTables:
    """Block tables of all sequences of a worker in one part of a KV group, one slot each, so that a batch is a slice
    and not a Python loop.

    counts_first: the index of a sequence's next KV pair follows from `first`, and not from `cached_length`.
    lengths: of all sequences. table: int32 `[max_num_seqs, max_blocks]`. num_blocks: int64 `[max_num_seqs]`.
    first: int64 `[max_num_seqs]`, how many blocks less than the text a table has (`GroupTable.first`).
    num_replacements: how often blocks of a table were replaced. As long as it stays, tables only grow at their ends.
    num_appends: how often a table has grown there. As long as both stay, no running sequence's table changes.
    """

    def __init__(
        self,
        lengths: Lengths,
        table: np.ndarray,
        num_blocks: np.ndarray,
        first: np.ndarray,
        block_size: int,
        *,
        counts_first: bool,
    ) -> None:
        self.lengths = lengths
        self.table = table
        self.num_blocks = num_blocks
        self.first = first
        self.block_size = block_size
        self.counts_first = counts_first
        self.num_replacements = self.num_appends = 0

    def clear(self, table_slot: int) -> None:
        self.num_blocks[table_slot] = 0
        self.first[table_slot] = 0

    def append(self, table_slot: int, blocks: list[int]) -> None:
        before = self.num_blocks[table_slot]
        self.table[table_slot, before : before + len(blocks)] = blocks
        self.num_blocks[table_slot] += len(blocks)
        self.num_appends += 1

    def append_one(self, table_slots: np.ndarray, blocks: list[int]) -> None:
        """A block more for each of some tables."""
        self.table[table_slots, self.num_blocks[table_slots]] = blocks
        self.num_blocks[table_slots] += 1
        self.num_appends += 1

    def replace(self, table_slot: int, first: int, count: int, blocks: list[int]) -> None:
        """Blocks `first .. first + count` become `blocks` (not more); what follows them moves up."""
        table = self.table[table_slot]
        behind = table[first + count : self.num_blocks[table_slot]].copy()
        table[first : first + len(blocks)] = blocks
        table[first + len(blocks) : first + len(blocks) + len(behind)] = behind
        self.num_blocks[table_slot] += len(blocks) - count
        self.num_replacements += 1

    def compact(self, table_slot: int, job: CompressionJob) -> None:
        """A job's region is compressed: its destinations take the place of its blocks."""
        self.replace(table_slot, job.first_block, job.region_blocks, job.destinations)
        if self.counts_first:
            self.first[table_slot] += job.region_blocks - len(job.destinations)

    def slide(self, table_slot: int, first: int) -> None:
        """Drop the blocks before block `first` of the text."""
        dropped = first - int(self.first[table_slot])
        if dropped:
            self.replace(table_slot, 0, min(dropped, int(self.num_blocks[table_slot])), [])
            self.first[table_slot] = first

    def copy(self, source: int, table_slot: int) -> None:
        num_blocks = self.num_blocks[source]
        self.table[table_slot, :num_blocks] = self.table[source, :num_blocks]
        self.num_blocks[table_slot] = num_blocks
        self.first[table_slot] = self.first[source]

    def kv_lengths(self, table_slots: np.ndarray | list[int]) -> np.ndarray:
        """The index in its table of the next KV pair of each sequence in `table_slots`: int64 `[S]`."""
        if not self.counts_first:
            return self.lengths.cached[table_slots]
        return self.lengths.logical[table_slots] - self.first[table_slots] * self.block_size


class PartTables:
    """Block tables of all parts of the KV groups, in arrays over the parts: what a step needs of them takes as many
    operations for many parts as for one.

    parts: those of each, views. first_counts: whether the first part `counts_first`, as the others do.
    widths: most blocks of a sequence in each part.
    """

    def __init__(self, lengths: Lengths, widths: Sequence[int], block_size: int, *, first_counts: bool = False) -> None:
        size = len(widths), len(lengths.logical)
        self.lengths = lengths
        self.block_size = block_size
        self.first_counts = first_counts
        self.table = np.zeros((*size, max(widths)), dtype=np.int32)
        self.num_blocks = np.zeros(size, dtype=np.int64)
        self.first = np.zeros(size, dtype=np.int64)
        self.parts = [
            BlockTables(
                lengths, table[:, :width], num_blocks, first, block_size, counts_first=index > 0 or first_counts
            )
            for index, (width, table, num_blocks, first) in enumerate(
                zip(widths, self.table, self.num_blocks, self.first, strict=True)
            )
        ]
        self._index = np.arange(len(widths))[:, None]

    def kv_lengths(self, table_slots: np.ndarray) -> np.ndarray:
        """As of BlockTables, in each part: int64 `[parts, S]`."""
        if len(self.parts) == 1:
            return self.parts[0].kv_lengths(table_slots)[None]
        lengths = self.lengths.logical[table_slots] - self.first[:, table_slots] * self.block_size
        if not self.first_counts:
            lengths[0] = self.lengths.cached[table_slots]
        return lengths

    def slot_mapping(self, table_slots: np.ndarray, kv_index: np.ndarray) -> np.ndarray:
        """Cache slots of KV pairs `kv_index` `[parts, T]` of the sequences in `table_slots` `[T]`: int64."""
        block, offset = np.divmod(kv_index, self.block_size)
        return self.table[self._index, table_slots, block].astype(np.int64) * self.block_size + offset
