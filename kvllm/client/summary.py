"""The figures of a load: latencies, throughput, goodput, errors; as a table, as JSON and as a plot.

Names of rows and of fields are those of `vllm bench serve`, so that results can be read side by side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvllm.client.load import Outcome, Run
from kvllm.config import require
from kvllm.errors import ConfigError

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
WIDTH = 50


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """Read limits like `ttft:500`, in milliseconds. Raises ConfigError."""
    limits = {}
    for text in texts:
        name, _, value = text.partition(":")
        if name not in GOODPUT_METRICS or not _is_number(value):
            names = ", ".join(GOODPUT_METRICS)
            raise ConfigError(f"--goodput {text!r} is no limit: write name:milliseconds with {names}, like ttft:500")
        limits[name] = float(value)
    return limits


def parse_metrics(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        require(name in METRICS, "--percentile-metrics", name, f"choose of {', '.join(METRICS)}")
    return names


def parse_percentiles(text: str) -> list[float]:
    for part in text.split(","):
        allowed = "numbers from 0 to 100, with commas"
        require(_is_number(part) and 0 <= float(part) <= 100, "--metric-percentiles", text, allowed)
    return [float(part) for part in text.split(",")]


def _is_number(text: str) -> bool:
    try:
        return float(text) >= 0
    except ValueError:
        return False


def summarize(run: Run, goodput: Mapping[str, float], percentiles: Sequence[float]) -> dict[str, Any]:
    """The figures of a run, flat, with the field names of vLLM's result files. Latencies are of requests that ended
    well, in milliseconds."""
    done = [outcome for outcome in run.outcomes if not outcome.error]
    inputs, outputs = sum(each.prompt_len for each in done), sum(each.output_len for each in done)
    good = sum(_is_good(outcome, goodput) for outcome in done)
    tokens, running = timeline(run)
    result: dict[str, Any] = {
        "duration": run.seconds,
        "completed": len(done),
        "failed": len(run.outcomes) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / run.seconds,
        "request_goodput": good / run.seconds if goodput else None,
        "output_throughput": outputs / run.seconds,
        "total_token_throughput": (inputs + outputs) / run.seconds,
        "max_output_tokens_per_s": float(tokens.max(initial=0)),
        "max_concurrent_requests": int(running.max(initial=0)),
        "client_cpu_seconds": run.cpu_seconds,
        "client_cpu_us_per_chunk": 1e6 * run.cpu_seconds / run.chunks if run.chunks else None,
        "errors_by_kind": dict(Counter(outcome.error for outcome in run.outcomes if outcome.error)),
    }
    for name, values in latencies(done).items():
        result |= _statistics(name, values, percentiles)
    return result


def latencies(done: Sequence[Outcome]) -> dict[str, list[float]]:
    """Milliseconds by metric. A request of one token has no TPOT."""
    return {
        "ttft": [1e3 * outcome.ttft for outcome in done],
        "tpot": [1e3 * outcome.tpot for outcome in done if outcome.output_len > 1],
        "itl": [1e3 * gap for outcome in done for gap in outcome.itl],
        "e2el": [1e3 * outcome.latency for outcome in done],
    }


def _statistics(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    if not values:
        keys = ["mean", "median", "std", *(f"p{each:g}" for each in percentiles)]
        return {f"{key}_{name}_ms": None for key in keys}
    array = np.asarray(values)
    result: dict[str, float | None] = {
        f"mean_{name}_ms": float(array.mean()),
        f"median_{name}_ms": float(np.median(array)),
        f"std_{name}_ms": float(array.std()),
    }
    ranks = np.percentile(array, percentiles)
    return result | {f"p{each:g}_{name}_ms": float(rank) for each, rank in zip(percentiles, ranks, strict=True)}


def _is_good(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    values = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.latency}
    return all(1e3 * values[name] <= limit for name, limit in limits.items())


def timeline(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Output tokens in each second of the run, and the most requests that were under way in it."""
    seconds = int(run.seconds) + 1
    tokens = np.zeros(seconds)
    changes = []
    for outcome in run.outcomes:
        if outcome.error:
            continue
        times = outcome.start + outcome.ttft + np.cumsum([0.0, *outcome.itl])
        np.add.at(tokens, times.astype(int), outcome.output_len / len(times))  # a chunk may have several tokens
        changes += [(outcome.start, 1), (outcome.start + outcome.latency, -1)]
    running, under_way, second = np.zeros(seconds, int), 0, 0
    for when, change in sorted(changes):
        while second < int(when):
            second += 1
            running[second] = under_way
        under_way += change
        running[second] = max(running[second], under_way)
    return tokens, running


