"""The shortest scenario that still fails, as a test to paste."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from tests.deterministic.scenario import Arrival, Scenario

T = TypeVar("T")
Fails = Callable[[Scenario], bool]


def shrink(scenario: Scenario, fails: Fails, attempts: int = 500) -> Scenario:
    """Leave out and shorten what the failure does not need, in at most so many attempts."""
    left = attempts
    found = True
    while found and left:
        found = False
        for smaller in itertools.islice(_smaller(scenario), left):
            left -= 1
            if fails(smaller):
                scenario, found = smaller, True
                break
    return scenario


def as_test(scenario: Scenario) -> str:
    """The source of a test that runs a scenario."""
    text = msgspec.json.format(msgspec.json.encode(scenario), indent=1).decode()
    return (
        f"def test_seed_{scenario.seed}() -> None:\n"
        f'    scenario = msgspec.json.decode("""{text}""", type=Scenario)\n'
        "    assert run(scenario).failure is None\n"
    )


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios with less in them, the ones with much less first."""
    for arrivals in _without(scenario.arrivals):
        yield replace(scenario, arrivals=arrivals)
    for faults in _without(scenario.faults):
        yield replace(scenario, faults=faults)
    if scenario.replicas > 1:
        yield replace(scenario, replicas=scenario.replicas - 1)
    if scenario.supervised:
        yield replace(scenario, supervised=False)
    optional = ("compression", "speculation", "tenants", "num_host_blocks", "kv_offloading_path", "num_state_snapshots")
    for name in optional:
        if name in scenario.options:
            yield replace(scenario, options={key: each for key, each in scenario.options.items() if key != name})
    for index, arrival in enumerate(scenario.arrivals):
        for each in _simpler(arrival):
            yield replace(scenario, arrivals=[*scenario.arrivals[:index], each, *scenario.arrivals[index + 1 :]])


def _without(items: list[T]) -> Iterator[list[T]]:
    size = len(items)
    while size:
        for begin in range(0, len(items), size):
            yield items[:begin] + items[begin + size :]
        size //= 2


def _simpler(arrival: Arrival) -> Iterator[Arrival]:
    if len(arrival.prompt) > 1:
        yield replace(arrival, prompt=arrival.prompt[: len(arrival.prompt) // 2])
    if arrival.sampling["max_tokens"] > 1:
        yield replace(arrival, sampling=arrival.sampling | {"max_tokens": arrival.sampling["max_tokens"] // 2})
    for name in sorted(arrival.sampling.keys() - {"max_tokens", "seed", "temperature", "ignore_eos"}):
        yield replace(arrival, sampling={key: each for key, each in arrival.sampling.items() if key != name})
    plain = Arrival(at=arrival.at, prompt=arrival.prompt, sampling=arrival.sampling)
    for name in ("via", "priority", "tenant", "salt", "adapter", "pause", "abort_at", "leave_at", "raises_at"):
        if getattr(arrival, name) != getattr(plain, name):
            yield replace(arrival, **{name: getattr(plain, name)})
