"""The compression jobs of a step, and what compression means for prefill chunks, admission and growth."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from collections.abc import Sequence as Sequences
from dataclasses import replace
from typing import Any

from kvllm.compression.queries import window_tokens
from kvllm.config import EngineConfig
from kvllm.core.block_manager import BlockManager
from kvllm.core.capacity import peak_blocks
from kvllm.core.policies import CompressionPolicy, EngineLoad
from kvllm.core.protocol import CompressionJob, PartJob, ScoringStart
from kvllm.core.regions import Region
from kvllm.core.sequence import Sequence
from kvllm.core.step import Step
from kvllm.core.tables import BlockTable


class CompressionPlanner:
    """Puts compressions into a step, over the scheduler's blocks: what the policy names, in tables and lengths at once,
    so that whoever plans after it finds the blocks free."""

    def __init__(self, policy: CompressionPolicy[Any], config: EngineConfig, blocks: BlockManager) -> None:
        self.policy = policy
        self.config = config
        self.blocks = blocks

    # Jobs

    def plan(self, step: Step, running: Sequences[Sequence], decode_steps: int) -> None:
        """Compress what was just prefilled, and what the policy names, with the tokens that decodes leave over.

        running: all running sequences, oldest first. decode_steps: see EngineLoad.
        """
        step.decode_tokens = len(running)
        load = EngineLoad(decode_steps, self._available(running), step.missing_blocks, step.compression_tokens)
        unscored = self.policy.unscored(running)
        if unscored and self.policy.foresees_compression(running, load):
            self._score(step, unscored)
        decoding = []
        for seq in running:
            if seq.logical_length <= self._compressed_at_once(seq):
                if region := self._complete(seq):
                    self._compress_at_once(step, seq, region)
            elif not seq.is_prefilling:
                decoding.append(seq)
        load = replace(load, available_blocks=self._available(decoding), tokens=step.compression_tokens)
        for seq, region in self.policy.select(decoding, load):
            if self.policy.at_once:
                self._compress_at_once(step, seq, region)
            else:
                self._compress(step, seq, region)

    def started(self, step: Step, seq: Sequence) -> None:
        """A sequence starts, and its first chunk may have output already, which is compressed on its way in."""
        if self.refills_compressed(seq):
            self._score(step, self.policy.unscored([seq]))

    def _score(self, step: Step, sequences: Iterable[Sequence]) -> None:
        """Let windows be scored from the first whole block of output on that is not stored yet."""
        for seq in sequences:
            first_block = self.blocks.blocks_for(max(seq.cached_length, seq.prompt_length))
            step.plan.scored.append(ScoringStart(seq.seq_id, first_block * self.config.block_size))
            seq.scored(first_block * self.config.block_size)

    def most_drafts(self, seq: Sequence) -> int:
        """How many drafted tokens of a sequence are computed before what its length alone lets be compressed is due."""
        if not self.policy.at_once:
            return sys.maxsize
        cached = seq.cached_length
        return self.policy.regions_of(seq).next_end(cached, seq.uncompressed_tail) - cached - 1

    def can_compress(self, seq: Sequence) -> bool:
        """Whether something of a sequence is complete."""
        return self._complete(seq) is not None

    def compress_complete(self, step: Step, seq: Sequence) -> bool:
        """Compress all that is complete. False if nothing is, or it cannot be copied."""
        region = self._complete(seq)
        return region is not None and self._compress(step, seq, region)

    def _compress_at_once(self, step: Step, seq: Sequence, region: Region) -> None:
        """Compress as much as there are tokens for. For the rest the sequence waits, and computes nothing meanwhile.

        It waits for blocks, too, where the policy compresses at once: what it samples must not depend on the load.
        Survivors move once they are chosen in all windows: queries of a window attend to those before it, and what they
        find there must not depend on the load. After windows that do not lose whole blocks, moreover, the others would
        begin inside of blocks.
        """
        if self.policy.config.spec.reselects:  # there is no query to compute
            self._compress(step, seq, region)
            return
        chosen = self._chosen(seq, region)
        cost = window_tokens(self.policy.config, region.size)
        affordable = step.compression_tokens // cost
        if not (affordable or step.plan.compressions or step.plan.choices):
            affordable = 1
        if chosen + affordable >= region.count:
            waits = not self._compress(step, seq, region) and self.policy.at_once
            step.blocked = step.blocked or waits
        else:
            waits = True
            if affordable:
                self._choose(step, seq, replace(region, count=chosen + affordable))
        if waits:
            step.deferred.add(seq.seq_id)

    @staticmethod
    def _chosen(seq: Sequence, region: Region) -> int:
        """Windows of a region whose survivors were chosen in steps before."""
        chosen = seq.choosing
        if chosen is None or chosen.count >= region.count or replace(region, count=chosen.count) != chosen:
            return 0
        return chosen.count

    def _choose(self, step: Step, seq: Sequence, region: Region) -> None:
        """Plan the choice of survivors in windows that are compressed in a later step, up to the end of a region."""
        step.plan.choices.append(self._job(step, seq, region, [(own, 0, []) for own in self._by_part(seq, region)]))
        seq.choosing = region

    def _compressed_at_once(self, seq: Sequence) -> int:
        """Logical length up to which complete windows wait for no policy: output that a preempted sequence computes
        again, and a prompt that may be compressed. The prompt's windows are compressed when all of it is computed."""
        return max(seq.refill_length, seq.prompt_length if seq.tail_start < seq.prompt_length else 0)

    def _complete(self, seq: Sequence) -> Region | None:
        if seq.logical_length < seq.prompt_length or self.policy.unscored([seq]):
            return None
        return self.policy.regions_of(seq).complete(seq.cached_length, seq.uncompressed_tail)

    def _compress(self, step: Step, seq: Sequence, region: Region) -> bool:
        """Plan the compression of a region. The blocks it empties are free at once.

        A region with a shared block needs fresh blocks for its survivors. Returns False if they are not there.
        """
        regions, length = self._by_part(seq, region), seq.logical_length
        moves = [(table, self._blocks_of(table, length, own)) for table, own in zip(seq.tables, regions, strict=False)]
        if sum(table.blocks_to_compact(*where) for table, where in moves) > self.blocks.num_available:
            return False
        compacted = [
            (own, where[1], table.compact(*where, own.dropped))
            for own, (table, where) in zip(regions, moves, strict=True)
        ]
        job = self._job(step, seq, region, compacted)
        step.plan.compressions.append(job)
        tail = self.policy.regions_of(seq).tail_after(seq.cached_length, regions[0])
        seq.compacted(regions[0], tail, self.policy.dropped(job))
        return True

    def _job(
        self, step: Step, seq: Sequence, region: Region, parts: Iterable[tuple[Region, int, list[int]]]
    ) -> CompressionJob:
        """A job of the windows up to the end of a region. Those that are left to be chosen from count in the budget.

        parts: of each the region, its blocks and their destinations.
        """
        block_size = self.config.block_size
        jobs = [
            PartJob(own.start // block_size, own.count, own.size, own.retain, own.stride, num_blocks, destinations)
            for own, num_blocks, destinations in parts
        ]
        job = CompressionJob(seq.seq_id, jobs, self._chosen(seq, region))
        step.take_for_compression(job.num_choices * window_tokens(self.policy.config, jobs[0].size))
        return job

    def _by_part(self, seq: Sequence, region: Region) -> list[Region]:
        """The region of each part that attends all tokens, from that of the first."""
        regions, first = [], seq.tables[0].dropped
        for table, retain in zip(seq.tables, self.policy.retained(seq, region), strict=False):
            own = replace(region, start=region.start + first - table.dropped, retain=retain)
            regions.append(self.policy.selected_from(seq, own))
        return regions

    def _blocks_of(self, table: BlockTable, length: int, region: Region) -> tuple[int, int, int]:
        """Where in the table of a text of `length` tokens a region begins, how many blocks it covers, and how many its
        survivors fill."""
        block_size = self.config.block_size
        first = region.start // block_size
        dropped, odd = divmod(region.dropped, block_size)
        if not region.dropped or (self.policy.config.spec.keeps_end and not odd and region.count == 1):
            return first, dropped, 0  # nothing moves: the blocks at the beginning are let go
        if odd or region.end % block_size:  # the KV pairs after the region, or in its last block, move up
            after = self.blocks.blocks_for(length - table.dropped - region.dropped)
            return first, len(table.blocks) - first, after - first
        blocks = (region.end - region.start) // block_size
        return first, blocks, blocks - dropped

    # Prefill, admission and growth

    def chunk(self, seq: Sequence, num_tokens: int) -> int:
        """How many of `num_tokens` tokens of a prefill come before the next point of compression."""
        prompt_left = max(0, seq.prompt_length - seq.logical_length)
        regions, prompt_end = self.policy.regions_of(seq), seq.cached_length + prompt_left
        if prompt_left and (self.policy.config.compress_prompt or regions.complete(prompt_end, 0)):
            return min(num_tokens, prompt_left)
        tail = 0 if prompt_left else seq.uncompressed_tail
        return min(num_tokens, regions.next_end(prompt_end, tail) - seq.cached_length)

    @staticmethod
    def refills_compressed(seq: Sequence) -> bool:
        """Whether a preempted sequence's output is compressed on its way in, window by window."""
        return seq.num_generated > 0

    def peak_blocks(self, seq: Sequence, total: int) -> int:
        """Most blocks that a sequence alone needs to reach `total` tokens in the layers that attend all tokens."""
        return peak_blocks(self.config, self.policy.regions_by_group(seq), seq.prompt_length, total)

    def growth(self, seq: Sequence) -> int:
        """Blocks that a sequence will add to its tables before it has a window to compress."""
        logical = max(seq.logical_length, seq.prompt_length)
        cached = seq.cached_length + logical - seq.logical_length
        complete = self.policy.regions_of(seq).next_end(cached, seq.uncompressed_tail)
        target = min(complete, cached + seq.max_length - 1 - logical)
        return self.blocks.growth(seq, logical + target - cached)

    def _available(self, sequences: Sequences[Sequence]) -> int:
        """Blocks that are left for what can be compressed, once each of some sequences has its next token in groups
        with a window."""
        available = self.blocks.num_available
        for seq in sequences if self.blocks.full_parts < len(self.blocks.group_of) else ():
            end = seq.logical_length + 1
            if end > seq.room_end:
                available -= sum(table.num_missing(end) for table in seq.tables if not table.is_full)
        return available
