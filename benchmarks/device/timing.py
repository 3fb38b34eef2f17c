"""How long calls take on the target.

On a GPU: device events around many calls in one CUDA graph, so that no gap between launches counts; over inputs that
together exceed the cache; warmed up; the median over repeats. On the CPU: the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from benchmarks.device.target import Target

Call = Callable[[], object]
CALLS_IN_GRAPH = 32
REPEATS = 15
WARM_UP = 3


def input_sets(target: Target, num_bytes: int) -> int:
    """How many sets of inputs of `num_bytes` exceed the cache twice over, so that each is read from memory again."""
    return max(2, min(128, -(-2 * target.cache_bytes // num_bytes)))


def seconds_in_graph(target: Target, calls: Sequence[Call]) -> float:
    """Seconds of one call of `calls`, which do the same on different inputs and leave the host alone."""
    if target.device.type == "cpu":
        return _seconds_by_clock(calls)
    rounds = -(-CALLS_IN_GRAPH // len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compilation, and what libraries set up at a first call
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in [*calls] * rounds:
            call()
    return _seconds_by_events(graph.replay) / (rounds * len(calls))


def seconds_with_host(target: Target, calls: Sequence[Call]) -> float:
    """The same for calls that cannot be captured: the host's time between their launches counts."""
    if target.device.type == "cpu":
        return _seconds_by_clock(calls)

    def all_calls() -> None:
        for call in calls:
            call()

    return _seconds_by_events(all_calls) / len(calls)


def _seconds_by_events(call: Call) -> float:
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


def _seconds_by_clock(calls: Sequence[Call]) -> float:
    times = []
    for call in [calls[0], *calls]:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return median(times[1:])
