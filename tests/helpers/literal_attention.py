"""Attention of a few query tokens over gathered keys and values, written out."""

from __future__ import annotations

import torch


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
) -> torch.Tensor:
    """`[T, query_heads, d]` over `[entries, kv_heads, d]`, of which a row sees those in bool `[T, entries]`."""
    return attend_with_sums(queries, keys, values, visible, scale, softcap)[0]


def attend_with_sums(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, and the logarithms of the softmax's sums, `[T, query_heads]`."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (tensor.repeat_interleave(group, dim=1) for tensor in (keys, values))
    scores = torch.einsum("thd,ehd->hte", queries, keys.nan_to_num()) * scale
    scores = softcap * (scores / softcap).tanh() if softcap else scores
    scores = scores.masked_fill(~visible, -torch.inf)
    return torch.einsum("hte,ehd->thd", scores.softmax(-1), values.nan_to_num()), scores.logsumexp(-1).T
