"""Prometheus metrics: vLLM's names with its label `model_name`, so that its boards work, and `kvllm:` ones."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvllm.outputs import RequestMetrics
from kvllm.sampling_params import SamplingParams
from kvllm.stats import STEP_TOKENS, DraftCounts, EngineStats

FAST_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40)
SLOW_SECONDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
COUNTS = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)

ENGINE_COUNTERS = {
    "vllm:num_preemptions": ("Sequences that lost their cache and were queued again.", "preemptions"),
    "kvllm:steps": ("Forward passes.", "steps"),
    "kvllm:step_seconds": ("Time of all steps, from their planning to their outputs.", "step_seconds"),
    "kvllm:tokens_recomputed": ("Tokens that preempted sequences had computed.", "tokens_recomputed"),
    "kvllm:swapped_out": ("Preempted sequences whose blocks went to the host.", "swapped_out"),
    "kvllm:swapped_in": ("Preempted sequences whose blocks came back from the host.", "swapped_in"),
    "kvllm:blocks_stored": ("KV blocks that went to the host.", "blocks_stored"),
    "kvllm:blocks_loaded": ("KV blocks that came back from the host.", "blocks_loaded"),
    "kvllm:prefix_host_hits": ("Tokens of prompts whose KV pairs came back from the host.", "prefix_host_hits"),
    "kvllm:compression_events": ("Steps that compressed.", "compression_events"),
    "kvllm:windows_compressed": ("Windows compressed, summed over sequences.", "windows_compressed"),
    "kvllm:evicted_pairs": ("KV pairs dropped, summed over sequences.", "entries_evicted"),
    "kvllm:blocks_released": ("Blocks that compression returned to the pool.", "blocks_released"),
}
STALLS = {
    "kvllm:stall_seconds": ("Time that running sequences waited for their next tokens.", "stalls"),
    "kvllm:event_stall_seconds": ("The same, of steps that compressed.", "event_stalls"),
}
PROMPT_COUNTERS = {
    "vllm:prompt_tokens": "Prompt tokens of requests that ended.",
    "vllm:prefix_cache_queries": "Prompt tokens looked up.",
    "vllm:prefix_cache_hits": "Prompt tokens found in the prefix cache.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Time to the first token.", FAST_SECONDS),
    "request_time_per_output_token_seconds": (
        "Time of a token, after the first one, over a whole request.",
        TOKEN_SECONDS,
    ),
    "e2e_request_latency_seconds": ("Time of a request.", SLOW_SECONDS),
    "request_queue_time_seconds": ("Time in the queue.", SLOW_SECONDS),
    "request_inference_time_seconds": ("Time after the queue.", SLOW_SECONDS),
    "request_prefill_time_seconds": ("Time from the queue to the first token.", SLOW_SECONDS),
    "request_decode_time_seconds": ("From the first token to the last one.", SLOW_SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a request.", TOKENS),
    "request_generation_tokens": ("Generated tokens of a request.", TOKENS),
    "request_params_n": ("n of a request.", COUNTS),
    "request_params_max_tokens": ("max_tokens of a request.", TOKENS),
    "request_num_preemptions": ("Preemptions of a request.", PREEMPTIONS),
}
PHASES = ("prefill", "decode", "recompute", "score", "compact")
LABELS = ("model_name", "engine")
Read = Callable[[], tuple[EngineStats, int]]
"""Gives the engine's counters, and how many completions have not ended."""
Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)


