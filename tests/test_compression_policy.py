"""The compression policies against the golden vectors, through the scheduler that production uses."""

from __future__ import annotations

import numpy as np
import pytest

from kvllm.config import CompressionConfig, EngineConfig
from kvllm.core.compression_policy import peak_blocks
from kvllm.core.protocol import SampledToken, StepResult
from kvllm.core.regions import Windows
from kvllm.core.scheduler import Scheduler
from kvllm.core.sequence import Sequence
from kvllm.errors import ConfigError
from kvllm.sampling_params import SamplingParams
from kvllm.stats import EngineStats


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
            start = job.first_block * block_size
            end = start + job.size
            events.append([global_step - 1, job.seq_id, cached, start, cached - end, cached - job.dropped])
        history.append([[seq.cached_length, seq.uncompressed_tail] for seq in sequences])
    return events, history


def step(scheduler: Scheduler):
    """One step, with a worker that returns token 0. -> jobs with the C that they found."""
    found = {seq.seq_id: seq.cached_length for seq in scheduler.running}
    plan = scheduler.schedule()
    tokens = [SampledToken(0) for item in plan.scheduled if item.samples]
    for seq, _ in scheduler.update(plan, StepResult(tokens)):
        if seq.num_tokens >= seq.max_length:
            scheduler.finish(seq)
    return [(job, found[job.seq_id]) for job in plan.compressions]


def as_in_vectors(history: list, events: list) -> np.ndarray:
    """The vectors note (C, u) behind the event of a step; the engine compresses at the beginning of the next. And they
    count u from 0 on after an event, as the paper does, where the engine counts the entries behind the window too."""
    history = np.array(history)
    for global_step, seq_id, _, _, tail, after in events:
        history[global_step - 1, seq_id] = after, tail
    for i, (global_step, seq_id, _, _, tail, _) in enumerate(events):
        following = [event[0] for event in events[i + 1 :] if event[1] == seq_id]
        history[global_step - 1 : following[0] - 1 if following else None, seq_id, 1] -= tail
    return history


@pytest.mark.parametrize(("name", "order"), [("small", "most_uncompressed"), ("small_queue", "queue")])
def test_small_engine(load_vectors, name: str, order: str) -> None:
    vectors, _ = load_vectors("periodic_policy")
    compression = CompressionConfig(period=4, max_sequences=1, window_blocks=3, retain_tokens=9, buffer=2, order=order)
    events, history = run(compression, 8, [(10, 400), (3, 260), (17, 120), (0, 400)])
    expected = vectors[f"{name}_events"]
    assert events == expected[: len(events)].tolist()
    assert all(event[0] == 400 for event in expected[len(events) :])  # after the last step there is no next one
    events = expected.tolist()
    assert (as_in_vectors(history, events) == vectors[f"{name}_hist"]).all()


def test_paper_settings(load_vectors) -> None:
    vectors, _ = load_vectors("periodic_policy")
    events, history = run(CompressionConfig(retain_tokens=257), 256, [(100, 4000)])
    assert events == vectors["paper_events"].tolist()
    assert (as_in_vectors(history, events)[:, 0] == vectors["paper_hist"]).all()


def test_many_sequences(load_vectors) -> None:
    vectors, _ = load_vectors("periodic_policy")
    lengths = list(zip(vectors["many_prompt"].tolist(), vectors["many_gen"].tolist(), strict=True))
    events, history = run(CompressionConfig(retain_tokens=257), 256, lengths)
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
    events, _ = run(CompressionConfig(), 256, lengths)
    fired = sorted({event[0] for event in events})
    assert set(fired) <= set(vectors["fires"].tolist()) and fired[0] == vectors["fires"][0]
    assert all(sum(event[0] == step for event in events) <= 30 for step in fired)


def test_standalone_schedule(load_vectors) -> None:
    vectors, meta = load_vectors("kara_schedule")
    for i, case in enumerate(meta["cases"]):
        window, buffer, prefix = case["W"], case["U"], case["protected_prefix"]
        compressible = window - buffer
        retain = buffer + -(-compressible * int(case["r"][2:]) // 10)
        compression = CompressionConfig(
            policy="standalone", window_blocks=window, retain_tokens=retain, buffer=buffer, chunk_budget=case["alpha"]
        )
        events, history = run(compression, 1, [(prefix, case["decode_tokens"])])
        traced = np.array(history)[:, 0]
        # The vectors' trace is behind the event of a step.
        expected = vectors[f"c{i}_trace"]
        fired = {event[0] - 1: event for event in events}
        for row, (cached, tail) in enumerate(traced):
            if row in fired:
                cached, tail = fired[row][5], buffer
            if row + 1 < len(expected):
                assert (cached, tail) == tuple(expected[row][:2])


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
    for prompt in (1, 7, 8, 40):
        for total in range(prompt, 150, 7):
            tail_start = 0 if compress_prompt else prompt
            assert windows.peak_blocks(prompt, total, tail_start) == simulated_peak(windows, prompt, total, tail_start)


def test_peak_without_compression() -> None:
    config = EngineConfig(num_blocks=10, block_size=16, max_model_len=100)
    assert peak_blocks(config, None, 1, 33) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retain_blocks": 0}, "retain_blocks=0 is not allowed: at least 1"),
        ({"retain_blocks": 4}, r"retain_blocks=4 is not allowed: at most window_blocks=3"),
        ({"window_blocks": 2.5}, "window_blocks=2.5: Expected `int`"),
        ({"method": "kora"}, "method='kora' is not allowed: choose one of kara"),
        ({"policy": "sometimes"}, "policy='sometimes'"),
        ({"period": 0}, "period=0 is not allowed: at least 1"),
        ({"max_chunk": 2}, "max_chunk=2 is not allowed: at least 3"),
        ({"buffer": -1}, "buffer=-1"),
    ],
)
def test_wrong_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CompressionConfig(**options)


@pytest.mark.parametrize(
    ("options", "block_size", "message"),
    [
        ({"buffer": 32}, 16, r"buffer=32 is not allowed: at most what a window keeps, 16 entries"),
        (
            {"buffer": 48},
            16,
            r"buffer=48 is not allowed: less than the window: a window of 3 blocks of 16 has 48 entries",
        ),
        ({"retain_tokens": 0}, 256, r"retain_tokens=0 is not allowed: between 1 and 768"),
        ({"retain_tokens": 769}, 256, r"retain_tokens=769 is not allowed: between 1 and 768"),
        ({"policy": "standalone", "window_blocks": 99}, 256, r"block_size=256 is not allowed: policy=\"standalone\""),
    ],
)
def test_options_that_do_not_fit_each_other(options: dict, block_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(num_blocks=10, max_model_len=100, block_size=block_size, compression=CompressionConfig(**options))
