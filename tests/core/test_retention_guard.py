"""The guard of predictions: what windows keep over what was judged, in the scheduler. Lengths under reports of any size
are a part of `test_scheduler.py`; the divergences themselves are in `tests/worker/test_judge.py`."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvllm.config import CompressionConfig, EngineConfig
from kvllm.core.compression_policy import EngineLoad, check_pool, make_policy
from kvllm.core.protocol import SampledToken, StepPlan, StepResult
from kvllm.core.regions import Region
from kvllm.core.retention_guard import ROUND, RetentionGuard
from kvllm.core.scheduler import Scheduler
from kvllm.core.sequence import Sequence
from kvllm.errors import ConfigError, RequestError
from kvllm.sampling_params import SamplingParams
from kvllm.stats import EngineStats
from tests.helpers.compressions import paper_compression
from tests.helpers.plans import scheduled_in

BLOCK_SIZE = 4


def config(**options: Any) -> CompressionConfig:
    sizes = {"period": 4, "window_blocks": 8, "retain_blocks": 2, "buffer": 2, "guard_kl": 0.01, "guard_every": 1}
    return paper_compression(**({"method": "kara"} | sizes | options))


def guard(**options: Any) -> RetentionGuard:
    return RetentionGuard(config(**options), BLOCK_SIZE)


def test_a_divergence_above_what_a_round_may_have_raises_retention_at_once() -> None:
    found, each = guard(), guard()
    found.record([ROUND * 0.01 + 1e-6])
    assert found.added_blocks == 3  # of the five that it can rise by
    blocks = []
    for _ in range(4 * ROUND):
        each.record([0.03])
        blocks.append(each.added_blocks)
    assert blocks[:9] == [0, 0, 3, 3, 3, 4, 4, 4, 5] and set(blocks[9:]) == {5}  # 3 x 0.03 is more than 8 x 0.01


def test_a_large_divergence_raises_retention_by_as_much_as_it_asks_for() -> None:
    """A round may have 0.08 nats. What windows lose of 13 blocks shrinks by the same factor, or to half of it."""
    for total, added in ((0.1, 7), (0.16, 7), (0.2, 8), (0.4, 11), (1.0, 12), (2.0, 13), (math.inf, 13)):
        found = guard(window_blocks=16)
        found.record([total])
        assert found.added_blocks == added, total


def test_retention_falls_after_rounds_with_room_and_stays_between() -> None:
    found, blocks = guard(), []
    found.record([math.inf])
    for divergence in (0.006, 0.005):  # between the target and half of it; half of it
        for _ in range(7):
            found.record([divergence] * ROUND)
            blocks.append(found.added_blocks)
    assert blocks == [5] * 7 + [4, 3, 2, 1, 0, 0, 0]


def test_divergences_of_one_step_count_together() -> None:
    """All of them were planned at the same retention, so they raise it once."""
    found = guard()
    found.record([0.02] * 5)
    assert found.added_blocks == 3
    found.record([0.0] * (ROUND - 1))
    assert found.added_blocks == 3
    found.record([0.0])
    assert found.added_blocks == 2


@given(
    st.integers(2, 40).flatmap(lambda blocks: st.tuples(st.just(blocks), st.integers(1, BLOCK_SIZE * blocks - 1))),
    st.lists(st.lists(st.floats(0) | st.just(math.nan), max_size=4)),
)
def test_retention_stays_between_what_is_configured_and_the_window(
    sizes: tuple[int, int], reports: list[list[float]]
) -> None:
    window_blocks, retained = sizes
    found = guard(window_blocks=window_blocks, retain_tokens=retained, buffer=1)
    for report in [*reports, [math.nan], *[[math.inf]] * 8]:
        found.record(report)
        assert retained <= found.retained <= found.most < window_blocks * BLOCK_SIZE
        assert (found.retained - retained) % BLOCK_SIZE == 0
    assert found.retained == found.most > window_blocks * BLOCK_SIZE - BLOCK_SIZE - 1
    for _ in range(40):
        found.record([0.0] * ROUND)
    assert found.retained == retained


def test_the_first_window_of_a_sequence_and_then_one_in_so_many_is_judged() -> None:
    for every in (1, 2, 3, 8):
        found = guard(guard_every=every)
        seq = Sequence(5, "5", [0], SamplingParams(), max_length=9)
        sampled = []
        for _ in range(24):
            sampled.append(found.samples(seq))
            seq.compacted(Region(0, 32, 8, 32), 0, 24)
        assert sampled == [i == 0 or (5 + i) % every == 0 for i in range(24)]


# In the scheduler


class Engine:
    """A scheduler whose worker samples zeros and reports divergences."""

    def __init__(
        self, compression: CompressionConfig, divergence: float, num_blocks: int = 400, block_size: int = BLOCK_SIZE
    ) -> None:
        self.divergence = divergence
        self.plans: list[StepPlan] = []
        config = EngineConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=8,
            max_model_len=4096,
            max_num_batched_tokens=4096,
            compression=compression,
        )
        self.scheduler = Scheduler(config, EngineStats(num_blocks=num_blocks))

    def add(self, seq_id: int, max_tokens: int, **options: Any) -> Sequence:
        sampling = SamplingParams(temperature=0, **options)
        seq = Sequence(seq_id, str(seq_id), [0] * 5, sampling, max_length=5 + max_tokens)
        self.scheduler.longest_of(seq)  # which refuses what can never fit
        self.scheduler.add(seq)
        return seq

    def run(self, steps: int) -> None:
        for _ in range(steps):
            plan = self.scheduler.schedule()
            self.plans.append(plan)
            tokens = [SampledToken(0) for item in scheduled_in(plan) if item.samples]
            judged = [self.divergence for job in plan.compressions if job.judged]
            for seq, _ in self.scheduler.update(plan, StepResult(tokens, divergences=judged)):
                if seq.num_tokens >= seq.max_length:
                    self.scheduler.finish(seq)

    def retained(self, seq_id: int | None = None) -> list[list[int]]:
        """KV pairs that windows keep, by steps that compress (a sequence)."""
        jobs = [[job for job in plan.compressions if seq_id in (None, job.seq_id)] for plan in self.plans]
        return [[job.retain for job in of_step] for of_step in jobs if of_step]


@pytest.mark.parametrize("policy", ["periodic", "pressure", "standalone"])
def test_later_windows_keep_more_and_those_of_the_same_step_do_not(policy: str) -> None:
    if policy == "standalone":
        engine = Engine(config(policy=policy, window_blocks=32, retain_blocks=8), 1.0, 1600, block_size=1)
    else:
        engine = Engine(config(policy=policy, max_sequences=2), 1.0, num_blocks=60 if policy == "pressure" else 400)
    for seq_id in range(2):
        engine.add(seq_id, 140)
    engine.run(150)
    retained, guard = engine.retained(), engine.scheduler.policy.guard
    assert all(len(set(of_step)) == 1 for of_step in retained)
    assert max(map(len, retained)) == (1 if policy == "pressure" else 2)
    expected = RetentionGuard(engine.scheduler.config.compression, engine.scheduler.config.block_size)
    for of_step in retained:
        assert of_step[0] == expected.retained
        expected.record([1.0] * len(of_step))
    assert retained[-1][0] > retained[0][0] == 8 and guard.added_blocks == expected.added_blocks


def test_a_request_that_names_its_retention_is_left_alone() -> None:
    engine = Engine(config(), 1.0)
    own, others = engine.add(0, 140, retain_blocks=3), engine.add(1, 140)
    engine.run(145)
    assert {retain for of_step in engine.retained(0) for retain in of_step} == {3 * BLOCK_SIZE}
    assert len({retain for of_step in engine.retained(1) for retain in of_step}) > 1
    assert own.metrics.divergences == [] and set(others.metrics.divergences) == {1.0}
    assert not any(job.judged for plan in engine.plans for job in plan.compressions if job.seq_id == 0)


def test_what_is_judged_is_counted_and_costs_tokens() -> None:
    """Both reads of the buffer come out of the step's budget, so prefills wait."""
    engine = Engine(config(guard_every=2), 0.25)
    sequences = [engine.add(seq_id, 140) for seq_id in range(3)]
    engine.run(145)
    stats, judged = engine.scheduler.stats, [len(seq.metrics.divergences) for seq in sequences]
    jobs = [job for plan in engine.plans for job in plan.compressions]
    assert stats.compressions_judged == sum(judged) == sum(job.judged for job in jobs) >= 4
    assert not all(job.judged for job in jobs)
    assert stats.divergence_sum == 0.25 * sum(judged) and stats.added_blocks == 5


