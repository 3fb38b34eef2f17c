"""A compression event on one rank: choose what survives in the windows of all jobs, then move it.

The selection is applied at the end, in one movement, so all of it is chosen from the cache as it was before the event.
So it is where there are too many windows of a sequence for one step: what is chosen in steps before is held.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from kvllm.core.protocol import CompressionJob
from kvllm.kvcache.compaction import pad, region_indices
from kvllm.kvcache.ops.base import KVOperations
from kvllm.worker.attention_state import AttentionMass, RaggedLengths
from kvllm.worker.observed_scores import ObservedScores
from kvllm.worker.recall import Recall
from kvllm.worker.selector import CompressedPart, Kept, Selector
from kvllm.worker.state import BlockTables, SequenceState
from kvllm.worker.timing import PhaseClock
from kvllm.worker.transfer import to_device


class Compressor:
    """Executes the compression jobs of a plan.

    ragged, mass, observed: state that some methods keep beside the cache. recall: holds what is dropped, where there is
    one part.
    """

    def __init__(
        self,
        selector: Selector,
        operations: KVOperations,
        ragged: RaggedLengths | None = None,
        mass: AttentionMass | None = None,
        observed: ObservedScores | None = None,
        recall: Recall | None = None,
    ) -> None:
        self.selector = selector
        self.parts = selector.parts
        self.operations = operations
        self.ragged = ragged
        self.mass = mass
        self.observed = observed
        self.recall = recall
        self.block_size = operations.cache.shape.block_size
        self._held: dict[int, list[Kept]] = {}  # by sequence, for each step and part, of one job

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop what is held of sequences."""
        for seq_id in seq_ids:
            self._held.pop(seq_id, None)

    def compress(
        self,
        choices: list[CompressionJob],
        jobs: list[CompressionJob],
        states: dict[int, SequenceState],
        clock: PhaseClock,
    ) -> None:
        """Select and compact, then update the tables and cached lengths of the jobs' sequences.

        choices: of which survivors are selected and held, and nothing more.
        """
        moving = [job for job in jobs if job.destinations]
        if self.recall:
            for job in moving:
                self.recall.before(job, self._region_blocks(self.parts[0].tables, job, states[job.seq_id]))
        with clock.measure("select"):
            kept = self._select(choices, moving, states, clock)
        with clock.measure("compact"):
            for begin, end in self._runs(moving, states):
                for part, of_part in zip(self.parts, kept, strict=True):
                    self._compact(part, moving[begin:end], states, of_part[begin:end])
            for job in jobs:
                state = states[job.seq_id]
                for part in self.parts:
                    if own := job.of_part(part.index):
                        part.tables.compact(state.table_slot, own)
                if self.observed:
                    self.observed.advance(state.table_slot, job)
                state.lengths.cached[state.table_slot] -= job.dropped

    def _select(
        self,
        choices: list[CompressionJob],
        moving: list[CompressionJob],
        states: dict[int, SequenceState],
        clock: PhaseClock,
    ) -> list[Kept]:
        """For each part, and there for each job that moves, the offsets that its windows keep."""
        if not choices and not moving:
            return []
        selected = self.selector.survivors([*choices, *moving], states, clock)
        of_jobs = list(zip(*selected, strict=True))
        for job, found in zip(choices, of_jobs, strict=False):
            if not job.chosen:
                self._held.pop(job.seq_id, None)
            self._held.setdefault(job.seq_id, []).append(list(found))
        together = []
        for job, found in zip(moving, of_jobs[len(choices) :], strict=True):
            held = self._held.pop(job.seq_id, []) if job.chosen else []
            steps = zip(*held, found, strict=True)  # by part
            together.append([None if of_part[0] is None else torch.cat(of_part, dim=1) for of_part in steps])
        return [list(of_part) for of_part in zip(*together, strict=True)]

    def _runs(self, jobs: list[CompressionJob], states: dict[int, SequenceState]) -> Iterator[tuple[int, int]]:
        """Jobs that are moved together, part by part: the first of each run and the one after its last.

        A job that needs fresh blocks may get those that a job before it gave back in any part, so it begins a run.
        """
        begins = [0] if jobs else []
        if len(self.parts) > 1:
            begins += [i for i, job in enumerate(jobs[1:], start=1) if self._takes_fresh_blocks(job, states)]
        yield from pairwise([*begins, len(jobs)])

    def _takes_fresh_blocks(self, job: CompressionJob, states: dict[int, SequenceState]) -> bool:
        table_slot = states[job.seq_id].table_slot
        for part in self.parts:
            if own := job.of_part(part.index):
                region = part.tables.table[table_slot, own.first_block : own.first_block + len(own.destinations)]
                if region.tolist() != own.destinations:
                    return True
        return False

    def _compact(
        self, part: CompressedPart, jobs: list[CompressionJob], states: dict[int, SequenceState], kept: Kept
    ) -> None:
        """Move the survivors of all jobs in a part, in all its layers, at once.

        kept: of each job `[layers, windows, kv_heads, retain]`, None where all survives.
        """
        moves = [(own, of_job) for job, of_job in zip(jobs, kept, strict=True) if (own := job.of_part(part.index))]
        indices, sources, regions = [], [], []
        for job, of_job in moves:
            assert of_job is not None
            state = states[job.seq_id]
            start = job.first_block * self.block_size
            cached = int(part.tables.kv_lengths([state.table_slot])[0])
            region_end = min(cached, start + job.region_blocks * self.block_size)
            tail = region_end - start - job.span
            indices.append(region_indices(of_job, job.size, job.size - job.stride, tail))
            sources.append(self._region_blocks(part.tables, job, state))
            if self.recall:
                self.recall.take(job, state, sources[-1], indices[-1])
            regions.append((state.table_slot, start, region_end, cached))
        if not moves:
            return
        if self.ragged:
            counts = torch.stack([(of_job[:, 0] >= 0).sum(-1) for _, of_job in moves if of_job is not None], dim=1)
            table_slots, starts, *_ = zip(*regions, strict=True)
            self.ragged.set(list(table_slots), list(starts), counts, [job.retain for job, _ in moves])
        if self.mass:
            self.mass.compact(regions, indices)
        if self.observed:
            for (job, _), blocks, offsets, region in zip(moves, sources, indices, regions, strict=True):
                *_, cached = region
                self.observed.compact(job, states[job.seq_id], cached, blocks, offsets)
        self.operations.compact(
            pad(indices),
            self._stack(sources),
            self._stack([job.destinations for job, _ in moves]),
        )

    @staticmethod
    def _region_blocks(tables: BlockTables, job: CompressionJob, state: SequenceState) -> np.ndarray:
        return tables.table[state.table_slot, job.first_block : job.first_block + job.region_blocks]

    def _stack(self, regions: list[Any]) -> torch.Tensor:
        """Lists of block ids -> int64 `[S, longest]`, padded at the end by each list's last block."""
        longest = max(len(blocks) for blocks in regions)
        padded = np.array([[*blocks, *[blocks[-1]] * (longest - len(blocks))] for blocks in regions], dtype=np.int64)
        return to_device(padded, self.operations.cache.data.device)
