"""Statistics of a model's queries before rotary embedding, from texts that it reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from kvllm.calibration.dense import DenseModel
from kvllm.compression.rotation import pair_lengths, rotate, rotation
from kvllm.compression.statistics import QueryStatistics
from kvllm.models.rotary import check_one_rotation

OUTLIERS = 4
"""First tokens of a text that are left out: the attention sinks."""


class Sums:
    """Sums over the queries of one layer, in float64."""

    def __init__(self, num_heads: int, head_dim: int, device: torch.device) -> None:
        exact: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self.count = 0
        self.mean = torch.zeros(num_heads, head_dim, **exact)
        self.magnitude = torch.zeros(num_heads, head_dim // 2, **exact)
        self.product = torch.zeros(num_heads, head_dim, head_dim, **exact)

    def add(self, queries: torch.Tensor) -> None:
        """queries: `[Hq, tokens, d]`, before the rotation."""
        self.count += queries.shape[1]
        self.mean += queries.double().sum(dim=1)
        self.magnitude += pair_lengths(queries).double().sum(dim=1)
        self.product += torch.bmm(queries.double().mT, queries.double())

    def statistics(self) -> QueryStatistics:
        mean = self.mean / self.count
        covariance = self.product / self.count - mean[:, :, None] * mean[:, None]
        return QueryStatistics(mean, self.magnitude / self.count, covariance)


@torch.inference_mode()
def query_statistics(model: DenseModel, texts: Iterable[list[int]]) -> QueryStatistics:
    """Statistics of the queries over texts given as token ids, `[layers, Hq, ...]`. Each has more than OUTLIERS.

    Raises ConfigError as `check_one_rotation`.
    """
    config = model.config
    check_one_rotation(config, config.windows)
    sums = [Sums(config.num_query_heads, config.head_dim, model.device) for _ in range(config.num_layers)]
    for token_ids in texts:
        positions = torch.arange(OUTLIERS, len(token_ids), device=model.device)
        cos, sin = rotation(positions, model.frequencies)
        runs, _ = model.read(token_ids)
        for of_layer, run in zip(sums, runs, strict=True):
            of_layer.add(rotate(run.queries[OUTLIERS:].transpose(0, 1), cos, -sin))
    found = [of_layer.statistics() for of_layer in sums]
    return QueryStatistics(
        torch.stack([of_layer.mean for of_layer in found]),
        torch.stack([of_layer.magnitude for of_layer in found]),
        torch.stack([of_layer.covariance for of_layer in found]),
    )