@pytest.mark.parametrize(
    ("seq_id", "buffer", "steps", "left"),
    [(0, 2, 37, 32), (0, 2, 38, 28), (0, 6, 41, 32), (0, 6, 42, 20)],
)
def test_judging_costs_tokens_of_the_step(seq_id: int, buffer: int, steps: int, left: int) -> None:
    """A window of 32 KV pairs costs 32, and each of the two passes that judge it the tokens of the buffer. It is not
    judged before these are behind it, at 40 KV pairs and as many more."""
    engine = Engine(config(guard_every=2, buffer=buffer, period=10**6), 0.25)
    planner, seq = engine.scheduler.planner, engine.add(seq_id, 140)
    engine.run(steps)
    assert seq.cached_length == 4 + steps
    planner._tokens = 64
    assert planner.compress_complete(StepPlan(), seq)
    assert planner.tokens_left == left


@pytest.mark.parametrize("policy", ["periodic", "pressure", "standalone"])
def test_a_window_whose_turn_it_is_waits_for_the_tokens_that_judge_it(policy: str) -> None:
    """The others do not; nor does it under pressure, when a block is missing now."""
    sizes = {"standalone": {"window_blocks": 32, "retain_blocks": 8}}.get(policy, {})
    block_size = 1 if policy == "standalone" else BLOCK_SIZE
    made = config(policy=policy, guard_every=2, buffer=6, **sizes)
    found = make_policy(EngineConfig(num_blocks=900, block_size=block_size, max_model_len=900, compression=made))
    assert found is not None
    turn, other = (Sequence(seq_id, "", [0] * 900, SamplingParams(), max_length=900, tail_start=0) for seq_id in (3, 2))
    for seq in (turn, other):  # behind a first window, of which nothing is dropped here
        seq.compacted(Region(0, 32, 32, 32), 0, 0)
        seq.advance(32 + 5)
    assert [seq for seq, _ in found.eligible([turn, other])] == [other]
    assert [seq for seq, _ in found.eligible([turn, other], may_wait=False)] == [turn, other]
    turn.advance(1)
    (seq, region), _ = found.eligible([turn, other])
    assert seq is turn and found.is_judged(turn, region) and (region.start, region.count) == (0, 1)
    other.advance(60)
    (_, region), *_ = found.eligible([other])
    assert not found.is_judged(other, region)


