"""A simulated fleet: the same as a single machine where there is one, and no request lost whatever fails."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvllm import CompressionConfig
from kvllm.config import EngineConfig
from kvllm.distributed.replicas.router import ROUTING
from kvllm.entrypoints import cli
from kvllm.models.config import load_model_config
from kvllm.simulation.cost import CostModel
from kvllm.simulation.failures import Failure, of_part, parse_failures
from kvllm.simulation.fleet import FleetOutcome, simulate_fleet
from kvllm.simulation.hardware import load_hardware
from kvllm.simulation.machine import SimulatedMachine
from kvllm.simulation.simulate import simulate
from kvllm.simulation.traffic import arrivals_of, repeat_trace
from kvllm.simulation.workload import TraceRequest, arrival_times
from tests.helpers.examples import examples

MODEL = Path(__file__).parents[2] / "kvllm" / "assets" / "reasoner"
COST = CostModel(load_hardware("cpu"), load_model_config(MODEL), "float32")
PRESSURE = CompressionConfig(method="mean_attention", policy="pressure", period=8, window_blocks=3, buffer=4)


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
    monkeypatch.setattr(SimulatedMachine, "skip", lambda self, seconds: [])
    stepping = make_fleet()
    assert skipping.first_tokens == pytest.approx(stepping.first_tokens)
    assert skipping.latencies == pytest.approx(stepping.latencies)
    assert skipping.busy == pytest.approx(stepping.busy)
    assert skipping.cached_tokens == stepping.cached_tokens > 0


def test_runs_of_steps_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    skip, longest = SimulatedMachine.skip, 0

    def counted(machine: SimulatedMachine, seconds: float) -> list[float]:
        nonlocal longest
        steps = skip(machine, seconds)
        longest = max(longest, len(steps))
        return steps

    monkeypatch.setattr(SimulatedMachine, "skip", counted)
    make_fleet()
    assert longest > 5


def test_a_seed_gives_the_same_outcome() -> None:
    assert make_fleet() == make_fleet()


def test_prefixes_are_found_where_they_were() -> None:
    found = {rule: make_fleet(routing=rule).cached_tokens for rule in ROUTING}
    assert found["prefix"] >= found["both"] > found["load"] > 0


failures = st.builds(
    Failure,
    kind=st.sampled_from(["death", "slow", "drain"]),
    replica=st.integers(0, 1),
    count=st.integers(1, 2),
    at=st.floats(0, 5),
    seconds=st.floats(0.1, 3),
    factor=st.floats(0.5, 5),
)


@settings(max_examples=examples(60))
@given(failures=st.lists(failures, max_size=4), routing=st.sampled_from(ROUTING))
def test_every_request_ends_once_whatever_fails(failures: list[Failure], routing: str) -> None:
    outcome = make_fleet(routing=routing, failures=failures)
    arrivals = repeat_trace(TRACE, 60.0, 4.0)
    assert outcome.requests == len(arrivals)
    assert outcome.output_tokens == sum(arrival.request.output for arrival in arrivals)
    assert all(0 < first <= last for first, last in zip(outcome.first_tokens, outcome.latencies, strict=True))


def test_a_lost_replica_costs_what_it_had() -> None:
    deaths = [Failure(kind="death", at=at / 4, seconds=0.1) for at in range(16)]
    well, death = make_fleet(), make_fleet(failures=deaths)
    assert well.moved == 0 < death.moved
    assert death.again > 0 and sum(death.latencies) > sum(well.latencies)


def test_a_rolling_drain_loses_nothing() -> None:
    outcome = make_fleet(failures=[Failure(kind="drain", count=3, at=0.5, seconds=0.5)])
    assert outcome.moved == outcome.again == 0


def test_a_slow_replica_gets_less() -> None:
    well, slow = make_fleet(), make_fleet(failures=[Failure(kind="slow", at=0.0, seconds=60.0, factor=4.0)])
    assert slow.first_token.p99 > well.first_token.p99


def test_failures_of_parts() -> None:
    found = parse_failures("kind=death,replica=1,count=4,at=9; kind=slow,factor=3;")
    assert found == [Failure(kind="death", replica=1, count=4, at=9.0), Failure(kind="slow", factor=3.0)]
    assert of_part(found, 0, 2) == [Failure(kind="death", replica=1, count=1, at=9.0), found[1]]
    assert of_part(found, 2, 2) == [Failure(kind="death", replica=0, count=2, at=9.0)]
    assert of_part(found, 6, 2) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--failures", "kind=fire"], "--failures: 'kind=fire': .*; fields are kind, replica"),
        (["--failures", "kind=slow,factor=0"], "factor=0.0 is not allowed: above 0"),
        (["--failures", "kind=death,replica=4"], "replica=4 is not allowed: below 4"),
        (["--processes", "3"], "processes=3 is not allowed: a divisor of replicas=4"),
        (["--requests", "5"], "requests=5 is not allowed: not beside --trace"),
        (["--duration", "0"], "duration=0.0 is not allowed"),
    ],
)
def test_refused_options(tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([*COMMAND, "--trace", str(write_trace(tmp_path)), "--replicas", "4", *options])
    assert re.search(message, capsys.readouterr().err)


def test_the_command_compares_rules_of_routing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--replicas", "4", "--processes", "2", "--duration", "20", "--routing", "load", "both"]
    cli.main([*COMMAND, "--trace", str(write_trace(tmp_path)), "--compression", "policy=pressure", *options])
    title, head, requests, *rows = capsys.readouterr().out.strip().splitlines()
    assert title.startswith("4 replicas of reasoner on ")
    names = ["load, without", "load, compressed", "both, without", "both, compressed"]
    assert re.split(r"\s{2,}", head.strip()) == names
    assert len(set(requests.split()[1:])) == 1 and int(requests.split()[1]) > 10
    hits = next(row.split()[-4:] for row in rows if row.startswith("prompts found"))
    assert float(hits[2]) >= float(hits[0])


COMMAND = ["simulate", str(MODEL), "--hardware", "cpu", "--block-size", "8", "--num-blocks", "1200"]


def write_trace(directory: Path) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    values = ((1000 * each.time, *each.lengths, each.prefix) for each in TRACE if each.time is not None)
    path = directory / "trace.jsonl"
    path.write_text("\n".join(json.dumps(dict(zip(names, each, strict=True))) for each in values))
    return path
