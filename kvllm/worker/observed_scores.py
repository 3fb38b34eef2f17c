"""Scores of KV pairs that are added up while queries pass by, so that a compression needs no pass of the model.

A score lies beside its KV pair in the pool (`PagedKVCache.scores`), and moves with its block. Only a sequence's own
output is scored, whose blocks no other sequence scores in: what it shares with others are prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from kvllm.attention.base import AttentionBackend, AttentionBatch, ScoredChunk, ScoreWindows
from kvllm.compression.mass import Softmax, batched_attention_mass
from kvllm.config import CompressionConfig
from kvllm.core.protocol import CompressionJob
from kvllm.core.regions import Windows, make_regions
from kvllm.kvcache.cache import PagedKVCache
from kvllm.kvcache.ops.base import KVOperations
from kvllm.worker.transfer import to_device

NEVER = np.iinfo(np.int32).max


def score_windows(config: CompressionConfig, block_size: int) -> ScoreWindows:
    """The windows of a configuration that observes its scores."""
    regions = make_regions(config, block_size)
    assert isinstance(regions, Windows)
    squared = config.spec.observable == "squares"
    return ScoreWindows(regions.size, regions.stride, regions.size - config.buffer, squared)


class ObservedScores:
    """Where the scored windows of each running sequence begin, and their scores in a cache.

    window_start: int32 `[num_slots]`, on the host: the first KV pair of each sequence's earliest window; NEVER for one
        that is not scored.
    """

    def __init__(self, cache: PagedKVCache, config: CompressionConfig, num_slots: int) -> None:
        assert cache.scores is not None
        self.scores = cache.scores
        self.block_size = cache.shape.block_size
        self.windows = score_windows(config, self.block_size)
        self.window_start = np.full(num_slots, NEVER, dtype=np.int32)

    def clear(self, table_slot: int) -> None:
        self.window_start[table_slot] = NEVER

    def save(self, table_slot: int) -> int:
        """Where a sequence's windows begin, for `restore`. Its scores move with its blocks."""
        return int(self.window_start[table_slot])

    def restore(self, table_slot: int, saved: int) -> None:
        self.window_start[table_slot] = saved

    def start(self, table_slot: int, kv_index: int) -> None:
        """Windows from KV pair `kv_index` on are scored."""
        self.window_start[table_slot] = kv_index

    def advance(self, table_slot: int, job: CompressionJob) -> None:
        """A job's windows are compressed: the next ones begin at the first whole block of what is left uncompressed."""
        end = job.first_block * self.block_size + job.num_windows * job.stride
        self.window_start[table_slot] = -(-(end - job.dropped) // self.block_size) * self.block_size

    def compact(self, job: CompressionJob, sources: np.ndarray, offsets: torch.Tensor) -> None:
        """Let the scores of what is behind a job's windows move with its KV pairs.

        sources: the region's blocks. offsets: of the survivors in the region, int64 `[layers, kv_heads, kept]`.
        """
        if offsets.shape[-1] == job.num_windows * job.retain and job.stride == job.size:
            return  # nothing uncompressed has moved inside a block
        device = self.scores.device
        index = torch.arange(offsets.shape[-1], device=device)
        source, destination = to_device(sources.astype(np.int64), device), to_device(job.destinations, device)
        layer = torch.arange(offsets.shape[0], device=device)[:, None, None]
        head = torch.arange(offsets.shape[1], device=device)[:, None]
        moved = self.scores[layer, source[offsets // self.block_size], head, offsets % self.block_size]
        self.scores[layer, destination[index // self.block_size], head, index % self.block_size] = moved


class ScoringBackend(AttentionBackend):
    """A backend, and the scores of sequences that it leaves to others, from a second product of queries and keys."""

    name = "scoring"

    def __init__(self, backend: AttentionBackend, operations: KVOperations) -> None:
        super().__init__(backend.cache, backend.num_query_heads, backend.scale, backend.layers)
        self.backend = backend
        self.operations = operations

    def plan(self, batch: AttentionBatch) -> tuple[Any, AttentionBatch]:
        return self.backend.plan(batch), batch

    def run(
        self,
        layer: int,
        queries: torch.Tensor,
        plan: tuple[Any, AttentionBatch],
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        inner, batch = plan
        softmax = Softmax(self.scale, self.layers[layer].soft_cap, sinks)
        for chunk in batch.scored_chunks if self.layers[layer].window is None else ():
            assert batch.windows is not None
            for start, begin, end in windows_of(chunk, batch.windows):
                self._add(layer, queries, softmax, batch, batch.windows, chunk, start, begin, end)
        return self.backend.run(layer, queries, inner, sinks)

    def _add(
        self,
        layer: int,
        queries: torch.Tensor,
        softmax: Softmax,
        batch: AttentionBatch,
        windows: ScoreWindows,
        chunk: ScoredChunk,
        start: int,
        begin: int,
        end: int,
    ) -> None:
        """Add the scores in the window from `start` on, of query tokens whose KV pairs are `begin .. end - 1`."""
        assert self.cache.scores is not None
        block_size = self.cache.shape.block_size
        num_scored = min(windows.num_scored, end - start)
        first, last = start // block_size, (start + num_scored - 1) // block_size
        blocks = batch.block_tables[chunk.sequence : chunk.sequence + 1, first : last + 1]
        row = chunk.begin + begin - chunk.kv_index
        of_window = batched_attention_mass(
            queries[None, row : row + end - begin].transpose(1, 2),
            self.operations.gather_keys([layer], blocks, num_scored),
            num_scored,
            torch.arange(begin - start, end - start, device=queries.device).clamp_(max=num_scored - 1),
            squared=windows.squared,
            softmax=softmax,
        )[0]
        scores = self.cache.scores[self.cache.place(layer)]
        of_blocks = scores[blocks[0].long()].transpose(0, 1).flatten(1)  # [kv_heads, KV pairs of the blocks], a copy
        of_blocks[:, max(0, begin - start) : num_scored] = 0
        of_blocks[:, :num_scored] += of_window
        scores[blocks[0].long()] = of_blocks.unflatten(1, (-1, block_size)).transpose(0, 1)


def windows_of(chunk: ScoredChunk, windows: ScoreWindows) -> Iterator[tuple[int, int, int]]:
    """Each window that tokens of a chunk take part in: where it begins, and the first and the end of their KV pairs."""
    begin, end = max(chunk.kv_index, chunk.window_start), chunk.kv_index + chunk.end - chunk.begin
    if begin >= end:
        return
    first = chunk.window_start + (begin - chunk.window_start) // windows.stride * windows.stride
    if first > chunk.window_start and windows.before(begin - first):
        first -= windows.stride
    for start in range(first, end, windows.stride):
        yield start, max(begin, start), min(end, start + windows.size)
