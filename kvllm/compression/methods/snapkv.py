"""SnapKV (Li et al., arXiv 2404.14469): keep what the last queries attend to, smoothed along the sequence."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvllm.compression.mass import PLAIN_SOFTMAX, Softmax, attention_mass
from kvllm.compression.methods.token2chunk import choose
from kvllm.compression.region import check_queries, everything, keeps_everything

Pool = Literal["average", "max"]


def select(
    queries: Tensor,
    keys: Tensor,
    *,
    retain: int,
    buffer: int,
    kernel: int = 5,
    pool: Pool = "average",
    evicted_mask: Tensor | None = None,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Tensor:
    """Choose the KV pairs of a region to keep, as `registry.Method` says, by the region's last queries.

    Args:
        kernel: width of the pooling that smooths the scores, odd.
        pool: "average" or "max". "max" makes neighbours tie; the first of them wins.
        evicted_mask: bool `[S, Hkv, C]`, slots that an earlier selection left without a KV pair, none of them in
            the buffer. They are neither attended to nor kept, as long as a head has `retain` others.
    """
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    return choose(scores(queries, keys, buffer, kernel, pool, evicted_mask, softmax), retain=retain, buffer=buffer)


@torch.no_grad()
def scores(
    queries: Tensor,
    keys: Tensor,
    buffer: int,
    kernel: int = 5,
    pool: Pool = "average",
    evicted_mask: Tensor | None = None,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Tensor:
    """Mean attention of the last query tokens, pooled over neighbours.

    Query token i of w attends to all keys up to its own, index `C - w + i`, whether scored or in the buffer. The
    probabilities are averaged over the query tokens and the query heads of a KV head, then pooled. Pooling pads with
    zeros, which count in an average: both ends are damped.

    Returns:
        float32 `[S, Hkv, C - buffer]`, -inf for empty slots, bit-identical for a sequence whatever the others are.
    """
    check_queries(queries, keys)
    length, num_tokens = keys.shape[2], queries.shape[2]
    if num_tokens > length:
        raise ValueError(f"{num_tokens} query tokens cannot belong to the last of {length} keys")
    if kernel % 2 == 0:
        raise ValueError(f"kernel={kernel} must be odd, to be centred on a position")
    queries_per_kv_head = num_tokens * (queries.shape[1] // keys.shape[1])
    pooling = avg_pool1d if pool == "average" else max_pool1d
    last_kv_index = torch.arange(length - num_tokens, length, device=keys.device)
    of_sequences = []
    for i in range(len(keys)):
        evicted = None if evicted_mask is None else evicted_mask[i]
        mass = attention_mass(queries[i], keys[i], last_kv_index, evicted, softmax=softmax)
        scored = mass[:, : length - buffer] / queries_per_kv_head
        of_sequences.append(pooling(scored, kernel, stride=1, padding=kernel // 2))
    pooled = torch.stack(of_sequences)
    return pooled if evicted_mask is None else pooled.masked_fill(evicted_mask[..., : length - buffer], -torch.inf)
