"""A compression event on one rank: choose what survives in the windows of all jobs, then move it.

The selection is applied at the end, in one movement, so all of it is chosen from the cache as it was before the event.
So it is where there are too many windows of a sequence for one step: what is chosen in steps before is held.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from kvllm.compression.model_inputs import WithModelInputs
from kvllm.core.protocol import CompressionJob, PartJob
from kvllm.kvcache.compaction import pad, region_indices
from kvllm.worker.features.base import WorkerParts
from kvllm.worker.selector import Kept, Selector
from kvllm.worker.state import SequenceState, part_of_layers
from kvllm.worker.timing import PhaseClock
from kvllm.worker.transfer import to_device
from kvllm.worker.windows import CompressedPart, Move


class Compressor:
    """Executes the compression jobs of a plan. What features keep of KV pairs moves with these.

    parts: those of KV groups that attend all tokens; nothing of others is compressed.
    """

    def __init__(self, worker: WorkerParts, select: WithModelInputs | None) -> None:
        self.operations = worker.operations
        self.features = worker.features
        self.block_size = worker.shape.block_size
        part_of = part_of_layers(worker.config, worker.shape.num_layers)
        self.parts = [
            CompressedPart(tables, [layer for layer, of in enumerate(part_of) if of == part])
            for part, tables in enumerate(worker.tables.parts[: worker.tables.full_parts])
        ]
        self.selector = Selector(worker, self.parts, select)

    def compress(
        self,
        choices: list[CompressionJob],
        jobs: list[CompressionJob],
        states: dict[int, SequenceState],
        clock: PhaseClock,
    ) -> None:
        """Select and compact, then update the tables of the jobs' sequences.

        choices: of which survivors are selected and held, and nothing more.
        """
        moving = [job for job in jobs if job.moves]
        for feature in self.features:
            for job in moving:
                feature.before_choice(job, self.parts[0].region_blocks(job.parts[0], states[job.seq_id]))
        with clock.measure("select"):
            kept = self._select(choices, moving, states, clock)
        with clock.measure("compact"):
            for begin, end in self._runs(moving, states):
                for part, of_part in enumerate(kept):
                    self._compact(part, moving[begin:end], states, of_part[begin:end])
            for job in jobs:
                state = states[job.seq_id]
                for part, own in zip(self.parts, job.parts, strict=True):
                    if own.dropped:
                        part.tables.compact(state.table_slot, own)
                for feature in self.features:
                    feature.compacted(job, state)

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
            before = states[job.seq_id].chosen if job.chosen else []
            states[job.seq_id].chosen = [*before, list(found)]
        together = []
        for job, found in zip(moving, of_jobs[len(choices) :], strict=True):
            before = states[job.seq_id].chosen if job.chosen else []
            states[job.seq_id].chosen = []
            steps = zip(*before, found, strict=True)  # by part
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
        for part, own in zip(self.parts, job.parts, strict=True):
            region = part.tables.table[table_slot, own.first_block : own.first_block + len(own.destinations)]
            if region.tolist() != own.destinations:
                return True
        return False

    def _compact(self, part: int, jobs: list[CompressionJob], states: dict[int, SequenceState], kept: Kept) -> None:
        """Move the survivors of all jobs in a part, in all its layers, at once.

        kept: of each job `[layers, windows, kv_heads, retain]`, None where all survives.
        """
        moves = [
            self._move(self.parts[part], job.seq_id, job.parts[part], states[job.seq_id], of_job)
            for job, of_job in zip(jobs, kept, strict=True)
            if of_job is not None
        ]
        if not moves:
            return
        for feature in self.features:
            feature.move(moves)
        self.operations.compact(
            pad([move.kept for move in moves]),
            self._stack([move.blocks for move in moves]),
            self._stack([move.job.destinations for move in moves]),
        )

    def _move(
        self, part: CompressedPart, seq_id: int, job: PartJob, state: SequenceState, chosen: torch.Tensor
    ) -> Move:
        start = job.first_block * self.block_size
        cached = int(part.tables.kv_lengths([state.table_slot])[0])
        end = min(cached, start + job.region_blocks * self.block_size)
        kept = region_indices(chosen, job.size, job.size - job.stride, end - start - job.span)
        return Move(seq_id, job, state, start, end, cached, part.layers, part.region_blocks(job, state), chosen, kept)

    def _stack(self, regions: Sequence[Sequence[int] | np.ndarray]) -> torch.Tensor:
        """Lists of block ids -> int64 `[S, longest]`, padded at the end by each list's last block."""
        longest = max(len(blocks) for blocks in regions)
        padded = np.array([[*blocks, *[blocks[-1]] * (longest - len(blocks))] for blocks in regions], dtype=np.int64)
        return to_device(padded, self.operations.cache.data.device)
