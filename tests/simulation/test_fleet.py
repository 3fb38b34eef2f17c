"""A simulated fleet: the same as a single machine where there is one, and no request lost whatever fails."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvllm import CompressionConfig, ConfigError
from kvllm.config import EngineConfig
from kvllm.entrypoints import cli
from kvllm.models.config import load_model_config
from kvllm.simulation.cost import CostModel
from kvllm.simulation.failures import Failure, of_part, parse_failures
from kvllm.simulation.fleet import FleetOutcome, simulate_fleet
from kvllm.simulation.hardware import load_hardware
from kvllm.simulation.machine import SimulatedMachine
from kvllm.simulation.simulate import simulate
from kvllm.simulation.traffic import arrivals_of, own_rate, repeat_trace
from kvllm.simulation.workload import TraceRequest, arrival_times

MODEL = Path(__file__).parents[2] / "kvllm" / "assets" / "reasoner"
COST = CostModel(load_hardware("cpu"), load_model_config(MODEL), "float32")
PRESSURE = CompressionConfig(method="kara_sharp", policy="pressure", period=8, window_blocks=3, buffer=4)


def make_config(num_blocks: int = 400, **options: object) -> EngineConfig:
    return EngineConfig(num_blocks=num_blocks, block_size=8, max_model_len=1024, max_num_seqs=16, **options)  # type: ignore[arg-type]


def make_lengths(count: int) -> list[tuple[int, int]]:
    rng = random.Random(0)
    return [(rng.randint(1, 200), rng.randint(1, 300)) for _ in range(count)]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("compression", [None, PRESSURE])
@pytest.mark.parametrize("blocks", [130, 3000])
def test_one_replica_is_a_machine(ahead: bool, compression: CompressionConfig | None, blocks: int) -> None:
    config = make_config(blocks, async_scheduling=ahead, compression=compression)
    lengths, times = make_lengths(60), arrival_times(60, 30)
    alone = simulate(config, COST, lengths, times)
    fleet = simulate_fleet(config, COST, arrivals_of(lengths, times), 1, report_seconds=0)
    assert (fleet.requests, fleet.output_tokens, fleet.preemptions) == (60, alone.output_tokens, alone.preemptions)
    assert fleet.first_tokens == pytest.approx(alone.first_tokens)
    assert fleet.seconds == pytest.approx(alone.seconds)
    assert sum(fleet.latencies) / 60 == pytest.approx(alone.mean_latency)
    assert fleet.between.p99 == pytest.approx(alone.inter_token.p99, abs=1e-4)
    assert (alone.preemptions + alone.compression_events > 0) == (blocks == 130)


TRACE = [
    TraceRequest(512 * turn + 40, 30 + 7 * turn, float(turn + user / 7), [0, *range(10 * user, 10 * user + turn)])
    for user in range(1, 30)
    for turn in range(1, 2 + user % 2)
]
"""Conversations, each with a beginning that all have."""


def make_fleet(replicas: int = 3, routing: str = "both", **options: object) -> FleetOutcome:
    config = msgspec.structs.replace(make_config(800), max_model_len=4096)
    arrivals = repeat_trace(TRACE, 60.0, 4.0)
    return simulate_fleet(config, COST, arrivals, replicas, routing=routing, **options)  # type: ignore[arg-type]


def test_steps_that_are_skipped_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    skipping = make_fleet()
    skips = Counter[int]()
    skip = SimulatedMachine.skip
    monkeypatch.setattr(SimulatedMachine, "skip", lambda self, seconds: skips.update([len(skip(self, seconds))]))
    with_skips = 0
    monkeypatch.setattr(SimulatedMachine, "skip", lambda self, seconds: [])
    stepping = make_fleet()
    assert skipping.first_tokens == pytest.approx(stepping.first_tokens)
    assert skipping.latencies == pytest.approx(stepping.latencies)
    assert skipping.busy == pytest.approx(stepping.busy)
    assert skipping.cached_tokens == stepping.cached_tokens > 0
