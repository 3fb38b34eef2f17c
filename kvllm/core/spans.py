"""Spans of a sequence's positions, and how many KV pairs of each are left after compressions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvllm.core.regions import Region


class Span(NamedTuple):
    """Positions from `start` up to `end`, of which `kept` KV pairs are left, in every layer and head."""

    start: int
    end: int
    kept: int


def kept_spans(compressions: Sequence[Region], logical_length: int) -> list[Span]:
    """The positions of a sequence in order, one span for each window.

    Regions tell indices of the cache. Where one begins or ends inside of a span that was compressed before, the
    position of that border depends on the layer and head, and the border is put where it would be if the KV pairs kept
    were spread evenly.

    Args:
        compressions: as in `kvllm.core.sequence.Sequence`.
        logical_length: tokens computed so far.
    """
    spans = [Span(0, logical_length, logical_length)]
    cached = logical_length
    for region in compressions:
        lost = region.size - region.retain
        for window in reversed(range(region.count)):
            begin = region.start + window * region.stride
            # What a window shares with the next one is its buffer, of which nothing is dropped.
            _compress(spans, cached, begin, begin + region.stride, region.stride - lost)
            cached -= lost
    return spans


def _compress(spans: list[Span], cached: int, begin: int, end: int, kept: int) -> None:
    """Make one span of the KV pairs from index `begin` to `end` of a cache that has `cached`."""
    later = _take(spans, cached, end)
    covered = _take(spans, end, begin)
    spans.append(Span(covered[0].start, covered[-1].end, kept))
    spans += later


def _take(spans: list[Span], cached: int, index: int) -> list[Span]:
    """Take the spans from `index` of the cache on out of the list."""
    taken = []
    while cached > index:
        span = spans.pop()
        cached -= span.kept
        if cached < index:
            before = index - cached
            border = span.start + (span.end - span.start) * before // span.kept
            spans.append(Span(span.start, border, before))
            span = Span(border, span.end, span.kept - before)
            cached = index
        taken.append(span)
    return taken[::-1]
