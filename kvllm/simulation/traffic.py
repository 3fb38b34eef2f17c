"""Requests of a fleet: an hour of a service, as often as it takes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from kvllm.config import require
from kvllm.errors import ConfigError
from kvllm.simulation.workload import MOONCAKE_BLOCK, Lengths, TraceRequest


class Arrival(NamedTuple):
    """copy: the number of the trace's repetition; prompts of different ones have no token in common."""

    time: float
    request: TraceRequest
    copy: int = 0

    def prompt(self) -> list[int]:
        """Tokens that are equal to those of another prompt as far as the trace says; all 0 if it says nothing."""
        length, prefix = self.request.prompt, self.request.prefix
        tokens = [(self.copy << 32) + number for number in prefix for _ in range(MOONCAKE_BLOCK)]
        return (tokens + [0] * (length - len(tokens)))[:length]


def arrivals_of(lengths: Sequence[Lengths], times: Sequence[float]) -> list[Arrival]:
    """Requests of which nothing but their lengths is known."""
    return [Arrival(time, TraceRequest(*each, time)) for each, time in zip(lengths, times, strict=True)]


def own_rate(trace: Sequence[TraceRequest]) -> float:
    """Requests/s of a trace. Raises ConfigError as `repeat_trace` does."""
    return len(trace) / _moments(trace)[1]


def repeat_trace(trace: Sequence[TraceRequest], rate: float | None, duration: float, seed: int = 0) -> list[Arrival]:
    """The requests of `duration` seconds, `rate` a second (default: as many as the trace has), in order of arrival.

    As many copies of the trace as the rate takes run beside each other, each from a moment of its own and again from
    its beginning; they are stretched in time by less than a factor of 2 to have exactly that rate.

    Raises ConfigError if a request has no time.
    """
    times, span = _moments(trace)
    require(rate is None or 0 < rate < math.inf, "rate", rate, "requests/s, above 0")
    require(0 < duration < math.inf, "duration", duration, "seconds, above 0")
    own = len(times) / span
    copies = math.ceil((rate or own) / own - 1e-9)
    stretch = copies * own / (rate or own)
    rng = random.Random(seed)
    arrivals, number = [], 0
    for copy in range(copies):
        begin = -span * (copy + rng.random()) / copies if copies > 1 else 0.0
        while begin * stretch < duration:
            moments = ((begin + time) * stretch for time in times)
            arrivals += [
                Arrival(moment, each, number)
                for moment, each in zip(moments, trace, strict=True)
                if 0 <= moment < duration
            ]
            begin, number = begin + span, number + 1
    arrivals.sort(key=lambda each: each.time)
    return arrivals


def _moments(trace: Sequence[TraceRequest]) -> tuple[list[float], float]:
    """Seconds of each request after the first, and until the trace may begin again."""
    times = [each.time for each in trace if each.time is not None]
    if len(times) < len(trace) or max(times) == min(times):
        raise ConfigError("the trace does not say when requests arrived: give it as --workload, with a --rate")
    first, last = min(times), max(times)
    return [time - first for time in times], (last - first) * len(times) / (len(times) - 1)
