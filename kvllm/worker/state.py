"""State of the sequences that a worker keeps between steps: tokens, lengths and block tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvllm.config import EngineConfig
from kvllm.core.protocol import PartJob
from kvllm.core.tables import TableStart
from kvllm.kvcache.groups import layer_parts
from kvllm.worker.sample_row import SampleRow


@dataclass(slots=True, eq=False)
class SequenceState:
    """table_slot: where its lengths and block tables lie in `tables`.

    sampled_row: of the samples of the step that sampled for it last, which are those of its last token.
    chosen: the survivors that steps before have chosen for a compression that goes on: of each step and part, offsets
        `[layers, windows, kv_heads, retain]`, None where all survives.
    """

    token_ids: list[int]
    table_slot: int
    tables: PartTables
    sample_row: SampleRow
    sampled_row: int = 0
    chosen: list[list[torch.Tensor | None]] = field(default_factory=list)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens of the output."""
        self.token_ids += token_ids
        self.sample_row.output_token_ids += token_ids

    def set_token(self, index: int, token_id: int) -> None:
        """Put a token of the output in place of PENDING."""
        self.token_ids[index] = token_id
        self.sample_row.output_token_ids[index - len(self.sample_row.prompt_token_ids)] = token_id

    @property
    def logical_length(self) -> int:
        return int(self.tables.logical[self.table_slot])

    @property
    def cached_length(self) -> int:
        """KV pairs in the first part."""
        return self.logical_length - self.dropped

    @property
    def dropped(self) -> int:
        """KV pairs evicted so far from the first part: an uncompressed pair's position less its index there."""
        return int(self.tables.dropped[0, self.table_slot])


class BlockTables:
    """Block tables of all sequences of a worker in one part of a KV group, one slot each, so that a batch is a slice
    and not a Python loop.

    logical: int64 `[max_num_seqs]`, tokens computed, the same in all parts. table: int32 `[max_num_seqs, max_blocks]`.
    num_blocks: int64 `[max_num_seqs]`. dropped: int64 `[max_num_seqs]`, as in `kvllm.core.tables.BlockTable`.
    num_replacements: how often blocks of a table were replaced. As long as it stays, tables only grow at their ends.
    num_appends: how often a table has grown there. As long as both stay, no running sequence's table changes.
    """

    def __init__(
        self, logical: np.ndarray, table: np.ndarray, num_blocks: np.ndarray, dropped: np.ndarray, block_size: int
    ) -> None:
        self.logical = logical
        self.table = table
        self.num_blocks = num_blocks
        self.dropped = dropped
        self.block_size = block_size
        self.num_replacements = self.num_appends = 0

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
        tail = table[first + count : self.num_blocks[table_slot]].copy()
        table[first : first + len(blocks)] = blocks
        table[first + len(blocks) : first + len(blocks) + len(tail)] = tail
        self.num_blocks[table_slot] += len(blocks) - count
        self.num_replacements += 1

    def compact(self, table_slot: int, job: PartJob) -> None:
        """A job's region is compressed: its destinations take the place of its blocks."""
        self.replace(table_slot, job.first_block, job.region_blocks, job.destinations)
        self.dropped[table_slot] += job.dropped

    def slide(self, table_slot: int, count: int) -> None:
        """Drop the first `count` blocks."""
        self.replace(table_slot, 0, count, [])
        self.dropped[table_slot] += count * self.block_size

    def copy(self, source: int, table_slot: int) -> None:
        num_blocks = self.num_blocks[source]
        self.table[table_slot, :num_blocks] = self.table[source, :num_blocks]
        self.num_blocks[table_slot] = num_blocks
        self.dropped[table_slot] = self.dropped[source]

    def kv_lengths(self, table_slots: np.ndarray | list[int]) -> np.ndarray:
        """The index in its table of the next KV pair of each sequence in `table_slots`: int64 `[S]`."""
        return self.logical[table_slots] - self.dropped[table_slots]


