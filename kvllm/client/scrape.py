"""Figures of a running server, from what its /metrics says at two times."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from kvllm.errors import ServerError


class Scrape(Struct):
    """Values of /metrics by name, summed over their labels; those of histograms by name and upper bound.

    at: monotonic seconds. models: names in the label `model_name`.
    """

    at: float
    values: dict[str, float]
    buckets: dict[str, dict[float, float]]
    models: list[str]


def parse(text: str) -> Scrape:
    """Raises ServerError for what is no metrics of Prometheus."""
    values: dict[str, float] = defaultdict(float)
    buckets: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    models = set()
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError as error:
        raise ServerError(f"/metrics has no metrics of Prometheus: is another server there? ({error})") from None
    for family in families:
        for sample in family.samples:
            models.update(filter(None, [sample.labels.get("model_name")]))
            if sample.name.endswith("_bucket"):
                buckets[sample.name.removesuffix("_bucket")][float(sample.labels["le"])] += sample.value
            else:
                values[sample.name] += sample.value
    return Scrape(time.monotonic(), values, buckets, sorted(models))


def counted(name: str, now: Scrape, before: Scrape | None) -> float | None:
    """How far a counter rose, since the server started without `before`. None for one that the server lacks."""
    if name not in now.values:
        return None
    earlier = before.values.get(name, 0.0) if before else 0.0
    return max(0.0, now.values[name] - earlier)  # a server that was started again counts from 0


def quantile(name: str, share: float, now: Scrape, before: Scrape | None) -> float | None:
    """A quantile of a histogram's observations, even within a bucket, as Prometheus computes it. None without any."""
    if name not in now.buckets:
        return None
    earlier: Mapping[float, float] = before.buckets.get(name, {}) if before else {}
    counts = {bound: count - earlier.get(bound, 0.0) for bound, count in sorted(now.buckets[name].items())}
    total = counts.get(math.inf, 0.0)
    if total <= 0:
        return None
    lower, below = 0.0, 0.0
    for bound, count in counts.items():
        if count >= share * total:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (share * total - below) / max(count - below, 1e-9)
        lower, below = bound, count
    return lower
