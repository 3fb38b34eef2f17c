"""Figures of repeated runs: medians, and ratios of runs that follow each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import msgspec

from benchmarks.common import report
from benchmarks.common.jobs import Job
from benchmarks.common.measurement import Measurement

SHOWN = {
    "output_tokens_per_s": ("output tokens/s", "{:.1f}"),
    "step_tokens_per_s": ("the same, mean over steps", "{:.1f}"),
    "seconds": ("time, s", "{:.2f}"),
    "decode_seconds": ("decode, s", "{:.2f}"),
    "prefill_seconds": ("prefill, s", "{:.2f}"),
    "recompute_seconds": ("recompute queries, s", "{:.2f}"),
    "score_seconds": ("score and select, s", "{:.2f}"),
    "compact_seconds": ("compact, s", "{:.2f}"),
    "p99_stall_seconds": ("wait for a token, 99th percentile, s", "{:.3f}"),
    "longest_stall_seconds": ("longest wait for a token, s", "{:.3f}"),
    "mean_latency": ("latency, mean, s", "{:.2f}"),
    "p99_latency": ("latency, 99th percentile, s", "{:.2f}"),
    "other_load": ("cores busy with other work", "{:.1f}"),
    "steps": ("steps", "{:.0f}"),
    "mean_concurrency": ("mean concurrency", "{:.1f}"),
    "peak_concurrency": ("peak concurrency", "{:.0f}"),
    "preemptions": ("preemptions", "{:.0f}"),
    "tokens_recomputed": ("tokens recomputed", "{:.0f}"),
    "swapped_out": ("sequences swapped", "{:.0f}"),
    "blocks_loaded": ("blocks loaded from the host", "{:.0f}"),
    "compression_events": ("compression events", "{:.0f}"),
    "windows_compressed": ("windows compressed", "{:.0f}"),
    "blocks_released": ("blocks released", "{:.0f}"),
    "peak_kv_bytes": ("peak KV in use, MiB", "{:.1f}"),
    "peak_memory_bytes": ("peak process memory, MiB", "{:.1f}"),
}
Spread = dict[str, float]
"""Median, least and most."""


def spread_of(values: Sequence[float]) -> Spread:
    return {"median": median(values), "min": min(values), "max": max(values)}


def summarize(runs: Sequence[Measurement]) -> dict[str, Spread]:
    """Each figure over the repeats."""
    return {name: spread_of([getattr(run, name) for run in runs]) for name in SHOWN}


def entry(job: Job, model: str, measured: Sequence[Measurement]) -> dict[str, Any]:
    """The entry of a report about a variant."""
    return {
        "engine": job.engine | {"model": model},
        "compression": msgspec.to_builtins(job.compression),
        "summary": summarize(measured),
        "runs": msgspec.to_builtins(measured),
    }


def ratios(runs: dict[str, list[Measurement]], figure: str = "output_tokens_per_s") -> dict[str, Spread]:
    """The ratio of a figure to the first variant's, within each repeat."""
    first, *others = runs
    return {
        name: spread_of([getattr(b, figure) / getattr(a, figure) for a, b in zip(runs[first], runs[name], strict=True)])
        for name in others
    }


def show_spread(values: Spread, shape: str) -> str:
    """The median, with the least and the most after it if they differ."""
    middle, least, most = (shape.format(values[key]) for key in ("median", "min", "max"))
    return middle if least == most else f"{middle} ({least}-{most})"


def show(
    runs: dict[str, list[Measurement]], figures: Iterable[str] = SHOWN, first_rows: Sequence[list[str]] = ()
) -> str:
    """A table of some figures with a column for each variant, and the ratios of tokens per second."""
    summaries, rows = [summarize(of_variant) for of_variant in runs.values()], [*first_rows]
    for name in figures:
        (title, shape), unit = SHOWN[name], report.MIB if name.endswith("_bytes") else 1
        cells = [{key: value / unit for key, value in summary[name].items()} for summary in summaries]
        rows.append([title, *(show_spread(cell, shape) for cell in cells)])
    rows.append(["tokens/s, ratio", "1", *(show_spread(ratio, "{:.2f}") for ratio in ratios(runs).values())])
    names = [name.replace(", ", ",").replace(":", ":\n").replace(",", ",\n") for name in runs]
    return report.table(["", *names], rows)
