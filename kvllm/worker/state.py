"""State of the sequences that a worker keeps between steps: tokens, lengths and block tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvllm.worker.sampler import SampleRow


@dataclass(slots=True, eq=False)
class SequenceState:
    """table_slot: where its block table lies. Lengths as in `kvllm.core.sequence.Sequence`."""

    token_ids: list[int]
    table_slot: int
    num_blocks: int
    logical_length: int
    cached_length: int
    sample_row: SampleRow

    def extend(self, token_ids: list[int]) -> None:
        self.token_ids.extend(token_ids)
        self.sample_row.output_token_ids.extend(token_ids)

    @property
    def dropped(self) -> int:
        """KV pairs evicted so far: an uncompressed pair's position less its index in the cache."""
        return self.logical_length - self.cached_length


class BlockTables:
    """Block tables of all sequences of a worker, one slot each, so that a batch is a slice and not a Python loop.

    table: int32 `[max_num_seqs, max_blocks]`.
    num_replacements: how often blocks of a table were replaced. As long as it stays, tables only grow at their ends.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int) -> None:
        self.table = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.block_size = block_size
        self.num_replacements = 0
        self.clear()

    def clear(self) -> None:
        """Make all slots free."""
        self._free_slots = list(reversed(range(len(self.table))))

    @property
    def num_free(self) -> int:
        return len(self._free_slots)

    def acquire(self) -> int:
        return self._free_slots.pop()

    def release(self, table_slot: int) -> None:
        self._free_slots.append(table_slot)

    def append(self, state: SequenceState, blocks: list[int]) -> None:
        self.table[state.table_slot, state.num_blocks : state.num_blocks + len(blocks)] = blocks
        state.num_blocks += len(blocks)

    def replace(self, state: SequenceState, first: int, count: int, blocks: list[int]) -> None:
        """Blocks `first .. first + count` become `blocks` (not more); what is behind them moves up."""
        table = self.table[state.table_slot]
        behind = table[first + count : state.num_blocks].copy()
        table[first : first + len(blocks)] = blocks
        table[first + len(blocks) : first + len(blocks) + len(behind)] = behind
        state.num_blocks += len(blocks) - count
        self.num_replacements += 1

    def copy(self, source: SequenceState, table_slot: int) -> None:
        self.table[table_slot, : source.num_blocks] = self.table[source.table_slot, : source.num_blocks]

    def slot_mapping(self, table_slots: np.ndarray, kv_index: np.ndarray) -> np.ndarray:
        """Cache slot of KV pair `kv_index[i]` of the sequence in `table_slots[i]`: int64."""
        block, offset = np.divmod(kv_index, self.block_size)
        return self.table[table_slots, block].astype(np.int64) * self.block_size + offset
