"""The tables that a device check prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.common import report
from benchmarks.device.log import FAILED, LEFT_OUT, MEASURED, PASSED, Row

MOST_COLUMNS = 10
FAILURES_SHOWN = 5
TRACEBACK_SHOWN = 1200
"""Characters from its end."""


def _times(factor: float, shape: str) -> Callable[[float], str]:
    return lambda value: shape.format(factor * value)


_MICROSECONDS, _MILLISECONDS, _SECONDS = _times(1e6, "{:,.1f}"), _times(1e3, "{:,.2f}"), "{:,.1f}".format
_MEBIBYTES = _times(1 / report.MIB, "{:,.1f}")
_COUNT, _SHARE = "{:,.0f}".format, "{:.1%}".format
FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "bytes_per_s": ("GB/s", _times(1e-9, "{:,.0f}")),
    "flops_per_s": ("TFLOP/s", _times(1e-12, "{:,.2f}")),
    "kernel_seconds": ("time,\nus", _MICROSECONDS),
    "kernel_floor_seconds": ("floor,\nus", _MICROSECONDS),
    "limited_by": ("limited by", str),
    "of_floor": ("floor /\ntime", _SHARE),
    "kv_pairs": ("KV pairs\neach", _COUNT),
    "step_seconds": ("step,\nms", _MILLISECONDS),
    "step_floor_seconds": ("floor,\nms", _MILLISECONDS),
    "times_floor": ("step /\nfloor", "{:.2f}".format),
    "output_tokens_per_s": ("output\ntokens/s", _COUNT),
    "prompt_tokens_per_s": ("prompt\ntokens/s", _COUNT),
    "windows_of_an_event": ("windows\nan event", "{:.1f}".format),
    "steps_of_an_event": ("steps\nan event", "{:.1f}".format),
    "event_seconds": ("event,\nms", _MILLISECONDS),
    "of_decoding": ("of\ndecoding", _SHARE),
    "longest_step_seconds": ("longest\nstep, ms", _MILLISECONDS),
    "longest_in_steps": ("longest,\nin steps", "{:.1f}".format),
    "recompute_of_event_seconds": ("recom-\npute, ms", _MILLISECONDS),
    "score_of_event_seconds": ("score,\nms", _MILLISECONDS),
    "compact_of_event_seconds": ("compact,\nms", _MILLISECONDS),
    "event_bytes": ("event,\nMiB", _MEBIBYTES),
    "graphs": ("graphs", _COUNT),
    "first_graph_bytes": ("first,\nMiB", _MEBIBYTES),
    "second_graph_bytes": ("second,\nMiB", _MEBIBYTES),
    "expected_graph_bytes": ("expected,\nMiB", _MEBIBYTES),
    "graph_bytes": ("all,\nMiB", _MEBIBYTES),
    "gain": ("gain", "{:+.1%}".format),
    "second_half_tokens_per_s": ("second\nhalf", _COUNT),
    "second_half_gain": ("gain", "{:+.1%}".format),
    "mean_concurrency": ("mean con-\ncurrency", "{:.1f}".format),
    "preemptions": ("preemp-\ntions", _COUNT),
    "compression_events": ("events", _COUNT),
    "windows_compressed": ("windows", _COUNT),
    "served_seconds": ("time, s", _SECONDS),
    "requests_finished": ("requests\nfinished", _COUNT),
    "mean_latency_seconds": ("their\nlatency, s", _SECONDS),
    "decode_seconds": ("decode,\ns", _SECONDS),
    "prefill_seconds": ("prefill,\ns", _SECONDS),
    "recompute_seconds": ("recom-\npute, s", _SECONDS),
    "score_seconds": ("score,\ns", _SECONDS),
    "compact_seconds": ("compact,\ns", _SECONDS),
}
"""Figures of measurements, in this order: the head of the column, and how a value is shown."""


def show_section(result: Mapping[str, Any], dry_run: bool) -> str:
    """The findings of a section: a table of measurements, counts of checks, and all that went wrong."""
    rows: list[Row] = result["rows"]
    counts = Counter(row["status"] for row in rows)
    summary = ", ".join(f"{counts[status]} {status}" for status in (PASSED, FAILED, LEFT_OUT) if counts[status])
    title = ("DRY RUN: " if dry_run else "") + result["title"]
    parts = [f"{title} ({result['name']}): {result['status']}, {result['seconds']:.0f} s. {summary}".rstrip()]
    if measured := [row for row in rows if row["status"] == MEASURED]:
        parts.append(measurements(measured))
    reasons = Counter(row["reason"] for row in rows if row["status"] == LEFT_OUT)
    parts += [f"left out, {number} of them: {reason}" for reason, number in reasons.items()]
    failed = [row for row in rows if row["status"] == FAILED]
    parts += [f"FAILED: {row['name']}\n{row['error'][-TRACEBACK_SHOWN:]}" for row in failed[:FAILURES_SHOWN]]
    if len(failed) > FAILURES_SHOWN:
        parts.append("FAILED, too: " + "; ".join(row["name"] for row in failed[FAILURES_SHOWN:]))
    if result["error"] is not None:
        parts.append(f"The section's process ended early:\n{result['error'][-TRACEBACK_SHOWN:]}")
    return "\n".join(parts)


def measurements(rows: Sequence[Row]) -> str:
    """A table, or several if one would be too wide."""
    shown = [name for name in FIGURES if any(row["figures"].get(name) is not None for row in rows)]
    tables = [_columns(rows, shown[i : i + MOST_COLUMNS]) for i in range(0, len(shown), MOST_COLUMNS)]
    return "\n\n".join(tables)


def _columns(rows: Sequence[Row], shown: Sequence[str]) -> str:
    cells = [
        [row["name"], *("" if row["figures"].get(f) is None else FIGURES[f][1](row["figures"][f]) for f in shown)]
        for row in rows
    ]
    return report.table(["", *(FIGURES[name][0] for name in shown)], cells)


def compare(results: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Steps of KvLLM and of transformers side by side, where both were measured."""
    steps = [
        {row["name"]: row["figures"] for row in results.get(name, {"rows": []})["rows"] if row["status"] == MEASURED}
        for name in ("decode", "transformers")
    ]
    ours, theirs = steps
    both = [name for name in ours if name in theirs]
    if not both:
        return None
    rows = [
        [
            name,
            f"{1e3 * ours[name]['step_seconds']:.2f}",
            f"{1e3 * theirs[name]['step_seconds']:.2f}",
            f"{theirs[name]['step_seconds'] / ours[name]['step_seconds']:.2f}",
        ]
        for name in both
    ]
    return report.table(["decode step, ms", "KvLLM", "transformers", "ratio"], rows)
