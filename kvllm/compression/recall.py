"""Recall: the attention that misses what was dropped, and which dropped KV pairs change places with residents.

Shapes: R sequences, H KV heads, G queries of each KV head, N resident pairs, P dropped pairs, d channels. Queries are
scaled as attention scales them. Functions keep the dtype of their arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor


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


def candidates(gain: Tensor, loss: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The dropped pairs that are worth most and the residents that are worth least, at most `most` in each of M rows.

    gain: `[M, P]`, what dropped pairs are worth. loss: `[M, N]`, what residents are; inf for one that stays.

    Returns:
        arriving, leaving: int64 `[M, E]`, of which each may change places with its counterpart.
        is_gain: bool `[M, E]`, where the former is worth more than the latter. So it is for the first ones of a row.
    """
    most = min(most, gain.shape[1], loss.shape[1])
    gain, arriving = gain.topk(most)
    loss, leaving = loss.topk(most, largest=False)
    return arriving, leaving, gain > loss


def num_needed(missing: Tensor, arriving: Tensor, leaving: Tensor, limit: float) -> Tensor:
    """How many exchanges of each row leave at most `limit` of each query's attention in dropped pairs: int64 `[M, 1]`.
    Where all are too few, all.

    missing: `[M, G]`, the share of each query's attention in dropped pairs, or a bound on it.
    arriving, leaving: `[M, G, E]`, the shares of the pairs that change places, one exchange behind the other.
    """
    after = missing[..., None] + (leaving - arriving).cumsum(-1)
    too_much = after.amax(1) > limit
    return 1 + too_much.long().cumprod(-1).sum(-1, keepdim=True)