class EngineCollector(Collector):
    """Makes metrics of the engine's own counters when they are asked for."""

    def __init__(self, model_name: str, read: Read, rejections: dict[str, int]) -> None:
        self._labels = (model_name, "0")
        self._read = read
        self._rejections = rejections

    def collect(self) -> Iterator[Metric]:
        stats, in_flight = self._read()
        running, blocks = next(iter(stats.timeline_since(stats.steps - 1)), (0, 0)) if in_flight else (0, 0)
        running = min(running, in_flight)
        waiting = in_flight - running
        yield self._gauge("vllm:num_requests_running", "Sequences of the last step.", running)
        yield self._gauge("vllm:num_requests_waiting", "Completions that are in no step yet.", waiting)
        text = "The same, by what they wait for."  # vLLM's reasons: nothing here is deferred for anything but room
        by_reason = {"capacity": waiting, "deferred": 0}
        yield self._by("reason", GaugeMetricFamily, "vllm:num_requests_waiting_by_reason", text, by_reason)
        text = "Share of the KV blocks in use: 1 is all."
        yield self._gauge("vllm:kv_cache_usage_perc", text, blocks / stats.num_blocks)
        yield self._gauge("kvllm:blocks_in_use", "KV blocks that sequences own.", blocks)
        yield self._gauge("kvllm:blocks", "KV blocks in the pool.", stats.num_blocks)
        yield self._gauge("kvllm:host_blocks_in_use", "KV blocks that the host holds.", stats.host_blocks_in_use)
        yield self._gauge("kvllm:host_blocks", "KV blocks for which the host has room.", stats.num_host_blocks)
        for name, (text, field) in ENGINE_COUNTERS.items():
            yield _counter(name, text, self._labels, stats[field])
        yield from self._drafts(stats.drafts)
        phases = {phase: stats[f"{phase}_seconds"] for phase in PHASES}
        yield self._by("phase", CounterMetricFamily, "kvllm:phase_seconds", "Time of steps.", phases)
        for name, (text, field) in STALLS.items():
            durations = stats[field]  # with every bound at which the buckets have doubled
            buckets = [(str(bound), float(count)) for bound, count in durations.cumulative()]
            histogram = HistogramMetricFamily(name, text, labels=LABELS)
            histogram.add_metric(self._labels, [*buckets, ("+Inf", float(sum(durations.counts)))], durations.total)
            yield histogram
        steps, text = stats.step_tokens, "Tokens of a step."
        yield _histogram("vllm:iteration_tokens_total", text, self._labels, STEP_TOKENS, steps.counts, steps.total)
        text = "Requests refused because the server was busy or about to stop."
        yield self._by("reason", CounterMetricFamily, "vllm:admission_rejections", text, self._rejections)

    def _drafts(self, drafts: DraftCounts) -> Iterator[Metric]:
        prefix, right = "vllm:spec_decode_num", "Drafted tokens that the model chose, too"
        yield _counter(f"{prefix}_drafts", "Drafts of speculative decoding.", self._labels, drafts.drafts)
        yield _counter(f"{prefix}_draft_tokens", "Drafted tokens.", self._labels, drafts.tokens)
        yield _counter(f"{prefix}_accepted_tokens", f"{right}.", self._labels, sum(drafts.right))
        by_position = {str(position): count for position, count in enumerate(drafts.right)}
        text = f"{right}, by their positions in drafts."
        yield self._by("position", CounterMetricFamily, f"{prefix}_accepted_tokens_per_pos", text, by_position)

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, text, labels=LABELS)
        gauge.add_metric(self._labels, value)
        return gauge

    def _by(self, label: str, family: type[Family], name: str, text: str, values: Mapping[str, float]) -> Family:
        """A value for each value of one more label."""
        metric = family(name, text, labels=(*LABELS, label))
        for each, value in values.items():
            metric.add_metric((*self._labels, each), value)
        return metric


class TokenCollector(Collector):
    """The tokens that were generated, and the times between those of a completion.

    They are counted with each event of each stream, where a Counter and a Histogram take as long as making the event.
    """

    def __init__(self, model_name: str) -> None:
        self._labels = (model_name, "0")
        self._tokens = 0
        self._seconds = 0.0
        self._counts = [0] * (len(TOKEN_SECONDS) + 1)

    def count(self, number: int, seconds: float | None) -> None:
        """Tokens that came together. seconds: since those before; None for the first ones of a completion."""
        self._tokens += number
        gaps = number if seconds is not None else number - 1
        if gaps:
            self._seconds += seconds or 0.0
            self._counts[bisect_left(TOKEN_SECONDS, (seconds or 0.0) / gaps)] += gaps

    def collect(self) -> Iterator[Metric]:
        yield _counter("vllm:generation_tokens", "Tokens generated.", self._labels, self._tokens)
        text = "Time between tokens of a completion."
        name = "vllm:inter_token_latency_seconds"
        yield _histogram(name, text, self._labels, TOKEN_SECONDS, self._counts, self._seconds)


