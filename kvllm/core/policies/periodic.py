"""Windows of some sequences at every tick of a clock: the paper's schedule."""

from __future__ import annotations

from collections.abc import Sequence as Sequences

from kvllm.config import CompressionConfig
from kvllm.core.policies.base import Candidate, EngineLoad
from kvllm.core.policies.windows import EventOptions, EventPolicy
from kvllm.core.regions import Region
from kvllm.core.sequence import Sequence
from kvllm.kvcache.groups import UNIFORM, KVGroup


class Periodic(EventOptions, frozen=True, tag="periodic"):
    """Every `period` decode steps of the engine, at most `max_sequences` sequences. Options as `EventOptions`."""


class PeriodicPolicy(EventPolicy[Periodic]):
    """Kara's schedule (paper, section 4.3 and Alg. 1): every `period` decode steps at most `max_sequences` sequences.

    The first event is not before more than a window's length of steps. It takes a sequence's trailing window, as in the
    paper; where scores are observed it takes the earliest one, since these belong to windows that follow each other. Of
    the eligible sequences those that stored most since they were last served go first, so none starves. An event with
    more windows than a step may compress goes on in the following steps, so fast that it ends before the next one.
    """

    options_type = Periodic

    def __init__(self, config: CompressionConfig, block_size: int, groups: Sequences[KVGroup] = UNIFORM) -> None:
        super().__init__(config, block_size, groups)
        self._last_event = 0
        self._left = 0  # sequences that the present event may still serve
        self._pace = 1  # windows in a step with which it ends before the next one

    def _region_of(self, seq: Sequence) -> Region | None:
        if not self.reselects:
            return super()._region_of(seq)
        return self.regions_of(seq).first(seq.cached_length, seq.uncompressed_tail)

    def select(self, decoding: Sequences[Sequence], load: EngineLoad) -> list[Candidate]:
        steps = load.decode_steps
        due = steps > self.options.window_blocks * self.regions.block_size and steps % self.options.period == 0
        begins = due and steps != self._last_event  # steps without a decode do not move the clock
        if begins:
            self._last_event = steps
            self._left = self.event_sequences
        if not self._left:
            return []
        jobs = self.eligible(decoding)
        jobs.sort(key=lambda job: (job[0].carried_tail - job[0].uncompressed_tail, job[0].seq_id))
        jobs = jobs[: self._left]
        if begins:
            self._pace = -(-len(jobs) // self.options.period)
        most = self.windows_now(decoding, load, self._pace)
        self._left = self._left - most if most < len(jobs) else 0
        return jobs[:most]
