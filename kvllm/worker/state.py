"""What a worker remembers of its sequences between steps: tokens, lengths and block tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvllm.worker.sampler import SampleRow


@dataclass(slots=True, eq=False)
class SequenceState:
    """row: where its block table lies. Lengths as in `kvllm.core.sequence.Sequence`."""

    token_ids: list[int]
    row: int
    num_blocks: int
    logical_length: int
    cached_length: int
    sample_row: SampleRow

    def extend(self, token_ids: list[int]) -> None:
        self.token_ids.extend(token_ids)
        self.sample_row.output_token_ids.extend(token_ids)

    @property
    def dropped(self) -> int:
        """Entries evicted so far: what an uncompressed entry's position is ahead of its index in the cache."""
        return self.logical_length - self.cached_length


class BlockTables:
    """Block tables of all sequences of a worker, one row each, so that a batch is a slice and not a Python loop."""

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int) -> None:
        self.table = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.block_size = block_size
        self.clear()

    def clear(self) -> None:
        """Make all rows free."""
        self._free_rows = list(reversed(range(len(self.table))))

    @property
    def num_free(self) -> int:
        return len(self._free_rows)

    def acquire(self) -> int:
        return self._free_rows.pop()

    def release(self, row: int) -> None:
        self._free_rows.append(row)

    def append(self, state: SequenceState, blocks: list[int]) -> None:
        self.table[state.row, state.num_blocks : state.num_blocks + len(blocks)] = blocks
        state.num_blocks += len(blocks)

    def replace(self, state: SequenceState, first: int, count: int, blocks: list[int]) -> None:
        """Blocks `first .. first + count` become `blocks` (not more); what is behind them moves up."""
        row = self.table[state.row]
        behind = row[first + count : state.num_blocks].copy()
        row[first : first + len(blocks)] = blocks
        row[first + len(blocks) : first + len(blocks) + len(behind)] = behind
        state.num_blocks += len(blocks) - count

    def copy(self, source: SequenceState, row: int) -> None:
        self.table[row, : source.num_blocks] = self.table[source.row, : source.num_blocks]

    def slots(self, rows: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Slot of cache entry `index[i]` of the sequence in row `rows[i]`."""
        block, offset = np.divmod(index, self.block_size)
        return self.table[rows, block].astype(np.int64) * self.block_size + offset
