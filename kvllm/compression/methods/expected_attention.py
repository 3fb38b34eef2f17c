"""Expected Attention (Devoto et al., arXiv 2510.00636): keep what future queries will attend to, if they are Gaussian.

The mean and the covariance of queries before the rotation are turned to the positions ahead, averaged over these. The
attention that a Gaussian query is expected to pay to a key k is `softmax(mean k' / sqrt(d) + k covariance k' / (2 d))`.
The score is this times the length of the value. The queries are either the last ones of the region, or those of a text
on which the model was calibrated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvllm.compression.mass import PLAIN_SOFTMAX, Softmax
from kvllm.compression.methods.token2chunk import choose
from kvllm.compression.precision import no_tf32
from kvllm.compression.region import check_queries, everything, keeps_everything, with_sinks
from kvllm.compression.rotation import mean_rotation, rotate, unrotate
from kvllm.compression.statistics import QueryStatistics

KEYS_PER_TILE = 256

Gaussian = tuple[Tensor, Tensor]
"""Mean `[layers, Hq, d]` and covariance `[layers, Hq, d, d]` of queries before the rotation."""


def select(
    queries: Tensor,
    keys: Tensor,
    *,
    retain: int,
    buffer: int,
    value_norms: Tensor,
    starts: Sequence[int],
    last_positions: Sequence[int],
    frequencies: Tensor,
    future: int = 512,
    sinks: int = 4,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Tensor:
    """Choose the KV pairs of a region to keep, as `registry.Method` says, by the region's last queries.

    Args:
        starts: for each sequence the KV pairs of its cache in front of the region.
        future: positions ahead over which queries are averaged.
        sinks: the first KV pairs of the cache, kept before all others.
        softmax: of the layer, whose scale counts alone.
    """
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    found = region_scores(
        queries, keys, buffer, value_norms, starts, last_positions, frequencies, future, sinks, softmax
    )
    return choose(found, retain=retain, buffer=buffer)


@torch.no_grad()
def region_scores(
    queries: Tensor,
    keys: Tensor,
    buffer: int,
    value_norms: Tensor,
    starts: Sequence[int],
    last_positions: Sequence[int],
    frequencies: Tensor,
    future: int = 512,
    sinks: int = 4,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Tensor:
    """`scores` by the region's last queries times the lengths of values, infinite for sinks. Arguments as for `select`.

    Returns:
        float32 `[S, Hkv, C - buffer]`, bit-identical for a sequence whatever the others in the batch are.
    """
    check_queries(queries, keys)
    sequences = zip(queries, last_positions, strict=True)
    of_queries = [_gaussian(unrotate(*each, frequencies)) for each in sequences]
    keys = _scaled(keys, softmax)
    return _weighted_scores(keys, value_norms, of_queries, starts, last_positions, frequencies, future, sinks, buffer)


def select_calibrated(
    queries: Tensor | None,
    keys: Tensor,
    *,
    retain: int,
    buffer: int,
    value_norms: Tensor,
    starts: Sequence[int],
    last_positions: Sequence[int],
    frequencies: Tensor,
    statistics: QueryStatistics,
    future: int = 512,
    sinks: int = 4,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Tensor:
    """Choose KV pairs as `select` does, by the queries of a text. Arguments as there, but `queries` are not used.

    keys, value_norms, starts, last_positions: of sequences in one layer after the other.
    statistics: of these layers, for the query heads of these KV heads.
    """
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    of_queries = [(statistics.mean, statistics.covariance)] * (len(keys) // len(statistics.mean))
    keys = _scaled(keys, softmax)
    found = _weighted_scores(keys, value_norms, of_queries, starts, last_positions, frequencies, future, sinks, buffer)
    return choose(found, retain=retain, buffer=buffer)


def _scaled(keys: Tensor, softmax: Softmax) -> Tensor:
    """Keys whose products, divided by `sqrt(d)`, have the scale of a layer's attention."""
    ratio = softmax.scale_of(keys.shape[3]) * keys.shape[3] ** 0.5
    return keys if math.isclose(ratio, 1) else keys * ratio


def _gaussian(queries: Tensor) -> Gaussian:
    """Mean and covariance of `[Hq, query tokens, d]`, in one layer."""
    mean = queries.mean(dim=1)
    centred = queries - mean[:, None]
    with no_tf32():
        return mean[None], torch.bmm(centred.mT, centred)[None] / queries.shape[1]


def _weighted_scores(
    keys: Tensor,
    value_norms: Tensor,
    of_queries: Sequence[Gaussian],
    starts: Sequence[int],
    last_positions: Sequence[int],
    frequencies: Tensor,
    future: int,
    sinks: int,
    buffer: int,
) -> Tensor:
    """Scores times the lengths of values, infinite for sinks: float32 `[layers * S, Hkv, C - buffer]`.

    of_queries: of each sequence.
    """
    num_seqs, num_scored = len(of_queries), keys.shape[2] - buffer
    found = value_norms.new_zeros(*keys.shape[:2], num_scored)
    ahead = torch.arange(1, future + 1, device=keys.device)
    for i, (mean, covariance) in enumerate(of_queries):  # whose products must not depend on the others
        of_sequence = slice(i, None, num_seqs)  # in all layers
        first = min(max(0, sinks - starts[i]), num_scored)
        cos, sin = mean_rotation(last_positions[i] + ahead, frequencies)
        # A product with a turned query is one with the key that is turned back.
        expected = scores(rotate(keys[of_sequence, :, first:], cos, -sin), mean, covariance)
        found[of_sequence, :, first:] = (expected * value_norms[of_sequence, :, first:])[:, :, : num_scored - first]
    return with_sinks(found, starts, sinks)


@torch.no_grad()
@no_tf32()
def scores(keys: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
    """Attention that Gaussian queries are expected to pay to the keys of one sequence, averaged over the query heads of
    a KV head.

    Args:
        keys: float32 `[layers, Hkv, n, d]`, rotated as the queries are.
        mean: `[layers, Hq, d]`, covariance: `[layers, Hq, d, d]`. Query head h reads KV head `h // (Hq // Hkv)`.

    Returns:
        float32 `[layers, Hkv, n]`; each row sums to 1.
    """
    num_layers, num_kv_heads, _, head_dim = keys.shape
    num_heads = num_layers * num_kv_heads
    # One product for all query heads of a KV head; covariances are symmetric. With c for k covariance, both terms are
    # k (2 sqrt(d) mean + c)' / (2 d).
    covariances = covariance.reshape(num_heads, -1, head_dim).mT
    means = mean.reshape(num_heads, 1, -1) * (2 * head_dim**0.5)
    logits = []
    for tile in keys.flatten(0, 1).split(KEYS_PER_TILE, dim=1):
        products = torch.baddbmm(means, tile, covariances).unflatten(-1, (-1, head_dim))
        logits.append(products.mul_(tile[:, :, None]).sum(dim=-1))
    of_heads = torch.cat(logits, dim=1).mT / (2 * head_dim)  # [heads, query heads of each, n]
    return of_heads.softmax(dim=-1).mean(dim=1).unflatten(0, (num_layers, num_kv_heads))
