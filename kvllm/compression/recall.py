"""Recall: the attention that misses what was dropped, and which dropped KV pairs change places with residents.

Shapes: R sequences, H KV heads, G queries of each KV head, N resident pairs, P dropped pairs, d channels. Queries are
scaled as attention scales them. Functions keep the dtype of their arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scores_of(queries: Tensor, keys: Tensor) -> Tensor:
    """The product of each query with each key: `[R, H, G, P]` of queries `[R, H, G, d]` and keys `[R, H, P, d]`."""
    # A product of four dimensions is slow on a CPU: with few queries it takes several times as long.
    return torch.bmm(queries.flatten(0, 1), keys.flatten(0, 1).mT).unflatten(0, keys.shape[:2])


def upper_scores(scores: Tensor, queries: Tensor, errors: Tensor) -> Tensor:
    """At least the score of each query with each key as it was in the pool before it was stored: `[R, H, G, P]`.

    scores: `[R, H, G, P]`, with the keys as they are stored. queries: `[R, H, G, d]`. errors: `[R, H, P]`, the length
        of what storing took from each key (Cauchy-Schwarz bounds its product with a query).
    """
    return scores + queries.norm(dim=-1)[..., None] * errors[:, :, None]


def missing_mass(resident: Tensor, upper: Tensor) -> Tensor:
    """An upper bound on the share of each query's attention that would lie in dropped pairs: `[R, H, G]`.

    resident: `[R, H, G]`, the logarithm of the sum of what residents, and a learned sink, have in the softmax.
    upper: `[R, H, G, P]`, from `upper_scores`; -inf where there is no pair.
    """
    return torch.sigmoid(upper.logsumexp(-1) - resident)


def exchanges(gain: Tensor, loss: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which dropped pairs change places with which residents, at most `most` in each of M rows.

    gain: `[M, P]`, what dropped pairs are worth. loss: `[M, N]`, what residents are; inf for one that stays. The best
    of the former replace the worst of the latter as long as they are worth more.

    Returns:
        Three int64 `[n]`: the row, the dropped pair, the resident.
    """
    most = min(most, gain.shape[1], loss.shape[1])
    gain, arriving = gain.topk(most)
    loss, leaving = loss.topk(most, largest=False)
    row, rank = (gain > loss).nonzero(as_tuple=True)
    return row, arriving[row, rank], leaving[row, rank]
