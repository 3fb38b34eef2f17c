"""Recall: the attention that misses what was dropped, and which dropped KV pairs change places with residents.

Shapes: R sequences, H KV heads, G queries of each KV head, N resident pairs, P dropped pairs, d channels. Queries are
scaled as attention scales them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvllm._extension import operator

NO_LIMIT = -1.0


class Exchanges(NamedTuple):
    """KV pairs that change places, E of them.

    bounds: float32 `[R, H]`, at least the share of attention that lies in dropped pairs after the exchanges, of the
        query that misses most.
    row, head, arriving, leaving: int64 `[E]`, the sequence and KV head of each, its dropped pair and its resident. All
        of a row and head are different pairs. Rows ascend.
    """

    bounds: Tensor
    row: Tensor
    head: Tensor
    arriving: Tensor
    leaving: Tensor


def upper_scores(scores: Tensor, queries: Tensor, errors: Tensor) -> Tensor:
    """At least the score of each query with each key as it was in the pool before it was stored: `[R, H, G, P]`.

    scores: `[R, H, G, P]`, with the keys as they are stored. queries: `[R, H, G, d]`. errors: `[R, H, P]`, the length
        of what storing took from each key (Cauchy-Schwarz bounds its product with a query).
    """
    return scores + queries.norm(dim=-1)[..., None] * errors[:, :, None]


def exchange(
    resident: Tensor,
    dropped: Tensor,
    upper: Tensor,
    movable: Tensor,
    most: int,
    limit: float | None = None,
    sinks: Tensor | None = None,
) -> Exchanges:
    """Choose the dropped pairs that are attended most and the residents that are attended least, as long as the former
    are attended more: at most `most` in each row and head. What a pair is worth is the largest share that a query gives
    it, of what residents have in its softmax.

    resident: float32 `[R, H, G, N]`. dropped: float32 `[R, H, G, P]`, with the keys as they are stored. upper: as many,
        at least the scores with the keys as they were. All three are -inf where there is no pair, and change places as
        the pairs do; `upper` may be `dropped`.
    movable: bool `[R, N]`, residents that may leave.
    limit: exchange only where a query may have more than this share of its attention in dropped pairs, and until it has
        not. None: as many as are worth it.
    sinks: float32 `[H * G']`, learned scores of the query heads of a token. G is a multiple of G', with the heads of a
        token beside each other.
    """
    bounds, counts, pairs = operator("exchange_pairs")(
        resident, dropped, upper, movable, sinks, most, NO_LIMIT if limit is None else limit
    )
    row, head, place = (torch.arange(pairs.shape[-1]) < counts[..., None]).nonzero(as_tuple=True)
    arriving, leaving = pairs[row, head, :, place].long().unbind(-1)
    return Exchanges(bounds, row, head, arriving, leaving)