class PartTables:
    """Block tables of all parts of the KV groups, in arrays over the parts: what a step needs of them takes as many
    operations for many parts as for one.

    parts: those of each, views. full_parts: those whose layers attend all tokens, the first ones.
    windows: of the others. widths: most blocks of a sequence in each part.
    """

    def __init__(self, max_num_seqs: int, widths: Sequence[int], block_size: int, windows: Sequence[int] = ()) -> None:
        size = len(widths), max_num_seqs
        self.block_size = block_size
        self.full_parts = len(widths) - len(windows)
        self.windows = np.array(windows)[:, None]
        self.logical = np.zeros(max_num_seqs, dtype=np.int64)
        self.table = np.zeros((*size, max(widths)), dtype=np.int32)
        self.num_blocks = np.zeros(size, dtype=np.int64)
        self.dropped = np.zeros(size, dtype=np.int64)
        columns = zip(widths, self.table, self.num_blocks, self.dropped, strict=True)
        self.parts = [
            BlockTables(self.logical, table[:, :width], num_blocks, dropped, block_size)
            for width, table, num_blocks, dropped in columns
        ]
        self._index = np.arange(len(widths))[:, None]

    @classmethod
    def of(cls, config: EngineConfig) -> PartTables:
        """With room for the longest sequence."""
        widths = table_widths(config, config.max_num_batched_tokens)
        windows = [group.window for group in config.kv_groups if group.window is not None for _ in group.parts]
        return cls(config.max_num_seqs, widths, config.block_size, windows)

    def start(self, table_slot: int, logical_length: int, starts: list[TableStart]) -> None:
        """A sequence gets a slot, whoever had it before."""
        self.logical[table_slot] = logical_length
        self.num_blocks[:, table_slot] = self.dropped[:, table_slot] = 0
        for tables, start in zip(self.parts, starts, strict=False):
            tables.dropped[table_slot] = start.dropped
            tables.append(table_slot, start.blocks)

    def fork(self, parent: int, child: int) -> None:
        self.logical[child] = self.logical[parent]
        for tables in self.parts:
            tables.copy(parent, child)

    def advance(self, table_slots: np.ndarray, num_tokens: np.ndarray) -> None:
        """As many more tokens of each sequence are computed. Tables drop blocks that windows have passed."""
        self.logical[table_slots] += num_tokens
        if not len(self.windows):
            return
        passed = self.logical[table_slots] + 1 - self.windows - self.dropped[self.full_parts :, table_slots]
        for part, index in np.argwhere(passed >= self.block_size):
            self.parts[self.full_parts + part].slide(table_slots[index], passed[part, index] // self.block_size)

    def kv_lengths(self, table_slots: np.ndarray) -> np.ndarray:
        """As of BlockTables, in each part: int64 `[parts, S]`."""
        return self.logical[table_slots] - self.dropped[:, table_slots]

    def slot_mapping(self, table_slots: np.ndarray, kv_index: np.ndarray) -> np.ndarray:
        """Cache slots of KV pairs `kv_index` `[parts, T]` of the sequences in `table_slots` `[T]`: int64."""
        block, offset = np.divmod(kv_index, self.block_size)
        return self.table[self._index, table_slots, block].astype(np.int64) * self.block_size + offset


def table_widths(config: EngineConfig, chunk: int) -> list[int]:
    """Most blocks of a sequence in each part, if a step computes at most `chunk` tokens of it."""
    return [
        group.most_blocks(config.max_model_len, config.block_size, chunk) // len(group.parts)
        for group in config.kv_groups
        for _ in group.parts
    ]


def part_of_layers(config: EngineConfig, num_layers: int) -> list[int]:
    """The index of each layer's part."""
    parts = layer_parts(config.kv_groups)
    part_of = {layer: index for index, layers in enumerate(parts) for layer in layers}
    return [part_of.get(layer, 0) for layer in range(num_layers)]
