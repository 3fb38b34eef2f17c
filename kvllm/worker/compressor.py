"""A compression event on one rank: recompute the windows' queries, select, compact.

Windows of all sequences go through the model together, in passes of as many as fit the token budget, at least one. All
passes read the cache
as it was before the event; what is kept is applied at the end, in one movement. So neither the order of the windows nor
the size of a pass can change what survives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvllm.attention.backend import AttentionBackend, AttentionBatch
from kvllm.attention.cache import PagedKVCache
from kvllm.attention.compaction import pad, region_indices
from kvllm.attention.compression import METHODS
from kvllm.attention.compression.queries import query_offsets
from kvllm.config import CompressionConfig
from kvllm.core.compression_policy import Windows
from kvllm.core.protocol import CompressionJob
from kvllm.worker.state import BlockTables, SequenceState


@dataclass(frozen=True)
class _Window:
    """One window of a job, by the index in the cache of its first entry."""

    state: SequenceState
    start: int


class Compressor:
    """Executes the compression jobs of a plan."""

    def __init__(
        self,
        model: Any,
        cache: PagedKVCache,
        backend: AttentionBackend,
        tables: BlockTables,
        config: CompressionConfig,
        windows: Windows,
        max_num_batched_tokens: int,
    ) -> None:
        self.model = model
        self.cache = cache
        self.backend = backend
        self.tables = tables
        self.config = config
        self.windows = windows
        self.select = METHODS[config.method]
        self.offsets = query_offsets(windows.size, config.buffer, config.query_stride)
        self.windows_per_pass = max(1, max_num_batched_tokens // len(self.offsets))

    def compress(self, jobs: list[CompressionJob], states: dict[int, SequenceState]) -> None:
        """Select and compact, then update the tables and cached lengths of the jobs' sequences."""
        windows = [window for job in jobs for window in self._windows_of(job, states[job.seq_id])]
        passes = range(0, len(windows), self.windows_per_pass)
        kept = torch.cat([self._kept(windows[i : i + self.windows_per_pass]) for i in passes], dim=1)
        self._compact(jobs, states, kept)
        for job in jobs:
            state = states[job.seq_id]
            self.tables.replace(state, job.first_block, job.region_blocks, job.destinations)
            state.cached_length -= job.num_windows * self.windows.dropped

    def _windows_of(self, job: CompressionJob, state: SequenceState) -> Iterator[_Window]:
        start = job.first_block * self.windows.block_size
        for _ in range(job.num_windows):
            yield _Window(state, start)
            start += self.windows.stride

    def _kept(self, windows: list[_Window]) -> torch.Tensor:
        """One pass of the model over the windows' query rows -> kept offsets `[layers, windows, kv_heads, retain]`."""
        device = self.cache.data.device
        index = np.array([window.start for window in windows])[:, None] + self.offsets  # [windows, rows]
        dropped = np.array([window.state.dropped for window in windows])[:, None]
        positions = index + dropped  # an entry that was never compressed lies behind everything that was dropped
        token_ids = [w.state.token_ids[p] for w, row in zip(windows, positions.tolist(), strict=True) for p in row]
        tables = self.tables.table[[window.state.row for window in windows]]
        first = np.array([window.start // self.windows.block_size for window in windows])[:, None]
        in_window = np.take_along_axis(tables, first + np.arange(self.windows.blocks), axis=1)
        window_tables = torch.from_numpy(in_window).to(device)
        num_blocks = int(first.max()) + self.windows.blocks
        plan = self.backend.plan(
            AttentionBatch(
                query_starts=torch.arange(0, index.size + 1, len(self.offsets), dtype=torch.int32, device=device),
                query_index=torch.from_numpy(index.astype(np.int32).ravel()).to(device),
                block_tables=torch.from_numpy(np.ascontiguousarray(tables[:, :num_blocks])).to(device),
            )
        )
        kept: list[torch.Tensor] = []

        def select(layer: int, queries: torch.Tensor) -> None:
            per_window = queries.view(len(windows), len(self.offsets), *queries.shape[1:]).transpose(1, 2)
            kept.append(
                self.select(
                    per_window,
                    self.cache.gather_keys(layer, window_tables),
                    retain=self.windows.retain,
                    buffer=self.config.buffer,
                    chunk_budget=self.config.chunk_budget,
                    max_chunk=self.config.max_chunk,
                )
            )

        self.model.recompute_queries(
            torch.tensor(token_ids, device=device),
            torch.from_numpy(positions.ravel()).to(device),
            self.backend,
            plan,
            select,
        )
        return torch.stack(kept)

    def _compact(self, jobs: list[CompressionJob], states: dict[int, SequenceState], kept: torch.Tensor) -> None:
        """Move the survivors of all jobs, in all layers, at once."""
        block_size = self.windows.block_size
        indices, sources = [], []
        window = 0
        for job in jobs:
            state = states[job.seq_id]
            end = self.windows.end(job.first_block * block_size, job.num_windows)
            region_end = min(state.cached_length, (job.first_block + job.region_blocks) * block_size)
            of_job = kept[:, window : window + job.num_windows]
            indices.append(region_indices(of_job, self.windows.size, self.windows.overlap, region_end - end))
            sources.append(self.tables.table[state.row, job.first_block : job.first_block + job.region_blocks])
            window += job.num_windows
        self.backend.compact(
            pad(indices),
            self._stack(sources),
            self._stack([job.destinations for job in jobs]),
        )

    def _stack(self, rows: list[Any]) -> torch.Tensor:
        """Lists of block ids -> int64 `[S, longest]`, padded at the end by each row's last block."""
        longest = max(len(row) for row in rows)
        padded = np.array([[*row, *[row[-1]] * (longest - len(row))] for row in rows], dtype=np.int64)
        return torch.from_numpy(padded).to(self.cache.data.device)
