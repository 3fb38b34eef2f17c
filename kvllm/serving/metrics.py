"""Prometheus metrics: vLLM's names with its label `model_name`, so that its boards work, and `kvllm:` ones."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvllm.durations import Durations
from kvllm.outputs import RequestMetrics
from kvllm.sampling_params import SamplingParams
from kvllm.stats import STEP_TOKENS, EngineStats

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
PHASES = ("prefill", "decode", "recompute", "score", "compact")


class Snapshot:
    """What a scrape reads: counters of the engine, completions that have not ended, sequences and blocks of a step."""

    def __init__(self, stats: EngineStats, in_flight: int) -> None:
        self.stats = stats
        self.in_flight = in_flight
        last_step = next(iter(stats.timeline_since(stats.steps - 1)), (0, 0)) if in_flight else (0, 0)
        self.running = min(last_step[0], in_flight)
        self.blocks = last_step[1]


class EngineCollector(Collector):
    """Makes metrics of the engine's own counters when they are asked for."""

    def __init__(self, model_name: str, snapshot: Callable[[], Snapshot], rejections: dict[str, int]) -> None:
        self._labels = (model_name, "0")
        self._snapshot = snapshot
        self._rejections = rejections

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        yield self._gauge("vllm:num_requests_running", "Sequences of the last step.", now.running)
        waiting = now.in_flight - now.running
        yield self._gauge("vllm:num_requests_waiting", "Completions that are in no step yet.", waiting)
        yield self._waiting_by_reason(waiting)
        usage = now.blocks / now.stats.num_blocks
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks in use: 1 is all.", usage)
        yield self._gauge("kvllm:blocks_in_use", "KV blocks that sequences own.", now.blocks)
        yield self._gauge("kvllm:blocks", "KV blocks in the pool.", now.stats.num_blocks)
        yield self._gauge("kvllm:host_blocks_in_use", "KV blocks that the host holds.", now.stats.host_blocks_in_use)
        yield self._gauge("kvllm:host_blocks", "KV blocks for which the host has room.", now.stats.num_host_blocks)
        for name, (text, field) in ENGINE_COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=("model_name", "engine"))
            counter.add_metric(self._labels, now.stats[field])
            yield counter
        seconds = CounterMetricFamily("kvllm:phase_seconds", "Time of steps.", labels=("model_name", "engine", "phase"))
        for phase in PHASES:
            seconds.add_metric((*self._labels, phase), now.stats[f"{phase}_seconds"])
        yield seconds
        for name, (text, field) in STALLS.items():
            yield self._stalls(name, text, now.stats[field])
        steps, text = now.stats.step_tokens, "Tokens of a step."
        yield _histogram("vllm:iteration_tokens_total", text, self._labels, STEP_TOKENS, steps.counts, steps.total)
        text = "Requests refused because the server was busy or about to stop."
        rejections = CounterMetricFamily("vllm:admission_rejections", text, labels=("model_name", "engine", "reason"))
        for reason, count in self._rejections.items():
            rejections.add_metric((*self._labels, reason), count)
        yield rejections

    def _waiting_by_reason(self, waiting: int) -> GaugeMetricFamily:
        """With vLLM's reasons. Nothing here is deferred for anything but room."""
        names = ("model_name", "engine", "reason")
        gauge = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "The same, by what they wait for.", labels=names
        )
        gauge.add_metric((*self._labels, "capacity"), waiting)
        gauge.add_metric((*self._labels, "deferred"), 0)
        return gauge

    def _stalls(self, name: str, text: str, durations: Durations) -> HistogramMetricFamily:
        """With every bound at which the buckets have doubled."""
        histogram = HistogramMetricFamily(name, text, labels=("model_name", "engine"))
        buckets = [(str(bound), float(count)) for bound, count in durations.cumulative()]
        histogram.add_metric(self._labels, [*buckets, ("+Inf", float(sum(durations.counts)))], durations.total)
        return histogram

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, text, labels=("model_name", "engine"))
        gauge.add_metric(self._labels, value)
        return gauge


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
        names = ("model_name", "engine")
        tokens = CounterMetricFamily("vllm:generation_tokens", "Tokens generated.", labels=names)
        tokens.add_metric(self._labels, self._tokens)
        yield tokens
        text = "Time between tokens of a completion."
        name = "vllm:inter_token_latency_seconds"
        yield _histogram(name, text, self._labels, TOKEN_SECONDS, self._counts, self._seconds)