@pytest.mark.parametrize("policy", ["periodic", "standalone"])
def test_first_windows_go_one_by_one_so_that_the_next_knows_the_divergence(policy: str) -> None:
    """Of eight sequences of another kind, one loses its first window at the retention of before."""
    sizes = {"window_blocks": 32, "retain_blocks": 8} if policy == "standalone" else {}
    block_size, num_blocks = (1, 1600) if policy == "standalone" else (BLOCK_SIZE, 400)
    engine = Engine(config(policy=policy, method="keydiff", guard_every=64, **sizes), math.inf, num_blocks, block_size)
    for seq_id in range(8):
        engine.add(seq_id, 60)
    engine.run(55)
    judged = [(step, job) for step, plan in enumerate(engine.plans) for job in plan.compressions if job.judged]
    steps, jobs = zip(*judged, strict=True)
    assert [*steps] == [*range(steps[0], steps[0] + 8)]
    assert sorted(job.seq_id for job in jobs) == [*range(8)]
    policy_guard = engine.scheduler.policy.guard
    assert [job.retain for job in jobs] == [8] + [policy_guard.most] * 7


def test_a_first_window_lost_before_retention_rose_is_computed_again() -> None:
    """Once at most, and no other sequence: one has lost two windows, and another names its retention."""
    engine = Engine(config(method="keydiff", guard_every=64), 0.0)
    old = engine.add(0, 140)
    engine.run(75)
    young, own = engine.add(1, 60), engine.add(2, 60, retain_blocks=2)
    engine.run(30)
    assert len(old.compressions) > 1 and not young.compressions
    engine.divergence = 1.0
    while not young.compressions:
        engine.run(1)
    assert engine.scheduler.policy.guard.added_blocks == 5 and young.compressions[0].retain == 8
    engine.run(3)
    assert (old.preemptions, young.preemptions, own.preemptions) == (0, 1, 0)
    assert [region.retain for region in young.compressions] == [28] and young.logical_length == young.num_tokens - 1
    engine.run(100)
    assert engine.scheduler.stats.preemptions == 1 and not engine.scheduler.has_unfinished