def table(result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The figures in the form that `vllm bench serve` prints."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]

    def add(title: str, value: Any, decimals: int = 2) -> None:
        if value is not None:
            lines.append(f"{title + ':':<40} {value:<10.{decimals}f}".rstrip())

    add("Successful requests", result["completed"], 0)
    add("Failed requests", result["failed"], 0)
    add("Maximum request concurrency", result.get("max_concurrency"), 0)
    rate = result.get("request_rate")
    add("Request rate configured (RPS)", rate if isinstance(rate, float) else None)
    add("Benchmark duration (s)", result["duration"])
    add("Total input tokens", result["total_input_tokens"], 0)
    add("Total generated tokens", result["total_output_tokens"], 0)
    add("Request throughput (req/s)", result["request_throughput"])
    add("Request goodput (req/s)", result["request_goodput"])
    add("Output token throughput (tok/s)", result["output_throughput"])
    add("Peak output token throughput (tok/s)", result["max_output_tokens_per_s"])
    add("Peak concurrent requests", result["max_concurrent_requests"])
    add("Total token throughput (tok/s)", result["total_token_throughput"])
    add("Client CPU time per chunk (us)", result["client_cpu_us_per_chunk"])
    for name in metrics:
        title, header = METRICS[name]
        lines.append(f"{header:-^{WIDTH}}")
        add(f"Mean {title} (ms)", result[f"mean_{name}_ms"])
        add(f"Median {title} (ms)", result[f"median_{name}_ms"])
        for percentile in percentiles:
            add(f"P{percentile:g} {title} (ms)", result[f"p{percentile:g}_{name}_ms"])
    if "spec_decode_num_drafts" in result:
        lines.append(f"{'Speculative Decoding':-^{WIDTH}}")
        add("Acceptance rate (%)", result["spec_decode_acceptance_rate"])
        add("Acceptance length", result["spec_decode_acceptance_length"])
        add("Drafts", result["spec_decode_num_drafts"], 0)
        add("Draft tokens", result["spec_decode_draft_tokens"], 0)
        add("Accepted tokens", result["spec_decode_accepted_tokens"], 0)
        for position, rate in enumerate(result["spec_decode_per_position_acceptance_rates"]):
            add(f"  Position {position} (%)", 100 * rate)
    if result["errors_by_kind"]:
        lines.append(f"{'Errors':-^{WIDTH}}")
        for kind, count in result["errors_by_kind"].items():
            add(kind, count, 0)
    return "\n".join([*lines, "=" * WIDTH])


def examples_of_errors(run: Run) -> list[str]:
    """The first message of each kind of failure."""
    first = {outcome.error: outcome.message for outcome in reversed(run.outcomes) if outcome.error}
    return [f"{kind}: {message}" for kind, message in first.items()]


def plot(path: Path, title: str, run: Run) -> None:
    """Draw tokens per second, requests under way, and times to the first token over the run. Needs matplotlib."""
    from matplotlib.figure import Figure

    tokens, running = timeline(run)
    done = [outcome for outcome in run.outcomes if not outcome.error]
    figure = Figure(figsize=(9, 8), layout="constrained")
    speed, load, first = figure.subplots(3, sharex=True)
    speed.step(range(len(tokens)), tokens, where="post", color="#0072B2")
    speed.set(ylabel="output tokens/s", title=title)
    load.step(range(len(running)), running, where="post", color="#D55E00")
    load.set(ylabel="requests under way")
    first.plot([each.start for each in done], [1e3 * each.ttft for each in done], ".", color="#009E73")
    first.set(ylabel="time to first token (ms)", xlabel="seconds")
    for axes in (speed, load, first):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