def _counter(name: str, text: str, labels: tuple[str, str], value: float) -> CounterMetricFamily:
    counter = CounterMetricFamily(name, text, labels=LABELS)
    counter.add_metric(labels, value)
    return counter


def _histogram(
    name: str, text: str, labels: tuple[str, str], bounds: Sequence[float], counts: list[int], total: float
) -> HistogramMetricFamily:
    """counts: of the values up to each bound, and of those above the last one."""
    histogram = HistogramMetricFamily(name, text, labels=LABELS)
    names = (*map(str, map(float, bounds)), "+Inf")
    histogram.add_metric(labels, list(zip(names, map(float, accumulate(counts)), strict=True)), total)
    return histogram


class ServerMetrics:
    """Metrics that the server counts itself, of requests as they go."""

    def __init__(self, model_name: str, read: Read, rejections: dict[str, int], cache: dict[str, str]) -> None:
        """read: see Read. cache: the settings of the KV cache, as labels."""
        self._registry = registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        counters = [Counter(name, text, LABELS, registry=registry) for name, text in PROMPT_COUNTERS.items()]
        self._prompt_tokens, self._cache_queries, self._cache_hits = (each.labels(**self._labels) for each in counters)
        labels = (*LABELS, "finished_reason")
        self._success = Counter("vllm:request_success", "Completions ended.", labels, registry=registry)
        self._observe = {
            name: Histogram(f"vllm:{name}", text, LABELS, registry=registry, buckets=buckets)
            .labels(**self._labels)
            .observe
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        info = Gauge("vllm:cache_config_info", "Settings of the KV cache.", ("engine", *cache), registry=registry)
        info.labels(engine="0", **cache).set(1)
        registry.register(EngineCollector(model_name, read, rejections))
        tokens = TokenCollector(model_name)
        registry.register(tokens)
        self.count_tokens = tokens.count

    def count_finish(self, reason: str) -> None:
        """A completion has ended."""
        self._success.labels(**self._labels, finished_reason=reason).inc()

    def count_abort(self, completions: int) -> None:
        """Completions of a prompt were given up by the client."""
        self._success.labels(**self._labels, finished_reason="abort").inc(completions)

    def count_request(
        self, metrics: RequestMetrics, prompt_tokens: int, output_tokens: int, params: SamplingParams
    ) -> None:
        """A prompt has all its completions."""
        observe = self._observe
        self._prompt_tokens.inc(prompt_tokens)
        self._cache_queries.inc(prompt_tokens)
        self._cache_hits.inc(metrics.num_cached_tokens)
        observe["request_prompt_tokens"](prompt_tokens)
        observe["request_generation_tokens"](output_tokens)
        observe["request_num_preemptions"](metrics.preemptions)
        observe["request_params_n"](params.n)
        if params.max_tokens is not None:
            observe["request_params_max_tokens"](params.max_tokens)
        self._count_times(metrics, output_tokens, params)

    def count_pooled(self, prompt_tokens: Sequence[int], seconds: float) -> None:
        """A pooling model has computed the prompts of a request, in so many seconds."""
        self._prompt_tokens.inc(sum(prompt_tokens))
        for tokens in prompt_tokens:
            self._observe["request_prompt_tokens"](tokens)
        self._observe["e2e_request_latency_seconds"](seconds)

    def text(self) -> bytes:
        """All metrics in Prometheus' format."""
        return generate_latest(self._registry)

    def _count_times(self, metrics: RequestMetrics, output_tokens: int, params: SamplingParams) -> None:
        observe = self._observe
        arrival, first, end = metrics.arrival_time, metrics.first_token_time, metrics.finished_time
        if end is None:
            return
        observe["e2e_request_latency_seconds"](end - arrival)
        if first is None:
            return
        observe["time_to_first_token_seconds"](first - arrival)
        observe["request_decode_time_seconds"](end - first)
        if output_tokens > params.n:
            observe["request_time_per_output_token_seconds"]((end - first) * params.n / (output_tokens - params.n))
        scheduled = metrics.scheduled_time
        if scheduled is not None:
            observe["request_queue_time_seconds"](scheduled - arrival)
            observe["request_inference_time_seconds"](end - scheduled)
            observe["request_prefill_time_seconds"](first - scheduled)
