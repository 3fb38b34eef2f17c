"""Replicas behind the real dispatcher and router on one virtual clock, each with a scheduler of its own.

As in the engine with several replicas, each of them is at work on a call that hands it sequences and returns a report,
after `REPORT_SECONDS` or as soon as it has nothing to do. What arrives meanwhile waits for the next call.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from msgspec import Struct

from kvllm.config import EngineConfig, require
from kvllm.core.capacity import check_pool
from kvllm.core.protocol import SampledToken, SequenceStart
from kvllm.core.sequence import Sequence as Running
from kvllm.distributed.replicas.dispatcher import Dispatcher
from kvllm.distributed.replicas.messages import REPORT_SECONDS, Ended, Report, Sampled
from kvllm.distributed.replicas.router import needed_blocks
from kvllm.simulation.cost import CostModel
from kvllm.simulation.executor import TOKEN
from kvllm.simulation.failures import Failure
from kvllm.simulation.machine import SimulatedMachine, new_sequence
from kvllm.simulation.simulate import Distribution, no_garbage_collection
from kvllm.simulation.traffic import Arrival
from kvllm.stats import EngineStats

Event = tuple[float, int, Callable[[], None]]
"""When something happens, its number, and what."""


class FleetOutcome(Struct, kw_only=True):
    """One simulated run of a fleet.

    seconds: from the first arrival to the end of the last request. busy: seconds in steps, of all replicas.
    first_tokens, latencies: seconds from each request's arrival to the report of its first, and of its last token.
    inter_token: how often a request's next token took so many seconds, in steps of 0.1 ms.
    cached_tokens: of prompts that were found in the prefix cache. moved: requests that lost their replica.
    again: prompt and output tokens that moved requests had when they began again.
    """

    replicas: int
    devices: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    busy: float
    first_tokens: list[float]
    latencies: list[float]
    inter_token: Counter[float]
    cached_tokens: int
    preemptions: int
    moved: int
    again: int

    @property
    def tokens_per_device(self) -> float:
        """Output tokens/s of a device."""
        return self.output_tokens / self.seconds / (self.replicas * self.devices)

    @property
    def first_token(self) -> Distribution:
        return Distribution.of(Counter(self.first_tokens))

    @property
    def between(self) -> Distribution:
        return Distribution.of(self.inter_token)

    def add(self, part: FleetOutcome) -> None:
        """Add another part of the same fleet, which ran beside this one."""
        for name in self.__struct_fields__:
            if name not in ("devices", "seconds"):
                setattr(self, name, getattr(self, name) + getattr(part, name))
        self.seconds = max(self.seconds, part.seconds)


def simulate_fleet(
    config: EngineConfig,
    cost: CostModel,
    arrivals: Sequence[Arrival],
    replicas: int,
    *,
    routing: str = "both",
    failures: Sequence[Failure] = (),
    report_seconds: float = REPORT_SECONDS,
    recalled_pairs: float | None = None,
) -> FleetOutcome:
    """Serve requests, in order of arrival, by so many replicas. Prefixes are cached if the requests name some.

    report_seconds: how often a replica at work reports; 0: after each step, as if it were in the same process.
    recalled_pairs: see `simulate`.

    Raises ConfigError if a sequence of `max_model_len` does not fit the pool, or a failure is of no replica;
    RequestError if a request does not fit.
    """
    require(replicas >= 1, "replicas", replicas, "at least 1")
    for failure in failures:
        require(failure.replicas.stop <= replicas, "replica", failure.replicas[-1], f"below {replicas}")
    shares = config.enable_prefix_caching and any(arrival.request.prefix for arrival in arrivals)
    config = msgspec.structs.replace(config, enable_prefix_caching=shares)
    check_pool(config)
    with no_garbage_collection():
        fleet = _Fleet(config, cost, arrivals, replicas, routing, report_seconds, recalled_pairs)
        for failure in failures:
            fleet.plan(failure)
        return fleet.run()


class _Replica:
    """inbox: sequences that it has been sent and not begun. is_called: whether it is at work on a call, one of `calls`,
    which ends at `call_ends` at the latest."""

    def __init__(self, index: int, machine: SimulatedMachine) -> None:
        self.index = index
        self.machine = machine
        self.inbox: list[SequenceStart] = []
        self.is_called = self.is_stepping = False
        self.calls = 0
        self.call_ends = 0.0
        self.steps: list[Sampled] = []  # not reported

    @property
    def is_idle(self) -> bool:
        return not (self.is_stepping or self.inbox or self.machine.has_work)

    def report(self) -> Report:
        """All since the last one. See `Reporter`."""
        scheduler, size = self.machine.scheduler, self.machine.config.block_size
        waiting = sum(needed_blocks(seq.num_tokens, 1, size) for seq in scheduler.waiting.values())
        unseen = sum(needed_blocks(len(start.token_ids), 1, size) for start in self.inbox)
        room = scheduler.blocks.num_available - waiting - unseen
        steps, self.steps = self.steps, []
        return Report(steps, EngineStats(0), room, not self.is_idle, costs=scheduler.waiting.take_costs())


class _Fleet:
    def __init__(
        self,
        config: EngineConfig,
        cost: CostModel,
        arrivals: Sequence[Arrival],
        replicas: int,
        routing: str,
        report_seconds: float,
        recalled_pairs: float | None,
    ) -> None:
        self.cost = cost
        self.arrivals = arrivals
        self.report_seconds = report_seconds
        self.dispatcher = Dispatcher(config, [config.num_blocks] * replicas, routing)
        self._make_machine = partial(SimulatedMachine, config, cost, recalled_pairs)
        self.replicas: list[_Replica | None] = [_Replica(i, self._make_machine()) for i in range(replicas)]
        self.free = dict.fromkeys(range(replicas))  # those at work on no call
        self.slowness = [1.0] * replicas
        self.draining: dict[int, Failure] = {}
        self.now = 0.0
        self._events: list[Event] = []
        self._count = 0
        self.last_tokens = [0.0] * len(arrivals)  # when each request got its last token
        self.outcome = FleetOutcome(
            replicas=replicas,
            devices=cost.devices,
            requests=0,
            prompt_tokens=sum(arrival.request.prompt for arrival in arrivals),
            output_tokens=0,
            seconds=0.0,
            busy=0.0,
            first_tokens=[0.0] * len(arrivals),
            latencies=[0.0] * len(arrivals),
            inter_token=Counter(),
            cached_tokens=0,
            preemptions=0,
            moved=0,
            again=0,
        )

    def run(self) -> FleetOutcome:
        coming = 0
        while self.outcome.requests < len(self.arrivals):
            following = self._events[0][0] if self._events else math.inf
            if coming < len(self.arrivals) and self.arrivals[coming].time <= following:
                self.now = self.arrivals[coming].time
                while coming < len(self.arrivals) and self.arrivals[coming].time <= self.now:
                    self._arrive(coming)
                    coming += 1
                self._dispatch()
            else:
                self.now, _, happens = heapq.heappop(self._events)
                happens()
        self.outcome.seconds = self.now - self.arrivals[0].time
        return self.outcome

    def _at(self, time: float, happens: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, happens))

    # Requests

    def _arrive(self, index: int) -> None:
        arrival = self.arrivals[index]
        seq = new_sequence(self.dispatcher.config, index, arrival.prompt(), arrival.request.lengths)
        self.dispatcher.longest_of(seq)
        self.dispatcher.add(seq)

    def _dispatch(self) -> None:
        if self.dispatcher.waiting:
            self.dispatcher.dispatch()
        for index in list(self.free):
            starts, replica = self.dispatcher.take(index), self.replicas[index]
            if starts is not None and replica:
                self._call(replica, starts)

    def _call(self, replica: _Replica, starts: list[SequenceStart]) -> None:
        del self.free[replica.index]
        replica.is_called = True
        replica.calls += 1
        replica.inbox += starts
        replica.call_ends = self.now + self.report_seconds
        if self.report_seconds:
            self._at(replica.call_ends, partial(self._answer, replica, replica.calls))
        if not replica.is_stepping:
            self._begin_step(replica)

    # Steps

    def _begin_step(self, replica: _Replica) -> None:
        for start in replica.inbox:
            lengths = self.arrivals[start.seq_id].request.lengths
            replica.machine.add(new_sequence(self.dispatcher.config, start.seq_id, start.token_ids, lengths))
        replica.inbox.clear()
        slowness = self.slowness[replica.index]
        if skipped := replica.machine.skip((replica.call_ends - self.now) / slowness):
            seconds = slowness * sum(skipped)
            self._at(self.now + seconds, partial(self._end_skip, replica, [slowness * each for each in skipped]))
        elif replica.machine.has_work:
            seconds = slowness * replica.machine.begin_step()
            self._at(self.now + seconds, partial(self._end_step, replica))
        else:
            if replica.is_called:
                self._answer(replica, replica.calls)
            return
        replica.is_stepping = True
        self.outcome.busy += seconds

    def _end_skip(self, replica: _Replica, steps: list[float]) -> None:
        """Several steps end of which nobody was told."""
        if self.replicas[replica.index] is not replica:
            return
        replica.is_stepping = False
        running = [seq.seq_id for seq in replica.machine.scheduler.running]
        sampled = Sampled([(seq_id, TOKEN) for seq_id in running])
        replica.steps += [sampled] * len(steps)
        for seconds in steps:
            self.outcome.inter_token[round(seconds, 4)] += len(running)
        for seq_id in running:
            self.last_tokens[seq_id] = self.now
        self._begin_step(replica)

    def _end_step(self, replica: _Replica) -> None:
        if self.replicas[replica.index] is not replica:
            return
        replica.is_stepping = False
        sampled = replica.machine.end_step()
        last_tokens, gaps = self.last_tokens, self.outcome.inter_token
        for seq, _ in sampled:
            if seq.num_tokens > seq.prompt_length + 1:
                gaps[round(self.now - last_tokens[seq.seq_id], 4)] += 1
            last_tokens[seq.seq_id] = self.now
        if sampled:
            ended = [_ended(seq) for seq, _ in sampled if seq.num_tokens == seq.max_length]
            replica.steps.append(Sampled([(seq.seq_id, token) for seq, token in sampled], ended))
        if not self.report_seconds:
            self._answer(replica, replica.calls)
        if not replica.is_stepping:
            self._begin_step(replica)

    # Reports

    def _answer(self, replica: _Replica, call: int) -> None:
        """A replica's call returns, unless it has already."""
        index = replica.index
        if self.replicas[index] is not replica or not replica.is_called or replica.calls != call:
            return
        replica.is_called = False
        report = replica.report()
        if not self.report_seconds:  # a queue of its own holds what it has no room for
            report.room = sys.maxsize
        if index in self.draining:
            report.room = 0
        for step in report.steps:
            for each in step.ended:
                self.outcome.cached_tokens += each.cache_hits
                self.outcome.preemptions += each.preemptions
        for received, _ in self.dispatcher.receive(index, report):
            self._receive(received)
        self.free[index] = None
        self._end_drain(index)
        self._dispatch()

    def _receive(self, received: list[tuple[Running, SampledToken]]) -> None:
        outcome = self.outcome
        outcome.output_tokens += len(received)
        for seq, _ in received:
            passed = self.now - self.arrivals[seq.seq_id].time
            if seq.num_generated == 1:
                outcome.first_tokens[seq.seq_id] = passed
            if seq.num_tokens == seq.max_length:
                outcome.latencies[seq.seq_id] = passed
                outcome.requests += 1
                self.dispatcher.finish(seq)

    # Failures

    def plan(self, failure: Failure) -> None:
        """Let a failure happen when it is time for it."""
        if failure.kind == "drain":
            self._at(failure.at, partial(self._drain, failure))
        for index in failure.replicas if failure.kind == "death" else ():
            self._at(failure.at, partial(self._lose, index, failure.seconds))
        for index in failure.replicas if failure.kind == "slow" else ():
            self._at(failure.at, partial(self.slowness.__setitem__, index, failure.factor))
            self._at(failure.at + failure.seconds, partial(self.slowness.__setitem__, index, 1.0))

    def _lose(self, index: int, seconds: float) -> None:
        """A replica is gone with all that it has, and another one takes its place after a while."""
        if self.replicas[index] is None:
            return
        lost = [seq for seq in self.dispatcher.placed if self.dispatcher.replica_of(seq) == index]
        self.outcome.moved += len(lost)
        self.outcome.again += sum(seq.num_tokens for seq in lost)
        self.replicas[index] = None
        self.free.pop(index, None)
        self.dispatcher.lose(index)
        self._at(self.now + seconds, partial(self._restart, index))
        self._dispatch()

    def _restart(self, index: int) -> None:
        self.replicas[index] = _Replica(index, self._make_machine())
        self.free[index] = None
        for _ in self.dispatcher.receive(index, Report([], EngineStats(0), self.dispatcher.num_blocks[index])):
            pass
        if index in self.draining:
            self._drain_next(self.draining.pop(index))
        self._dispatch()

    def _drain(self, failure: Failure) -> None:
        """The first of the replicas that are still to be drained gets nothing new, unless it is down."""
        if self.replicas[failure.replica] is None:
            self._drain_next(failure)
            return
        self.draining[failure.replica] = failure
        self.dispatcher.router.report(failure.replica, 0)
        self._end_drain(failure.replica)

    def _drain_next(self, failure: Failure) -> None:
        if failure.count > 1:
            self._drain(msgspec.structs.replace(failure, replica=failure.replica + 1, count=failure.count - 1))

    def _end_drain(self, index: int) -> None:
        """A replica that drains and has nothing left starts again."""
        if index in self.draining and not self.dispatcher.is_in_use(index):
            self._lose(index, self.draining[index].seconds)


def _ended(seq: Running) -> Ended:
    return Ended(seq.seq_id, seq.preemptions, seq.windows_compressed, seq.evicted, seq.cache_hits, seq.missing)
