"""Kara by what was looked up (ours): squared attention of later tokens alone, and a quarter for distinct keys.

Where one token looks one fact up, the sum over all queries of a window misleads in three ways. Many queries that
give a KV pair a little weigh as much as one that gives it all: squares count the second. A token before a KV pair never
attended to it, and the attention that it would have paid means little. And a fact that no token has looked up yet has
no score at all: a quarter of the budget goes to the keys most unlike the others (KeyDiff, Park et al., arXiv
2504.15364), whatever attention they receive.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvllm.compression.mass import PLAIN_SOFTMAX, Softmax, batched_attention_mass
from kvllm.compression.methods import keydiff, token2chunk
from kvllm.compression.methods.token2chunk import top_indices
from kvllm.compression.paged_keys import Keys
from kvllm.compression.region import check_queries, everything, keeps_everything

DISTINCT_SHARE = 4
"""One in so many of the KV pairs kept is chosen by its key."""


def select(
    queries: Tensor | None,
    keys: Keys,
    *,
    retain: int,
    buffer: int,
    chunk_budget: int,
    max_chunk: int,
    query_offsets: Tensor,
    observed: Tensor | None = None,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Tensor:
    """Choose the KV pairs of a window to keep, per sequence and KV head. Arguments and result as for Kara.

    query_offsets: int64 `[query tokens]`, the position of each in the window.
    observed: what `scores` returns, where it was added up while decoding.
    """
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    looked_up = scores(queries, keys, buffer, query_offsets, softmax) if observed is None else observed
    both = with_distinctness(looked_up, keys)
    return choose(both, retain=retain, buffer=buffer, chunk_budget=chunk_budget, max_chunk=max_chunk)


def choose(both: Tensor, *, retain: int, buffer: int, chunk_budget: int, max_chunk: int) -> Tensor:
    """`select` from what `both_scores` returns."""
    looked_up, unlikeness = both.unbind(2)
    distinct = top_indices(unlikeness, (retain - buffer) // DISTINCT_SHARE)
    highest = looked_up.amax(dim=-1, keepdim=True)
    lifted = looked_up.scatter(-1, distinct, highest.expand_as(distinct))
    return token2chunk.choose(lifted, retain=retain, buffer=buffer, chunk_budget=chunk_budget, max_chunk=max_chunk)


def both_scores(
    queries: Tensor | None, keys: Keys, buffer: int, query_offsets: Tensor, softmax: Softmax = PLAIN_SOFTMAX
) -> Tensor:
    """`scores`, and how unlike the others each key is: float32 `[S, Hkv, 2, W - buffer]`."""
    return with_distinctness(scores(queries, keys, buffer, query_offsets, softmax), keys)


def with_distinctness(looked_up: Tensor, keys: Keys) -> Tensor:
    """What `choose` takes, from scores `[S, Hkv, W - buffer]`."""
    return torch.stack((looked_up, keydiff.scores(keys)[..., : looked_up.shape[-1]]), dim=2)


@torch.no_grad()
def scores(
    queries: Tensor | None, keys: Keys, buffer: int, query_offsets: Tensor, softmax: Softmax = PLAIN_SOFTMAX
) -> Tensor:
    """Squared attention that each compressible position receives from its own query token and later ones.

    As in Kara, every query attends to compressible keys only; but to none that comes after it. The squares are summed
    over the query tokens and over the query heads of a KV head.

    Returns:
        float32 `[S, Hkv, W - buffer]`, bit-identical for a sequence whatever the others in the batch are.
    """
    queries = check_queries(queries, keys)
    num_scored = keys.shape[2] - buffer
    return batched_attention_mass(queries, keys, num_scored, query_offsets, squared=True, softmax=softmax)
