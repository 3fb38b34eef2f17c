"""Figures of a load, worked out by hand, and of Prometheus metrics, beside the observations themselves."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("aiohttp", reason='needs the packages of the clients: pip install "kvllm[serve]"')
pytest.importorskip("prometheus_client", reason='needs the packages of the clients: pip install "kvllm[serve]"')

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from kvllm.client import scrape, summary
from kvllm.client.load import Outcome, Run, arrival_times
from kvllm.errors import ConfigError

RUN = Run(
    [
        Outcome(0.0, prompt_len=10, output_len=3, ttft=0.1, itl=[0.2, 0.4], latency=0.7),
        Outcome(0.5, prompt_len=20, output_len=4, ttft=0.3, itl=[0.6], latency=0.9),  # two chunks for four tokens
        Outcome(1.0, prompt_len=30, output_len=1, ttft=1.2, latency=1.2),
        Outcome(1.1, prompt_len=40, error="HTTP 503", message="busy"),
    ],
    seconds=2.5,
    cpu_seconds=0.001,
    chunks=6,
)


def test_figures_of_a_load():
    result = summary.summarize(RUN, {"ttft": 300, "tpot": 250}, [90])
    assert (result["completed"], result["failed"]) == (3, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (60, 8)
    assert result["output_throughput"] == pytest.approx(8 / 2.5)
    assert result["total_token_throughput"] == pytest.approx(68 / 2.5)
    assert result["mean_ttft_ms"] == pytest.approx(1600 / 3) and result["median_ttft_ms"] == pytest.approx(300)
    assert result["p90_ttft_ms"] == pytest.approx(np.percentile([100, 300, 1200], 90))
    assert result["mean_tpot_ms"] == pytest.approx((300 + 200) / 2)  # a request of one token has none
    assert result["mean_itl_ms"] == pytest.approx(400)
    assert result["mean_e2el_ms"] == pytest.approx(2800 / 3)
    assert result["request_goodput"] == pytest.approx(1 / 2.5)  # the first is too slow per token, the last to begin
    assert result["max_concurrent_requests"] == 2
    assert result["max_output_tokens_per_s"] == pytest.approx(2 + 3)
    assert result["client_cpu_us_per_chunk"] == pytest.approx(1000 / 6)
    assert result["errors_by_kind"] == {"HTTP 503": 1}
    assert summary.examples_of_errors(RUN) == ["HTTP 503: busy"]


def test_tokens_and_requests_of_each_second():
    tokens, running = summary.timeline(RUN)
    assert tokens.tolist() == [5.0, 2.0, 1.0]  # 3 + 2 in the first second, the second chunk of 2, the last request
    assert running.tolist() == [2, 2, 1]


def test_a_load_without_success_has_figures_too():
    failed = Run([RUN.outcomes[-1]], 1.0, 0.0, 0)
    result = summary.summarize(failed, {}, [99])
    assert result["mean_ttft_ms"] is None and result["request_goodput"] is None
    printed = summary.table(result, list(summary.METRICS), [99])
    assert "Failed requests:                         1" in printed and "Mean TTFT" not in printed


@pytest.mark.parametrize("text", ["ttft", "itl:5", "ttft:fast", "tpot:-1"])
def test_wrong_limits_are_refused(text):
    with pytest.raises(ConfigError, match="--goodput"):
        summary.parse_goodput([text])


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness, variation):
    times = arrival_times(20_000, 4.0, burstiness, seed=1)
    gaps = np.diff(times)
    assert times[0] == 0 and gaps.mean() == pytest.approx(1 / 4, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)
    assert times == arrival_times(20_000, 4.0, burstiness, seed=1) != arrival_times(20_000, 4.0, burstiness, seed=2)


def test_without_a_rate_all_arrive_at_once():
    assert arrival_times(3, float("inf"), 1.0, seed=0) == [0.0, 0.0, 0.0]


def test_quantiles_of_metrics_are_those_of_the_observations():
    registry = CollectorRegistry()
    histogram = Histogram("t", "", ["key"], registry=registry, buckets=[i / 50 for i in range(1, 101)])
    counter = Counter("c", "", ["key"], registry=registry)
    rng = np.random.default_rng(0)

    def observe(values: np.ndarray) -> scrape.Scrape:
        for i, value in enumerate(values):
            histogram.labels(key=str(i % 2)).observe(value)
            counter.labels(key=str(i % 2)).inc()
        return scrape.parse(generate_latest(registry).decode())

    early, late = rng.uniform(0, 0.5, 500), rng.normal(1.0, 0.1, 500)
    before, now = observe(early), observe(late)
    for share in (0.3, 0.99):
        assert scrape.quantile("t", share, now, before) == pytest.approx(np.quantile(late, share), abs=0.02)
        everything = np.concatenate([early, late])
        assert scrape.quantile("t", share, now, None) == pytest.approx(np.quantile(everything, share), abs=0.02)
    assert scrape.counted("c_total", now, before) == 500 and scrape.counted("c_total", now, None) == 1000
    assert scrape.quantile("t", 0.5, now, now) is None  # nothing was observed in between
    assert scrape.quantile("absent", 0.5, now, None) is None and scrape.counted("absent", now, None) is None