def test_first_windows_go_together_when_blocks_are_missing_now() -> None:
    """Each of eight sequences fills its last block. A window releases six blocks, and a hundred are wanted."""
    made = config(policy="pressure", max_sequences=8)
    found = make_policy(EngineConfig(num_blocks=900, block_size=BLOCK_SIZE, max_model_len=900, compression=made))
    assert found is not None
    sequences = [Sequence(i, "", [0] * 100, SamplingParams(), max_length=900, tail_start=0) for i in range(8)]
    for seq in sequences:
        seq.advance(40)
        seq.block_table = [0] * 10
    for step, available, chosen in ((4, 8, 1), (5, 8, 1), (6, 7, 8)):  # in step 5, because windows wait
        assert len(found.select(sequences, EngineLoad(step, available, 100, 10_000))) == chosen


def test_a_sequence_is_restored_behind_its_first_window_and_once() -> None:
    found = make_policy(EngineConfig(num_blocks=900, block_size=BLOCK_SIZE, max_model_len=900, compression=config()))
    assert found is not None and found.guard is not None
    seq = Sequence(0, "", [0] * 900, SamplingParams(), max_length=900, tail_start=0)
    assert not found.is_restored(seq)
    seq.compacted(Region(0, 32, found.guard.retained, 32), 0, 32 - found.guard.retained)
    assert not found.is_restored(seq)  # windows keep no more than this one did
    found.guard.record([math.inf])
    assert found.is_restored(seq)
    seq.preempted()
    seq.compacted(Region(0, 32, 8, 32), 0, 24)
    assert not found.is_restored(seq)  # it was computed again before
    later = Sequence(1, "", [0] * 900, SamplingParams(), max_length=900, tail_start=0)
    for _ in range(2):
        later.compacted(Region(0, 32, 8, 32), 0, 24)
    assert not found.is_restored(later)


def test_memory_is_planned_for_the_most_that_windows_may_keep() -> None:
    """Windows may lose as little as 4 of 32 KV pairs: of 120, three of them lose 12, and 27 blocks are left."""
    fits = {}
    for num_blocks in range(12, 32):
        guarded = Engine(config(), 1.0, num_blocks)
        try:
            seq = guarded.add(0, 116)
        except RequestError:
            continue
        guarded.run(400)
        assert not guarded.scheduler.has_unfinished
        fits[num_blocks] = seq.num_tokens
    assert min(fits) == 27 and set(fits.values()) == {121}
    Engine(config(guard_kl=None), 1.0, 14).add(0, 116)
    options = {"block_size": BLOCK_SIZE, "max_model_len": 121, "max_num_batched_tokens": 256}
    check_pool(EngineConfig(num_blocks=16, compression=config(guard_kl=None), **options))
    with pytest.raises(ConfigError, match="a sequence of that length needs 27 KV blocks"):
        check_pool(EngineConfig(num_blocks=16, compression=config(), **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guard_kl": 0}, "guard_kl=0.0 is not allowed: a number of nats above 0"),
        ({"guard_kl": math.inf}, "guard_kl=inf is not allowed"),
        ({"guard_every": 0}, "guard_every=0 is not allowed: at least 1"),
        ({"buffer": 0}, "buffer=0 is not allowed: at least 1 with guard_kl"),
        (
            {"policy": "threshold", "method": "snapkv", "threshold_tokens": 64, "budget_tokens": 32, "query_window": 8},
            "guard_kl=0.01 is not allowed: only with policies that compress windows",
        ),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**options)
