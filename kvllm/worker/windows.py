"""What a compression works on: windows of a cache in the parts of KV groups, and the moves of what survives in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from kvllm.core.protocol import PartJob
from kvllm.worker.state import BlockTables, SequenceState


@dataclass(frozen=True)
class CompressedPart:
    """A part of a KV group whose layers attend all tokens: its block tables, and its layers, as they lie in a block."""

    tables: BlockTables
    layers: Sequence[int]

    def region_blocks(self, job: PartJob, state: SequenceState) -> np.ndarray:
        """Ids of the blocks of a job's region."""
        return self.tables.table[state.table_slot, job.first_block : job.first_block + job.region_blocks]


@dataclass(frozen=True)
class Window:
    """One window of a job in one part: `size` KV pairs from index `start` of the cache on, to be cut to `retain`.

    position: of the first of them in the text.
    """

    state: SequenceState
    start: int
    size: int
    retain: int
    position: int

    @property
    def seed(self) -> int:
        """A number that depends on the sequence and the window's position alone, whatever else is in the batch."""
        return (self.state.sample_row.seed ^ (self.position * 0x9E3779B97F4A7C15)) & (2**63 - 1)


Windows = tuple[Window | None, ...]
"""One window in each part; None where all of it survives."""


@dataclass(frozen=True)
class PartWindows:
    """The windows of one size in a part that are chosen from together. tables: int32 `[windows, blocks]`, of these."""

    part: CompressedPart
    windows: list[Window]
    size: int
    tables: torch.Tensor

    @cached_property
    def table_slots(self) -> list[int]:
        """Those of the windows' sequences."""
        return [window.state.table_slot for window in self.windows]

    @cached_property
    def starts(self) -> list[int]:
        """Where the windows begin."""
        return [window.start for window in self.windows]


@dataclass(frozen=True)
class Move:
    """KV pairs `start .. end - 1` of a sequence's `cached` ones, about to be compacted in one part.

    job: of this part. layers: those of the part. blocks: ids of the region's.
    chosen: int64 `[layers, windows, kv_heads, retain]`, survivors as offsets in their windows, -1 where a head keeps
        fewer. kept: int64 `[layers, kv_heads, K]`, ascending offsets in the region of all that stays: survivors, and
        the tail after the windows.
    """

    seq_id: int
    job: PartJob
    state: SequenceState
    start: int
    end: int
    cached: int
    layers: Sequence[int]
    blocks: np.ndarray
    chosen: torch.Tensor
    kept: torch.Tensor
