"""Tenants of a simulated service: when each of them sends requests, how long these are, and how each was served."""

from __future__ import annotations

import math
import random
from itertools import compress
from pathlib import Path
from statistics import quantiles

import msgspec
from msgspec import Struct

from kvllm.config import EngineConfig, TenantConfig, require
from kvllm.errors import ConfigError
from kvllm.simulation.cost import CostModel
from kvllm.simulation.simulate import Outcome, simulate
from kvllm.simulation.workload import Lengths, read_trace, synthetic


class TenantLoad(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant's requests: a Poisson process, steady or in bursts.

    rate: requests/s while it sends.
    on_seconds, cycle_seconds: it sends in the first `on_seconds` of every `cycle_seconds`. Default: all the time.
    input_len, output_len, range_ratio: lengths of prompts and outputs, as in SyntheticWorkload, or
    workload: a trace from which lengths are drawn at random.
    weight, guaranteed_share: see TenantConfig.
    """

    name: str
    rate: float
    on_seconds: float = math.inf
    cycle_seconds: float = math.inf
    input_len: int = 512
    output_len: int = 128
    range_ratio: float = 0.5
    workload: str | None = None
    weight: float = 1.0
    guaranteed_share: float = 0.0

    def __post_init__(self) -> None:
        require(0 < self.rate < math.inf, "rate", self.rate, "requests/s, above 0")
        allowed = f"above 0 and at most cycle_seconds={self.cycle_seconds}"
        require(0 < self.on_seconds <= self.cycle_seconds, "on_seconds", self.on_seconds, allowed)
        for field in ("input_len", "output_len"):
            require(getattr(self, field) >= 1, field, getattr(self, field), "at least 1")
        require(0 <= self.range_ratio < 1, "range_ratio", self.range_ratio, "0 to below 1")
        self.config  # noqa: B018 which checks its options

    @property
    def config(self) -> TenantConfig:
        return TenantConfig(weight=self.weight, guaranteed_share=self.guaranteed_share)

    def arrivals(self, duration: float, rng: random.Random) -> list[float]:
        """Seconds at which requests arrive."""
        times = []
        sending = 0.0  # seconds that it has sent
        while True:
            sending += rng.expovariate(self.rate)
            cycles, rest = divmod(sending, self.on_seconds)
            time = rest if cycles == 0 else cycles * self.cycle_seconds + rest
            if time >= duration:
                return times
            times.append(time)

    def lengths(self, count: int, longest: int, rng: random.Random) -> list[Lengths]:
        if self.workload is None:
            drawn = synthetic(rng, count, self.input_len, self.output_len, self.range_ratio)
            prompts = [min(prompt, longest - 1) for prompt, _ in drawn]
            return [(prompt, min(output, longest - prompt)) for prompt, (_, output) in zip(prompts, drawn, strict=True)]
        known, _ = read_trace(Path(self.workload), None, longest)
        return rng.choices(known, k=count)


class Load(Struct):
    """The requests of several tenants in order of arrival."""

    lengths: list[Lengths]
    arrivals: list[float]
    tenants: list[str]


class Served(Struct, kw_only=True):
    """How a tenant was served. first_token: p50 and p99 of the seconds to a request's first token.

    throughput_share: of all output tokens.
    """

    requests: int
    output_tokens: int
    throughput_share: float
    first_token: tuple[float, float]
    preemptions: int


def parse_tenants(text: str) -> list[TenantLoad]:
    """Read `key=value,...;key=value,...`, a tenant after each semicolon, or a file: JSON or TOML with `tenants`.

    Raises ConfigError for what cannot be read, unknown fields, values that are not allowed, and names that come twice.
    """
    path = Path(text)
    if path.suffix in (".json", ".toml"):
        tenants = _read(path)
    else:
        tenants = [_parse(part) for part in text.split(";") if part.strip()]
    names = [tenant.name for tenant in tenants]
    require(len(set(names)) == len(names) > 0, "tenants", names, "at least one, and each name once")
    return tenants


def make_load(tenants: list[TenantLoad], duration: float, longest: int, seed: int = 0) -> Load:
    """The requests of all tenants in `duration` seconds. A tenant's own do not depend on the others."""
    require(duration < math.inf, "duration", duration, "a number of seconds")
    requests = []
    for tenant in tenants:
        rng = random.Random(f"{seed} {tenant.name}")
        times = tenant.arrivals(duration, rng)
        lengths = tenant.lengths(len(times), longest, rng)
        requests += [(time, each, tenant.name) for time, each in zip(times, lengths, strict=True)]
    require(bool(requests), "duration", duration, "longer: no tenant has sent a request")
    requests.sort()
    return Load([each for _, each, _ in requests], [time for time, _, _ in requests], [name for _, _, name in requests])


def without(load: Load, tenant: str) -> Load:
    """The requests of all other tenants. Raises ConfigError if there are none, or no such tenant."""
    allowed = f"one of several tenants: {', '.join(sorted(set(load.tenants)))}"
    require(0 < load.tenants.count(tenant) < len(load.tenants), "without", tenant, allowed)
    kept = [name != tenant for name in load.tenants]
    return Load(
        list(compress(load.lengths, kept)), list(compress(load.arrivals, kept)), list(compress(load.tenants, kept))
    )


def serve(
    config: EngineConfig, cost: CostModel, load: Load, *, in_order: bool = False
) -> tuple[Outcome, dict[str, Served]]:
    """Simulate a load. in_order: first come, first served, as if all requests were of one tenant."""
    outcome = simulate(config, cost, load.lengths, load.arrivals, None if in_order else load.tenants)
    return outcome, {name: _served(load, outcome, name) for name in sorted(set(load.tenants))}


def _served(load: Load, outcome: Outcome, tenant: str) -> Served:
    chosen = [index for index, name in enumerate(load.tenants) if name == tenant]
    tokens = sum(load.lengths[index][1] for index in chosen)
    times = [outcome.first_tokens[index] for index in chosen]
    percentiles = quantiles(times, n=100, method="inclusive") if len(times) > 1 else times * 99
    return Served(
        requests=len(chosen),
        output_tokens=tokens,
        throughput_share=tokens / outcome.output_tokens,
        first_token=(percentiles[49], percentiles[98]),
        preemptions=sum(outcome.preempted[index] for index in chosen),
    )


def _read(path: Path) -> list[TenantLoad]:
    decode = msgspec.toml.decode if path.suffix == ".toml" else msgspec.json.decode
    try:
        return decode(path.read_bytes(), type=_File).tenants
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}; fields are {', '.join(_FIELDS)}") from None


def _parse(text: str) -> TenantLoad:
    settings = {name: value for name, _, value in (each.partition("=") for each in text.strip().split(","))}
    try:
        return msgspec.convert(settings, TenantLoad, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--tenants: {text!r}: {error}; fields are {', '.join(_FIELDS)}") from None


class _File(Struct, forbid_unknown_fields=True):
    tenants: list[TenantLoad]


_FIELDS = TenantLoad.__struct_fields__
