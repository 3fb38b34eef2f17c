"""Counters of an engine under vLLM's names, as its `LLM.get_metrics` gives them."""

from __future__ import annotations

from dataclasses import dataclass

from kvllm.stats import EngineStats


@dataclass(frozen=True)
class Metric:
    """A figure. labels: `model_name` and `engine`, as text."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """It only grows."""

    value: int


@dataclass(frozen=True)
class Gauge(Metric):
    """It is as it is now."""

    value: float


COUNTERS = {
    "vllm:prompt_tokens": "prompt_tokens",
    "vllm:generation_tokens": "output_tokens",
    "vllm:num_preemptions": "preemptions",
    "vllm:prefix_cache_queries": "prefix_cache_queries",
    "vllm:prefix_cache_hits": "prefix_cache_hits",
}
GAUGES = {"vllm:num_requests_running": "num_running", "vllm:num_requests_waiting": "num_waiting"}
"""Names of vLLM, and the fields of EngineStats."""


def metrics_of(stats: EngineStats, model_name: str) -> list[Metric]:
    """The figures now."""
    labels = {"model_name": model_name, "engine": "0"}
    usage = Gauge("vllm:kv_cache_usage_perc", labels, stats.blocks_in_use / stats.num_blocks)
    gauges = [Gauge(name, labels, stats[field]) for name, field in GAUGES.items()]
    return [*gauges, usage, *(Counter(name, labels, stats[field]) for name, field in COUNTERS.items())]
