"""The compression policies against the golden vectors, through the scheduler that production uses."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from kvllm.compression.queries import window_tokens
from kvllm.compression.specs import SPECS
from kvllm.config import CompressionConfig, EngineConfig
from kvllm.core.block_pool import BlockPool
from kvllm.core.capacity import peak_blocks
from kvllm.core.policies import CompressionPolicy, EngineLoad, PeriodicPolicy, PressurePolicy
from kvllm.core.protocol import SampledToken, StepResult
from kvllm.core.regions import Regions, WholeCache, Windows
from kvllm.core.scheduler import Scheduler
from kvllm.core.sequence import Sequence
from kvllm.core.tables import BlockTable
from kvllm.errors import ConfigError
from kvllm.kvcache.groups import KVGroup
from kvllm.sampling_params import SamplingParams
from kvllm.stats import EngineStats
from tests.helpers.compressions import fitting, paper_compression
from tests.helpers.plans import scheduled_in

TOKENS = 1 << 20  # more than any event takes


def sequence(seq_id: int, prompt: int, decode_steps: int) -> Sequence:
    seq = Sequence(seq_id, str(seq_id), [0] * max(1, prompt), SamplingParams(), max_length=prompt + decode_steps + 1)
    seq.prompt_length = seq.tail_start = prompt  # the vectors have a sequence without a prompt: its first token decodes
    return seq


def run(compression: CompressionConfig, block_size: int, lengths: list[tuple[int, int]]):
    """Decode sequences of (prompt, decode steps) together -> events and per-step (C, u) as the vectors list them."""
    config = EngineConfig(
        num_blocks=100_000,
        block_size=block_size,
        max_model_len=1 << 20,
        max_num_batched_tokens=1 << 20,
        enable_prefix_caching=False,
        compression=compression,
    )
    scheduler = Scheduler(config, EngineStats(num_blocks=config.num_blocks))
    sequences = [sequence(i, *each) for i, each in enumerate(lengths)]
    for seq in sequences:
        if seq.prompt_length:
            scheduler.add(seq)
    step(scheduler)
    for seq in sequences:
        if not seq.prompt_length:
            scheduler.add(seq)
    events, history = [], []
    for global_step in range(1, max(steps for _, steps in lengths) + 1):
        before = step(scheduler)
        for job, cached in before:
            (part,) = job.parts
            start = part.first_block * block_size
            end = start + part.size
            events.append([global_step - 1, job.seq_id, cached, start, cached - end, cached - part.dropped])
        history.append([[seq.cached_length, seq.uncompressed_tail] for seq in sequences])
    return events, history


def step(scheduler: Scheduler):
    """One step, with a worker that returns token 0. -> jobs with the C that they found."""
    found = {seq.seq_id: seq.cached_length for seq in scheduler.running}
    plan = scheduler.schedule()
    tokens = [SampledToken(0) for item in scheduled_in(plan) if item.samples]
    for seq, _ in scheduler.update(plan, StepResult(tokens)):
        if seq.num_tokens >= seq.max_length:
            scheduler.finish(seq)
    return [(job, found[job.seq_id]) for job in plan.compressions]


def as_in_vectors(history: list, events: list) -> np.ndarray:
    """The vectors note (C, u) after the event of a step; the engine compresses at the beginning of the next. And they
    count u from 0 on after an event, as the paper does, where the engine counts the KV pairs after the window too."""
    history = np.array(history)
    for global_step, seq_id, _, _, tail, after in events:
        history[global_step - 1, seq_id] = after, tail
    for i, (global_step, seq_id, _, _, tail, _) in enumerate(events):
        following = [event[0] for event in events[i + 1 :] if event[1] == seq_id]
        history[global_step - 1 : following[0] - 1 if following else None, seq_id, 1] -= tail
    return history


def test_small_engine(load_vectors) -> None:
    vectors, _ = load_vectors("periodic_policy")
    compression = paper_compression(
        method="kara", period=4, max_sequences=1, window_blocks=3, retain_tokens=9, buffer=2
    )
    events, history = run(compression, 8, [(10, 400), (3, 260), (17, 120), (0, 400)])
    expected = vectors["small_events"]
    assert events == expected[: len(events)].tolist()
    assert all(event[0] == 400 for event in expected[len(events) :])  # after the last step there is no next one
    events = expected.tolist()
    assert (as_in_vectors(history, events) == vectors["small_hist"]).all()


def test_paper_settings(load_vectors) -> None:
    vectors, _ = load_vectors("periodic_policy")
    events, history = run(paper_compression(method="kara", retain_tokens=257), 256, [(100, 4000)])
    assert events == vectors["paper_events"].tolist()
    assert (as_in_vectors(history, events)[:, 0] == vectors["paper_hist"]).all()


def test_many_sequences(load_vectors) -> None:
    vectors, _ = load_vectors("periodic_policy")
    lengths = list(zip(vectors["many_prompt"].tolist(), vectors["many_gen"].tolist(), strict=True))
    events, history = run(paper_compression(method="kara", retain_tokens=257, max_sequences=30), 256, lengths)
    assert events == vectors["many_events"].tolist()
    total = as_in_vectors(history, events)[:, :, 0].sum(1)
    assert (total == vectors["many_total"][: len(total)]).all()


def test_eligibility(load_vectors) -> None:
    vectors, _ = load_vectors("periodic_policy")
    for block_size, blocks, cached, tail, strict, _ in vectors["eligibility"].tolist():
        assert (Windows(block_size, blocks, 1).trailing(cached, tail) is not None) == bool(strict)


def test_events_fall_on_multiples_of_the_period(load_vectors) -> None:
    vectors, _ = load_vectors("periodic_policy")
    lengths = [(10 * i, 2000) for i in range(1, 60)]
    events, _ = run(paper_compression(method="kara", max_sequences=30), 256, lengths)
    fired = sorted({event[0] for event in events})
    assert set(fired) <= set(vectors["fires"].tolist()) and fired[0] == vectors["fires"][0]
    assert all(sum(event[0] == step for event in events) <= 30 for step in fired)


@pytest.mark.parametrize(
    ("method", "sequences", "period", "windows"),
    [
        ("kara", 59, 128, [1] * 30),  # a window has more query tokens than there are decodes
        ("kara", 59, 16, [2] * 15),  # the event ends before the next one
        ("kara_no_bi", 200, 128, [3] * 10),  # half of 200 decodes, 32 query tokens each
        ("mean_attention", 200, 128, [8] * 25),  # half of 200 decodes, 768 KV pairs / 64 each
        ("keydiff", 59, 128, [2] * 29 + [1]),
    ],
)
def test_an_event_is_spread_over_steps(method: str, sequences: int, period: int, windows: list[int]) -> None:
    """So it takes half as long as the decodes of its steps, or a window. Where queries are recomputed, 30 sequences
    take part."""
    compression = paper_compression(method=method, period=period)
    policy = PeriodicPolicy(compression, 256)
    waiting = [decoding(i, 800) for i in range(sequences)]
    for seq in waiting:
        seq.tables = [table(4)]
    running, found = list(waiting), []
    for step in range(896, 896 + period):
        served = policy.select(running, EngineLoad(step, 1 << 20, 0, TOKENS))
        for seq, region in served:
            seq.compacted(region, 32, region.dropped)
        found.append(len(served))
    assert found == windows + [0] * (period - len(windows))


def test_an_event_of_a_given_size_is_not_spread() -> None:
    events, _ = run(paper_compression(method="keydiff", max_sequences=40), 256, [(10, 1030)] * 59)
    assert max(Counter(event[0] for event in events).values()) == 40


def test_standalone_schedule(load_vectors) -> None:
    vectors, meta = load_vectors("kara_schedule")
    for i, case in enumerate(meta["cases"]):
        window, buffer, prefix = case["W"], case["U"], case["protected_prefix"]
        compressible = window - buffer
        retain = buffer + -(-compressible * int(case["r"][2:]) // 10)
        compression = CompressionConfig(
            method="kara",
            policy="standalone",
            window_blocks=window,
            retain_tokens=retain,
            buffer=buffer,
            chunk_budget=case["alpha"],
        )
        events, history = run(compression, 1, [(prefix, case["decode_tokens"])])
        traced = np.array(history)[:, 0]
        # The vectors' trace is after the event of a step.
        expected = vectors[f"c{i}_trace"]
        fired = {event[0] - 1: event for event in events}
        for row, (cached, tail) in enumerate(traced):
            if row in fired:
                cached, tail = fired[row][5], buffer
            if row + 1 < len(expected):
                assert (cached, tail) == tuple(expected[row][:2])


@pytest.mark.parametrize("case", [0, 1, 2])
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_threshold_traces(load_vectors, case: int, block_size: int) -> None:
    """The length after every decode step. The event that the engine puts at the beginning of a step counts before."""
    vectors, meta = load_vectors("threshold_policy")
    settings = meta["cases"][case]
    threshold, budget, expected = settings["C_max"], settings["N"], vectors[f"t{case + 1}"]
    compression = CompressionConfig(
        method="keydiff", policy="threshold", threshold_tokens=threshold, budget_tokens=budget
    )
    events, history = run(compression, block_size, [(settings["C0"], len(expected) + 1)])
    lengths = np.array(history)[:, 0, 0]
    for decode_steps, _, found, start, tail, after in events:
        assert (found, start, tail, after) == (threshold, 0, 0, budget)
        lengths[decode_steps - 1] = after
    assert (lengths[: len(expected)] == expected).all()


def test_a_threshold_holds_for_a_prompt_too() -> None:
    """Whatever its length, it is cut before the first token is decoded."""
    compression = CompressionConfig(method="keydiff", policy="threshold", threshold_tokens=50, budget_tokens=33)
    events, history = run(compression, 16, [(49, 40), (50, 40), (51, 40), (500, 40)])
    first = {seq_id: (step, found, after) for step, seq_id, found, _, _, after in reversed(events)}
    assert first == {0: (1, 50, 33), 1: (0, 50, 33), 2: (0, 51, 33), 3: (0, 500, 33)}
    assert [cached for cached, _ in history[0]] == [50, 34, 34, 34]


@pytest.mark.parametrize("method", ["pyramidkv", "adakv"])
def test_methods_that_keep_different_numbers_hold_half_of_the_gap_more(method: str) -> None:
    sizes = {"threshold_tokens": 61, "budget_tokens": 20, "buffer": 4, "query_window": 8}
    compression = CompressionConfig(method=method, policy="threshold", **sizes)
    events, _ = run(compression, 16, [(10, 100)])
    assert [after for *_, after in events] == [40, 40, 40] == [compression.policy.held_tokens(compression.spec)] * 3


class Pool:
    """Sequences in a small pool under the pressure policy, with a worker that returns token 0."""

    def __init__(self, num_blocks: int, **options: Any) -> None:
        sizes = {"period": 8, "window_blocks": 4, "retain_blocks": 1, "buffer": 1, "method": "keydiff"}
        self.config = EngineConfig(
            num_blocks=num_blocks,
            block_size=4,
            max_model_len=2000,
            max_num_seqs=8,
            watermark=0.0,
            enable_prefix_caching=False,
            compression=paper_compression(policy="pressure", **(sizes | options)),
        )
        self.stats = EngineStats(num_blocks=num_blocks)
        self.scheduler = Scheduler(self.config, self.stats)
        self.jobs: list[tuple[int, int, int]] = []
        self.steps = 0
        self.next_id = 0

    def add(self, prompt: int, max_tokens: int) -> Sequence:
        seq = Sequence(self.next_id, "", [0] * prompt, SamplingParams(), max_length=prompt + max_tokens)
        self.scheduler.add(seq)
        self.next_id += 1
        return seq

    def step(self) -> list[int]:
        """-> the sequences that are compressed. `jobs` notes them with the decode steps so far, and what was free."""
        free = self.scheduler.blocks.num_available
        found = [job.seq_id for job, _ in step(self.scheduler)]
        self.scheduler.check()
        self.jobs += [(self.steps, seq_id, free) for seq_id in found]
        self.steps += 1
        return found

    def run(self, steps: int = 10_000) -> Pool:
        for _ in range(steps):
            if not self.scheduler.has_unfinished:
                break
            self.step()
        return self


def test_nothing_is_compressed_while_blocks_last() -> None:
    pool = Pool(num_blocks=200)
    for _ in range(4):
        pool.add(8, 150)
    pool.run()
    assert not pool.jobs and pool.stats.preemptions == 0


def test_a_waiting_request_is_let_in_by_compression() -> None:
    """It lacks a block; one window is compressed at the next look, and it comes in with the same step."""
    pool = Pool(num_blocks=40, period=4)
    for _ in range(2):
        pool.add(4, 400)
    pool.run(44)
    waiting = pool.add(61, 10)
    assert pool.step() == [] and waiting not in pool.scheduler.running
    assert pool.step() == [0]
    assert waiting in pool.scheduler.running and pool.stats.preemptions == 0


def test_windows_that_filled_while_blocks_lasted_are_compressed_later() -> None:
    """Two sequences hold two complete windows each when a third one lacks eight blocks: it need not wait for them to
    end, 350 steps later."""
    pool = Pool(num_blocks=40)
    for _ in range(2):
        pool.add(4, 400)
    pool.run(44)
    waiting = pool.add(70, 10)
    pool.run(24)
    assert waiting.logical_length > 0
    assert pool.stats.preemptions == 0


def test_compression_comes_before_preemption() -> None:
    """Two of three sequences that are about to begin a block find one free block, long before the next look."""
    pool = Pool(num_blocks=40)
    for _ in range(2):
        pool.add(4, 400)
    pool.run(44)
    pool.add(57, 10)
    assert pool.step() == [] and pool.scheduler.blocks.num_available == 1
    assert pool.step() != []
    assert pool.stats.preemptions == 0 and len(pool.scheduler.running) == 3

    without = Pool(num_blocks=40, retain_blocks=4)  # retention of everything: no compression
    for request in ((4, 120), (4, 120), (57, 10)):
        without.add(*request)
    assert without.run().stats.preemptions > 0


def test_the_same_requests_are_compressed_the_same_way_under_pressure() -> None:
    def jobs() -> list[tuple[int, int, int]]:
        pool = Pool(num_blocks=40, retain_tokens=6)
        for i in range(12):
            pool.add(3 + 5 * i % 17, 60 + i)
        return pool.run().jobs

    assert jobs() == jobs() and len(jobs()) >= 10


# One look of the pressure policy: windows of 4 blocks of 4 release 3 blocks each


def pressure(**options: Any) -> PressurePolicy:
    sizes = {"period": 8, "window_blocks": 4, "retain_blocks": 1, "buffer": 1, "max_sequences": 9}
    return PressurePolicy(paper_compression(method="kara", policy="pressure", **(sizes | options)), 4)


def decoding(seq_id: int, cached: int, remaining: int = 100, carried: int = 0) -> Sequence:
    """A sequence without a prompt, of `cached` KV pairs; it ends after `remaining` tokens at the latest."""
    seq = Sequence(seq_id, "", [0] * (cached + 1), SamplingParams(), max_length=cached + 1 + remaining, tail_start=0)
    seq.advance(cached)
    seq.carried_tail = carried
    seq.tables = [table(-(-cached // 4))]
    return seq


def table(num_blocks: int) -> BlockTable:
    found = BlockTable(BlockPool(num_blocks, False, None), 4, KVGroup())
    found.append(0, 4 * num_blocks)
    return found


def chosen(
    policy: CompressionPolicy,
    sequences: list[Sequence],
    available: int,
    missing: int = 0,
    steps: int = 8,
    tokens: int = TOKENS,
) -> list[int]:
    return [seq.seq_id for seq, _ in policy.select(sequences, EngineLoad(steps, available, missing, tokens))]


def test_only_as_many_as_it_takes_are_compressed() -> None:
    sequences = [decoding(i, 18) for i in range(4)]  # each adds two blocks within 8 steps
    for available, expected in ((8, []), (7, [0]), (5, [0]), (4, [0, 1]), (2, [0, 1]), (1, [0, 1, 2]), (0, [0, 1, 2])):
        assert chosen(pressure(), sequences, available) == expected
    assert chosen(pressure(max_sequences=2), sequences, 0) == [0, 1]
    assert chosen(pressure(), sequences, 100, missing=3) == [0]


def test_all_windows_that_filled_are_compressed_if_it_takes_them() -> None:
    policy, seq = pressure(), decoding(0, 50)
    for needed, expected in ((3, 3), (4, 6), (9, 9), (20, 9)):
        jobs = policy.select([seq], EngineLoad(8 * needed, 50, needed, TOKENS))
        assert sum(region.dropped for _, region in jobs) == 4 * expected


def test_growth_ends_with_the_sequence() -> None:
    sequences = [decoding(0, 18), decoding(1, 18, remaining=2)]  # the second has its last block
    assert chosen(pressure(), sequences, 2) == []
    assert chosen(pressure(), sequences, 1) == [0]


def test_the_need_is_looked_at_once_in_a_period() -> None:
    sequences, policy = [decoding(0, 18)], pressure()
    for steps in (1, 4, 7, 9):
        assert chosen(policy, sequences, 0, missing=5, steps=steps) == []
    assert chosen(policy, sequences, 0, missing=5, steps=16) == [0]
    assert chosen(policy, sequences, 0, missing=5, steps=16) == []  # a step without a decode does not move the clock


def test_a_sequence_that_ends_soon_is_left_alone_except_in_an_emergency() -> None:
    policy = pressure()
    assert chosen(policy, [decoding(0, 18, remaining=8), decoding(1, 18, remaining=9)], 0, steps=8) == [1]
    on_edge = [decoding(0, 20, remaining=3), decoding(1, 20, remaining=8)]
    assert chosen(policy, on_edge, 2, missing=9, steps=16) == []
    for steps in (16, 17, 17, 18):
        assert chosen(policy, on_edge, 1, steps=steps) == [1]  # the next step would preempt


def test_those_go_first_whose_blocks_serve_longest() -> None:
    sequences = [decoding(0, 18, remaining=20), decoding(1, 18, remaining=40), decoding(2, 18, remaining=30)]
    assert chosen(pressure(), sequences, 5) == [1]
    assert chosen(pressure(), sequences, 5, missing=7) == [1, 2, 0]


def test_of_equals_who_waited_longest_goes_first() -> None:
    sequences = [decoding(0, 19, carried=3), decoding(1, 19, carried=1), decoding(2, 18, carried=0), decoding(3, 18)]
    for seq in sequences:
        seq.max_length = seq.num_tokens + 50
    assert chosen(pressure(), sequences, 0, missing=20) == [1, 2, 3, 0]


def test_a_need_that_takes_more_tokens_than_a_step_has_is_met_in_several() -> None:
    """Each window has 16 KV pairs, all of which are recomputed, and releases three blocks."""
    sequences, policy = [decoding(i, 18) for i in range(4)], pressure()
    assert chosen(policy, sequences, 100, missing=9, tokens=32) == [0, 1]
    assert chosen(policy, sequences[2:], 106, missing=3, steps=9, tokens=15) == [2]  # one in any case
    assert chosen(policy, sequences[3:], 109, missing=3, steps=10) == []  # another need, later


def test_windows_of_one_sequence_are_divided_by_the_tokens() -> None:
    policy, seq = pressure(), decoding(0, 50)
    (_, region), *others = policy.select([seq], EngineLoad(8, 50, 9, 40))
    assert region.count == 2 and not others


def test_blocks_that_are_missing_now_come_before_the_tokens() -> None:
    sequences = [decoding(i, 20) for i in range(5)]  # each is about to begin a block
    assert chosen(pressure(), sequences, 1, tokens=0) == [0, 1]  # four are missing
    assert chosen(pressure(), sequences, 4, tokens=16) == [0]


def test_under_pressure_an_event_is_spread_unless_blocks_are_missing_now() -> None:
    """Of 40 decodes a window of 16 recomputed KV pairs takes its half. It releases three blocks."""
    policy, sequences = pressure(max_sequences=None), [decoding(i, 18) for i in range(40)]
    for steps in range(8, 11):
        assert chosen(policy, sequences, 100, missing=9, steps=steps) == [0]
    on_edge = [decoding(i, 20) for i in range(40)]  # each is about to begin a block
    assert chosen(policy, on_edge, 28, missing=30, steps=11) == [0, 1, 2, 3]
    assert chosen(policy, sequences[:1], 100, steps=12) == []


def test_an_event_goes_on_until_its_sequences_are_served() -> None:
    compression = paper_compression(
        method="kara", period=20, window_blocks=4, retain_blocks=1, buffer=1, max_sequences=5
    )
    policy = PeriodicPolicy(compression, 4)
    sequences = [decoding(i, 20, carried=i) for i in range(7)]
    found = []
    for steps in range(20, 26):
        served = chosen(policy, sequences, 0, steps=steps, tokens=35)
        sequences = [seq for seq in sequences if seq.seq_id not in served]
        found.append(served)
    assert found == [[0, 1], [2, 3], [4], [], [], []]
    assert chosen(policy, sequences, 0, steps=40, tokens=3) == [5]


@pytest.mark.parametrize("method", SPECS)
def test_tokens_of_a_window_are_the_queries_that_the_method_recomputes(method: str) -> None:
    """All of its tokens, if they are repeated; where few or none are needed, an eighth of its KV pairs."""
    spec = SPECS[method]
    options = {"query_window": 100, "buffer": 32, "threshold_tokens": 900, "budget_tokens": 300}
    options = fitting(method, "threshold" if spec.ragged else "periodic", **options)
    config = CompressionConfig(**options)
    expected = {"window": 770, "recent": 100, "buffer": 97, "none": 97}
    tokens = 770 if spec.repeats else expected[spec.queries]
    assert window_tokens(config, 770) == tokens


def simulated_peak(windows: Windows, prompt: int, total: int, tail_start: int) -> int:
    """Entry by entry."""
    cached = logical = prompt
    tail = prompt - tail_start
    peak = cached
    while True:
        while region := windows.complete(cached, tail):
            cached, tail = cached - region.dropped, windows.tail_after(cached, region)
        if logical == total:
            return -(-peak // windows.block_size)
        cached, logical, tail = cached + 1, logical + 1, tail + 1
        peak = max(peak, cached)


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("retain", [5, 8])
@pytest.mark.parametrize("compress_prompt", [False, True])
def test_peak_blocks(block_size: int, retain: int, compress_prompt: bool) -> None:
    windows = Windows(block_size, 12 // block_size, retain)
    compression = paper_compression(method="kara", window_blocks=12, buffer=1, compress_prompt=compress_prompt)
    config = EngineConfig(num_blocks=10, block_size=block_size, max_model_len=200, compression=compression)
    for prompt in (1, 7, 8, 40):
        for total in range(prompt, 150, 7):
            tail_start = 0 if compress_prompt else prompt
            expected = simulated_peak(windows, prompt, total, tail_start)
            assert peak_blocks(config, [windows], prompt, total) == expected


@pytest.mark.parametrize(
    "regions", [Windows(16, 4, 32), Windows(1, 64, 21, overlap=8), Windows(16, 3, 41), WholeCache(16, 1280, 1279)]
)
def test_the_lengths_of_a_long_text_are_known_at_once(regions: Regions) -> None:
    """Each request is held against the pool, in the thread in which all others decode."""
    found = list(regions.cached_lengths(100, 1 << 17, 100))
    with patch.object(type(regions), "is_periodic", False):
        each = list(regions.cached_lengths(100, 1 << 17, 100))
    assert len(found) < 10 < len(each)
    assert (max(found), found[-1]) == (max(each), each[-1])


def test_peak_without_compression() -> None:
    config = EngineConfig(num_blocks=10, block_size=16, max_model_len=100)
    assert peak_blocks(config, None, 1, 33) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retain_blocks": 0}, "retain_blocks=0 is not allowed: at least 1"),
        ({"retain_blocks": 4}, r"retain_blocks=4 is not allowed: at most window_blocks=3"),
        ({"window_blocks": 2.5}, "window_blocks=2.5: Expected `int`"),
        ({"method": "kora"}, "method='kora' is not allowed: choose one of auto, kara"),
        ({"policy": "sometimes"}, "policy='sometimes'"),
        ({"period": 0}, "period=0 is not allowed: at least 1"),
        ({"method": "kara", "max_chunk": 2}, "max_chunk=2 is not allowed: at least 3"),
        ({"buffer": -1}, "buffer=-1"),
        ({"method": "snapkv", "query_window": 0}, "query_window=0 is not allowed: at least 1"),
        ({"method": "kara_no_bi", "buffer": 0}, "buffer=0 is not allowed: at least 1: method='kara_no_bi' scores with"),
        ({"threshold_tokens": 9}, "threshold_tokens=9 is not allowed: policy='periodic' has window_blocks, "),
        (
            {"policy": "pressure", "budget_tokens": 9},
            "budget_tokens=9 is not allowed: policy='pressure' has",
        ),
        ({"policy": "standalone", "period": 9}, "period=9 is not allowed: policy='standalone' has window_blocks, "),
        (
            {"method": "keydiff", "policy": "threshold", "threshold_tokens": 9, "budget_tokens": 9, "window_blocks": 9},
            "window_blocks=9 is not allowed: policy='threshold' has threshold_tokens, budget_tokens, ",
        ),
        ({"recall_dtype": "int8"}, "recall_dtype='int8' is not allowed: only with recall_period or recall_bound"),
        (
            {"method": "adakv"},
            "method='adakv' is not allowed: it keeps more .*use policy=\"threshold\"",
        ),
        ({"method": "pyramidkv", "policy": "pressure"}, "method='pyramidkv' is not allowed: it keeps more"),
        ({"method": "adakv", "policy": "standalone"}, "method='adakv' is not allowed: it keeps more"),
    ],
)
def test_wrong_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        paper_compression(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold_tokens": None}, "threshold_tokens=None: Expected `int`"),
        ({"threshold_tokens": 0}, "threshold_tokens=0 is not allowed: at least 1"),
        ({"threshold_tokens": "64"}, "threshold_tokens='64': Expected"),
        ({"budget_tokens": 0}, "budget_tokens=0 is not allowed: between 1 and threshold_tokens=64"),
        ({"budget_tokens": 65}, "budget_tokens=65 is not allowed: between 1 and threshold_tokens=64"),
        ({"buffer": 33}, "buffer=33 is not allowed: at most budget_tokens=32, which it is part of"),
        ({"method": "kara"}, "method='kara' is not allowed: it scores with the query of every KV pair.*kara_no_bi"),
        ({"method": "kara_no_token2chunk"}, "method='kara_no_token2chunk' is not allowed: it scores with the query"),
        (
            {"query_window": 33},
            "query_window=33 is not allowed: at most 32: the last 32 KV pairs are those whose tokens",
        ),
        ({"budget_tokens": 62, "query_window": 5}, "query_window=5 is not allowed: at most 4"),
        ({"method": "adakv", "query_window": 17}, "query_window=17 is not allowed: at most 16"),
        ({"method": "pyramidkv", "buffer": 17}, "buffer=17 is not allowed: at most 16: the last 16 KV pairs"),
    ],
)
def test_wrong_options_of_a_threshold_are_named(options: dict, message: str) -> None:
    sizes = {"method": "snapkv", "threshold_tokens": 64, "budget_tokens": 32, "buffer": 4, "query_window": 8}
    CompressionConfig(policy="threshold", **sizes)
    with pytest.raises(ConfigError, match=message):
        CompressionConfig(policy="threshold", **(sizes | options))


def test_the_largest_sizes_of_a_threshold_are_accepted() -> None:
    sizes = {"policy": "threshold", "threshold_tokens": 64, "budget_tokens": 32}
    paper_compression(method="snapkv", buffer=32, query_window=32, **sizes)
    paper_compression(method="rkv", buffer=20, query_window=20, **(sizes | {"budget_tokens": 60}))
    paper_compression(method="adakv", buffer=16, query_window=16, **sizes)
    paper_compression(method="keydiff", buffer=32, **sizes)
    # With everything kept nothing is ever scored.
    everything = paper_compression(method="snapkv", **(sizes | {"budget_tokens": 64}))
    assert everything.keeps_all(16)


@pytest.mark.parametrize(
    ("options", "block_size", "message"),
    [
        ({"buffer": 32}, 16, r"buffer=32 is not allowed: at most what a window keeps, 16 KV pairs"),
        (
            {"buffer": 48},
            16,
            r"buffer=48 is not allowed: less than the window: a window of 3 blocks of 16 has 48 KV pairs",
        ),
        ({"retain_tokens": 0}, 256, r"retain_tokens=0 is not allowed: between 1 and 768"),
        ({"retain_tokens": 769}, 256, r"retain_tokens=769 is not allowed: between 1 and 768"),
        ({"policy": "standalone", "window_blocks": 99}, 256, r"block_size=256 is not allowed: policy=\"standalone\""),
    ],
)
def test_options_that_do_not_fit_each_other(options: dict, block_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(num_blocks=10, max_model_len=100, block_size=block_size, compression=paper_compression(**options))
