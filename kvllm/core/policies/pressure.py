"""Windows while blocks are short, and no more than needed."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import replace

from kvllm.config import CompressionConfig
from kvllm.core.policies.base import Candidate, EngineLoad
from kvllm.core.policies.windows import EventOptions, EventPolicy
from kvllm.core.regions import Region
from kvllm.core.sequence import Sequence
from kvllm.kvcache.groups import UNIFORM, KVGroup


class Pressure(EventOptions, frozen=True, tag="pressure"):
    """Only while blocks are short, and only what is needed to make them last `period` steps more. Options as
    `EventOptions`."""


class PressurePolicy(EventPolicy[Pressure]):
    """Compress windows only while blocks are short, and only as many as are needed (our own).

    Blocks are short when a waiting sequence lacked some, or when the running ones would use up the pool within `period`
    steps. Sequences go first whose released blocks serve longest for the query tokens that are recomputed; one that
    ends within `period` steps is left alone, unless the next step would have to preempt. The need is looked at once in
    a period, or when a preemption is near, so that windows are scored together; and in the steps after, until it is
    met. A step compresses more windows than it should only for blocks that are missing now.

    Where scores are added up while sequences decode, that costs nothing while there is room for all: it begins when the
    running sequences could outgrow the pool. What they have stored until then stays, unless they are preempted.
    """

    options_type = Pressure

    def __init__(self, config: CompressionConfig, block_size: int, groups: Sequences[KVGroup] = UNIFORM) -> None:
        super().__init__(config, block_size, groups)
        self._last_look = 0
        self._unmet = False

    def foresees_compression(self, running: Sequences[Sequence], load: EngineLoad) -> bool:
        return load.missing_blocks > 0 or sum(map(self._growth_to_end, running)) > load.available_blocks

    def select(self, decoding: Sequences[Sequence], load: EngineLoad) -> list[Candidate]:
        urgent = self.full_parts * sum(map(self._fills_block, decoding)) - load.available_blocks
        looks = load.decode_steps % self.options.period == 0 and load.decode_steps != self._last_look
        if not (urgent > 0 or looks or self._unmet):
            return []
        self._last_look = load.decode_steps
        needed = max(load.missing_blocks, sum(map(self._growth, decoding)) - load.available_blocks)
        self._unmet = False
        if needed <= 0:
            return []
        jobs = self.eligible(decoding)
        jobs = [job for job in jobs if urgent > 0 or self._remaining(job[0]) > self.options.period]
        jobs.sort(key=self._order)
        return self._enough(jobs[: self.event_sequences], needed, urgent, self.windows_now(decoding, load))

    def _region_of(self, seq: Sequence) -> Region | None:
        """All that is complete: while blocks lasted, more than one window of a sequence may have filled up."""
        return self.regions_of(seq).complete(seq.cached_length, seq.uncompressed_tail)

    def eligible(self, decoding: Sequences[Sequence]) -> list[Candidate]:
        return super().eligible([seq for seq in decoding if seq.is_scored] if self.reselects else decoding)

    def _enough(self, jobs: list[Candidate], needed: int, urgent: int, most: int) -> list[Candidate]:
        """The first windows that release `needed` blocks together, `most` of them at most; but at least those that
        release `urgent` blocks."""
        released = 0
        chosen: list[Candidate] = []
        for seq, region in jobs:
            missing, missing_now = (number * self.regions.block_size - released for number in (needed, urgent))
            if missing <= 0:
                break
            each = self.released(seq, region)
            wanted = min(region.count, -(-missing // each))
            beside = (region.start - self.selected_from(seq, region).start) // region.size
            count = min(wanted, max(most - beside, -(-missing_now // each), not chosen))
            self._unmet = count < wanted
            if count <= 0:
                break
            most -= count + beside
            released += count * each
            chosen.append((seq, replace(region, count=count)))
        return chosen

    def _order(self, job: Candidate) -> tuple[float, int, int]:
        """Released KV pairs times the steps they are of use, for each KV pair scored; then who waited longest."""
        seq, region = job
        worth = region.dropped * self._remaining(seq) / (region.count * region.size)
        return -worth, seq.carried_tail - seq.uncompressed_tail, seq.seq_id

    def _growth(self, seq: Sequence) -> int:
        """Blocks that a sequence adds within `period` steps."""
        pairs = seq.cached_length + min(self.options.period, self._remaining(seq))
        return self.full_parts * max(0, -(-pairs // self.regions.block_size) - len(seq.tables[0].blocks))

    def _growth_to_end(self, seq: Sequence) -> int:
        """Blocks that a sequence and its completions add if all of them get as long as they may."""
        pairs = seq.cached_length + seq.max_length - 1 - seq.logical_length  # the last token is never stored
        completions = 1 + seq.forks_pending
        blocks = completions * -(-pairs // self.regions.block_size) - len(seq.tables[0].blocks)
        sliding = sum(table.growth(seq.max_length - 1) for table in seq.tables if table.group.window is not None)
        return self.full_parts * blocks + completions * sliding

    def _fills_block(self, seq: Sequence) -> bool:
        return seq.cached_length == len(seq.tables[0].blocks) * self.regions.block_size

    @staticmethod
    def _remaining(seq: Sequence) -> int:
        """Tokens until a sequence ends at the latest."""
        return seq.max_length - seq.num_tokens