def _histogram(
    name: str, text: str, labels: tuple[str, str], bounds: Sequence[float], counts: list[int], total: float
) -> HistogramMetricFamily:
    """counts: of the values up to each bound, and of those above the last one."""
    histogram = HistogramMetricFamily(name, text, labels=("model_name", "engine"))
    names = (*map(str, map(float, bounds)), "+Inf")
    histogram.add_metric(labels, list(zip(names, map(float, accumulate(counts)), strict=True)), total)
    return histogram


class ServerMetrics:
    """Metrics that the server counts itself, of requests as they go."""

    def __init__(
        self, model_name: str, snapshot: Callable[[], Snapshot], rejections: dict[str, int], cache: dict[str, str]
    ) -> None:
        """cache: the settings of the KV cache, as labels."""
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that ended.")
        self._cache_queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up.")
        self._cache_hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._success = Counter(
            "vllm:request_success", "Completions ended.", (*self._labels, "finished_reason"), registry=self._registry
        )
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Time to the first token.", FAST_SECONDS
        )
        text = "Time of a token, after the first one, over a whole request."
        self._per_token = self._histogram("vllm:request_time_per_output_token_seconds", text, TOKEN_SECONDS)
        self._latency = self._histogram("vllm:e2e_request_latency_seconds", "Time of a request.", SLOW_SECONDS)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Time in the queue.", SLOW_SECONDS)
        text = "Time after the queue."
        self._inference = self._histogram("vllm:request_inference_time_seconds", text, SLOW_SECONDS)
        text = "Time from the queue to the first token."
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", text, SLOW_SECONDS)
        self._decode = self._histogram("vllm:request_decode_time_seconds", "Behind the first token.", SLOW_SECONDS)
        self._of_prompt = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._of_output = self._histogram("vllm:request_generation_tokens", "Generated tokens of a request.", TOKENS)
        self._params_n = self._histogram("vllm:request_params_n", "n of a request.", COUNTS)
        self._params_max = self._histogram("vllm:request_params_max_tokens", "max_tokens of a request.", TOKENS)
        text = "Preemptions of a request."
        self._preemptions = self._histogram("vllm:request_num_preemptions", text, PREEMPTIONS)
        info = Gauge("vllm:cache_config_info", "Settings of the KV cache.", ("engine", *cache), registry=self._registry)
        info.labels(engine="0", **cache).set(1)
        self._registry.register(EngineCollector(model_name, snapshot, rejections))
        tokens = TokenCollector(model_name)
        self._registry.register(tokens)
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
        self._prompt_tokens.inc(prompt_tokens)
        self._cache_queries.inc(prompt_tokens)
        self._cache_hits.inc(metrics.num_cached_tokens)
        self._of_prompt.observe(prompt_tokens)
        self._of_output.observe(output_tokens)
        self._preemptions.observe(metrics.preemptions)
        self._params_n.observe(params.n)
        if params.max_tokens is not None:
            self._params_max.observe(params.max_tokens)
        self._count_times(metrics, output_tokens, params)

    def text(self) -> bytes:
        """All metrics in Prometheus' format."""
        return generate_latest(self._registry)

    def _count_times(self, metrics: RequestMetrics, output_tokens: int, params: SamplingParams) -> None:
        arrival, first, end = metrics.arrival_time, metrics.first_token_time, metrics.finished_time
        if end is None:
            return
        self._latency.observe(end - arrival)
        if first is None:
            return
        self._first_token.observe(first - arrival)
        self._decode.observe(end - first)
        if output_tokens > params.n:
            self._per_token.observe((end - first) * params.n / (output_tokens - params.n))
        scheduled = metrics.scheduled_time
        if scheduled is not None:
            self._queue.observe(scheduled - arrival)
            self._inference.observe(end - scheduled)
            self._prefill.observe(first - scheduled)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, tuple(self._labels), registry=self._registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(name, text, tuple(self._labels), registry=self._registry, buckets=buckets)
        return metric.labels(**self._labels)
