"""Fairness among tenants: the order of the queue, shares of tokens, slots and blocks, and nobody who starves."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvllm.config import CompressionConfig, EngineConfig, TenantConfig
from kvllm.core.queue import FairQueue
from kvllm.core.sequence import Sequence, ServiceClass
from kvllm.errors import ConfigError
from kvllm.sampling_params import SamplingParams
from tests.core.test_scheduler import Harness, engine_config
from tests.helpers.compressions import paper_compression
from tests.helpers.examples import examples
from tests.helpers.plans import scheduled_in

COMPRESSIONS: dict[str, CompressionConfig | None] = {
    "none": None,
    "periodic": paper_compression(method="kara", period=4, max_sequences=2, window_blocks=2, buffer=1),
    "prompts": paper_compression(
        method="kara", period=6, max_sequences=30, window_blocks=3, buffer=2, compress_prompt=True
    ),
    "pressure": CompressionConfig(
        method="kara", policy="pressure", period=5, max_sequences=3, window_blocks=2, buffer=1
    ),
    "threshold": CompressionConfig(
        method="keydiff", policy="threshold", threshold_tokens=30, budget_tokens=17, buffer=2
    ),
}


def random_config(rng: random.Random, compression: CompressionConfig | None) -> EngineConfig:
    max_num_seqs = rng.randint(2, 8)
    return engine_config(
        rng.randint(20, 48),
        max_model_len=512,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.randint(max_num_seqs, 40),
        enable_prefix_caching=rng.random() < 0.7,
        watermark=rng.choice([0.0, 0.01, 0.2]),
        compression=compression,
    )


class InOrder(Harness):
    """Checks in each step who starts, and who makes way."""

    def step(self) -> None:
        running = self.scheduler.running[:]
        super().step()
        waiting = self.live.keys() - {seq.seq_id for seq in self.scheduler.running}
        started = [start.seq_id for start in self.plans[-1].new_seqs]
        assert not (started and waiting) or max(started) < min(waiting)  # who has waited longest
        preempted = [seq.seq_id in waiting for seq in running]
        assert preempted == sorted(preempted)  # the youngest


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_with_one_tenant_and_one_priority_plans_are_first_come_first_served(name: str) -> None:
    """60 requests that arrive while others run, a few of which are aborted or lost with their workers."""
    preemptions = 0
    for seed in range(3):
        rng = random.Random(f"{name} {seed}")
        harness = InOrder(random_config(rng, COMPRESSIONS[name]))
        most = min(harness.config.num_blocks * 4 - 30, 60)
        for _ in range(60):
            prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, 24))]
            harness.add(prompt, rng.randint(1, most), rng.choice([1, 1, 1, 2]))
            if rng.random() < 0.1:
                harness.finish(rng.choice(sorted(harness.live)))
            if rng.random() < 0.02:
                harness.fail(executed=rng.random() < 0.5)
            for _ in range(rng.choice([0, 0, 1, 8])):
                if harness.scheduler.has_unfinished:
                    harness.step()
        harness.run()
        preemptions += harness.scheduler.stats.preemptions
    assert preemptions > 0


# The queue


def sequence(seq_id: int, tenant: str = "", priority: int = 0) -> Sequence:
    return Sequence(
        seq_id, str(seq_id), [0], SamplingParams(), max_length=9, service_class=ServiceClass(priority, tenant)
    )


def taken(queue: FairQueue, cost: float = 1.0) -> list[int]:
    """Take all sequences, and charge each with `cost`."""
    ids = []
    while queue:
        (tenant,) = queue.first(1)
        ids.append(queue.take(tenant).seq_id)
        queue.charge(tenant, cost)
    return ids


def test_within_a_tenant_come_the_preempted_then_priorities_then_arrival() -> None:
    queue = FairQueue({})
    sequences = [sequence(0, priority=1), sequence(1), sequence(2, priority=-1), sequence(3), sequence(4, priority=1)]
    for seq in sequences:
        queue.add(seq)
    (tenant,) = queue.first(1)
    assert queue.take(tenant) is sequences[2]
    assert queue.take(tenant) is sequences[1]
    sequences[1].preemptions += 1
    queue.requeue(sequences[1])
    queue.add(sequence(5, priority=-7))
    queue.finish(sequences[4])
    assert taken(queue) == [1, 5, 3, 0]


def test_no_priority_is_above_what_a_tenant_may_have() -> None:
    queue = FairQueue({"capped": TenantConfig(max_priority=2)})
    capped = [sequence(0, "capped", 5), sequence(1, "capped", 2), sequence(2, "capped", -100)]
    for seq in capped:
        queue.add(seq)
    assert [seq.priority for seq in capped] == [5, 2, 2]
    assert taken(queue) == [1, 2, 0]


def test_tenants_take_turns_by_weight() -> None:
    queue = FairQueue({"heavy": TenantConfig(weight=3)})
    for i in range(40):
        queue.add(sequence(i, "heavy"))
    for i in range(40, 80):
        queue.add(sequence(i, "light"))
    first = Counter("heavy" if seq_id < 40 else "light" for seq_id in taken(queue)[:40])
    assert first == {"heavy": 30, "light": 10}


def test_idle_time_saves_up_nothing_and_pays_off_nothing() -> None:
    queue = FairQueue({})
    busy, new = sequence(0, "busy"), sequence(1, "new")
    queue.add(busy)
    tenant = queue.tenant(busy)
    queue.charge(tenant, 100)
    queue.advance([tenant])
    queue.add(new)
    assert queue.tenant(new).service == 100  # not 0, as if it had waited all the time
    queue.charge(queue.tenant(new), 50)
    queue.finish(new)
    queue.add(again := sequence(2, "new"))
    assert queue.tenant(again).service == 150  # not 100, as if it were another


def test_tenants_that_are_gone_are_forgotten() -> None:
    queue = FairQueue({})
    queue.add(busy := sequence(0, "busy"))
    for i in range(1, 1000):
        queue.add(seq := sequence(i, f"once {i}"))
        queue.charge(queue.tenant(seq), 1.0)
        queue.finish(seq)
        queue.charge(queue.tenant(busy), 2.0)
        queue.advance([])
    assert len(queue._tenants) < 5 and len(queue._by_service) < 50


@pytest.mark.parametrize("share", [0, 1 / 4], ids=["of one tenant", "of many"])
def test_a_long_queue_does_not_slow_a_step(share: float) -> None:
    def seconds_per_step(waiting: int) -> float:
        harness = Harness(engine_config(1000, max_num_seqs=4))
        for i in range(waiting):
            harness.add([0, 1], 1000, tenant=str(i % max(1, int(share * waiting))), priority=i % 3)
        best = float("inf")
        for _ in range(50):
            begin = time.thread_time()
            harness.scheduler.update(plan := harness.scheduler.schedule(), harness.worker.execute(plan))
            best = min(best, time.thread_time() - begin)
        return best

    # A scan of the queue would cost twenty times a step of four sequences; the bound leaves room for noise.
    assert seconds_per_step(20_000) < 5 * seconds_per_step(80)


# Shares


def first_token_steps(harness: Harness, seq_id: int, limit: int = 1000) -> int:
    """Steps until a sequence has a token."""
    seq = harness.live[seq_id]
    for steps in range(1, limit):
        harness.step()
        if seq.num_generated:
            return steps
    raise AssertionError(f"no token after {limit} steps")


def crowded(config: EngineConfig, *, count: int = 40, max_tokens: int = 60, steps: int = 30) -> Harness:
    """An engine that is at work on many long requests of one tenant."""
    harness = Harness(config)
    for _ in range(count):
        harness.add([0, 1, 1] * 4, max_tokens, tenant="noisy")
    for _ in range(steps):
        harness.step()
    return harness


def test_a_full_batch_of_one_tenant_gives_a_slot_to_another() -> None:
    harness = crowded(engine_config(1000))
    assert len(harness.scheduler.running) == 8
    assert first_token_steps(harness, harness.add([0] * 20, 10, tenant="quiet")) == 1
    assert harness.scheduler.stats.preemptions == 1
    harness.run()


def test_decodes_above_their_share_pause_for_the_prompt_of_one_below() -> None:
    harness = crowded(engine_config(1000))
    seq_id = harness.add([0] * 60, 10, tenant="quiet")
    harness.step()
    assert [item.seq_id for item in scheduled_in(harness.plans[-1])] == [seq_id]
    harness.step()
    assert harness.plans[-1].num_seqs == 8
    harness.run()


def test_a_tenant_above_its_share_starts_nothing_beside_the_prompt_of_one_below() -> None:
    """There are slots, blocks and tokens for it, but they would make the step with the first token longer."""
    harness = crowded(engine_config(1000))
    for seq in harness.scheduler.running[:2]:
        harness.finish(seq.seq_id)
    seq_id = harness.add([0] * 30, 10, tenant="quiet")
    harness.step()
    assert [item.seq_id for item in scheduled_in(harness.plans[-1])] == [seq_id]
    harness.step()
    assert len(harness.plans[-1].new_seqs) == 1 and len(harness.scheduler.running) == 8
    harness.run()


def test_a_full_pool_of_one_tenant_gives_blocks_to_another() -> None:
    harness = crowded(engine_config(60, watermark=0.0))
    assert harness.scheduler.blocks.num_available < 10
    assert first_token_steps(harness, harness.add([0] * 40, 10, tenant="quiet")) == 1
    harness.run()


def test_a_tenant_with_more_than_its_share_gets_no_more_at_the_cost_of_others() -> None:
    harness = crowded(engine_config(1000))
    for _ in range(8):
        harness.add([0, 1] * 3, 100, tenant="quiet")
    for _ in range(20):
        harness.step()
    assert Counter(seq.tenant for seq in harness.scheduler.running) == {"noisy": 4, "quiet": 4}


def test_slots_follow_the_weights() -> None:
    harness = crowded(engine_config(1000, tenants={"quiet": TenantConfig(weight=3)}))
    for _ in range(8):
        harness.add([0, 1] * 3, 100, tenant="quiet")
    for _ in range(20):
        harness.step()
    assert Counter(seq.tenant for seq in harness.scheduler.running) == {"noisy": 2, "quiet": 6}


def test_debtors_are_compressed_before_they_are_preempted() -> None:
    compression = paper_compression(method="kara", period=10**6, window_blocks=2, retain_blocks=1, buffer=1)
    harness = crowded(engine_config(85, compression=compression), count=7, steps=33)
    stats = harness.scheduler.stats
    assert stats.windows_compressed == stats.preemptions == 0 and harness.scheduler.blocks.num_available < 15
    seq_id = harness.add([0] * 80, 10, tenant="quiet")
    assert first_token_steps(harness, seq_id) < 8
    assert stats.windows_compressed > 0 and stats.preemptions == 0
    harness.run()


def test_a_guarantee_is_kept_at_the_cost_of_those_above_theirs() -> None:
    """Three tenants of equal weight would have 20 blocks each; the one with a guarantee gets more."""
    tenants = {"sure": TenantConfig(guaranteed_share=0.5)}
    harness = Harness(engine_config(60, watermark=0.0, tenants=tenants))
    for i in range(20):
        harness.add([0, 1, 1] * 4, 40, tenant=f"noisy {i % 2}")
    for _ in range(30):
        harness.step()
    seq_id = harness.add([0] * 120, 2, tenant="sure")
    assert first_token_steps(harness, seq_id) < 5
    harness.run()


def test_guarantees_are_at_most_the_pool() -> None:
    with pytest.raises(ConfigError, match="guaranteed_share"):
        engine_config(10, tenants={name: TenantConfig(guaranteed_share=0.6) for name in "ab"})
    with pytest.raises(ConfigError, match="weight=0"):
        TenantConfig(weight=0)


def test_backlogged_tenants_get_tokens_by_weight() -> None:
    harness = Harness(engine_config(200, tenants={"heavy": TenantConfig(weight=3)}))
    for i in range(200):
        harness.add([0, 1] * (1 + i % 7), 20 + i % 30, tenant="heavy" if i % 2 else "light")
    tokens: Counter[str] = Counter()
    for _ in range(300):
        before = {seq_id: seq.logical_length for seq_id, seq in harness.live.items()}
        live = dict(harness.live)
        harness.step()
        for seq_id, seq in live.items():
            tokens[seq.tenant] += max(0, seq.logical_length - before[seq_id])
    assert 2 < tokens["heavy"] / tokens["light"] < 4
    harness.run()


def test_idle_prefix_blocks_of_a_tenant_are_limited() -> None:
    harness = Harness(engine_config(100, tenants={"a": TenantConfig(cached_share=0.05)}))
    for tenant in ("a", "b"):
        for i in range(4):
            harness.add([0, 1, i % 2, i // 2] * 4, 2, tenant=tenant)
        harness.run()
        harness.scheduler.check()
        cache = harness.scheduler.blocks.prefix_cache
        assert cache is not None and (cache.num_idle == 5 if tenant == "a" else cache.num_idle > 15)


@st.composite
def loads(draw) -> tuple[EngineConfig, list[tuple[str, int, int]]]:
    """A small engine, and the requests that noisy tenants send again and again: tenant, prompt, output."""
    names = ["a", "b", "c"][: draw(st.integers(1, 3))]
    weights = st.sampled_from([0.5, 1.0, 4.0])
    config = engine_config(
        draw(st.integers(20, 60)),
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(6, 40)),
        tenants={name: TenantConfig(weight=draw(weights)) for name in names},
        enable_prefix_caching=False,
    )
    request = st.tuples(st.sampled_from(names), st.integers(1, 30), st.integers(1, 40))
    return config, draw(st.lists(request, min_size=1, max_size=6))


HEAVY = engine_config(39, max_num_seqs=6, max_num_batched_tokens=10, tenants={"a": TenantConfig(weight=4.0)})
"""Tenant "a" is entitled to so much that a request for nearly all blocks does not fit beside it."""


@settings(max_examples=examples(150), suppress_health_check=list(HealthCheck), deadline=None)
@given(load=loads(), share=st.floats(0.05, 1.0), late=st.integers(0, 60))
@example(load=(HEAVY, [("a", 11, 17), ("a", 15, 37), ("a", 15, 5), ("a", 24, 15), ("a", 5, 1)]), share=0.95, late=0)
def test_no_tenant_starves(load: tuple[EngineConfig, list[tuple[str, int, int]]], share: float, late: int) -> None:
    """A request of up to the whole pool ends beside tenants that always have more to do than fits."""
    config, requests = load
    harness = Harness(config)
    sent = 0

    def send() -> None:
        nonlocal sent
        while len(harness.scheduler.waiting) < 2 * config.max_num_seqs + len(requests):
            tenant, prompt, output = requests[sent % len(requests)]
            harness.add([0] * prompt, output, tenant=tenant)
            sent += 1

    for _ in range(late):
        send()
        harness.step()
    total = max(2, int(share * config.num_blocks * config.block_size))
    seq_id = harness.add([0] * (total // 2), total - total // 2, tenant="starving")
    for _ in range(20_000):
        send()
        harness.step()
        if seq_id in harness.finished:
            return
    raise AssertionError("it has starved")


@pytest.mark.parametrize(
    ("num_blocks", "threshold", "budget", "requests"),
    [(7, 5, 1, [(4, 7, "a"), (5, 8, "b")]), (11, 7, 3, [(3, 13, "a"), (7, 9, "b")])],
)
def test_the_oldest_grows_beside_one_that_was_just_started(
    num_blocks: int, threshold: int, budget: int, requests: list[tuple[int, int, str]]
) -> None:
    """Two tenants in a pool for one of them. A sequence that is computed again and compressed on its way in leaves
    blocks to the other one, and must not be preempted for these: both would take turns for ever."""
    cut = CompressionConfig(
        method="sliding_window", policy="threshold", threshold_tokens=threshold, budget_tokens=budget, buffer=0
    )
    harness = Harness(
        EngineConfig(
            num_blocks=num_blocks,
            block_size=1,
            max_model_len=64,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            watermark=0.2 if num_blocks == 7 else 0.0,
            enable_prefix_caching=False,
            compression=cut,
        )
    )
    for prompt, output, tenant in requests:
        harness.add([0] * prompt, output, tenant=tenant)
    harness.run(200)
    assert len(harness.finished) == 2
