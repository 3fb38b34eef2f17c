"""AdaKV (Feng et al., arXiv 2407.11550): SnapKV's scores, with a budget that moves between the heads of a layer."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvllm.compression.mass import PLAIN_SOFTMAX, Softmax
from kvllm.compression.methods import snapkv
from kvllm.compression.region import everything, keeps_everything


def select(
    queries: Tensor,
    keys: Tensor,
    *,
    retain: int,
    buffer: int,
    capacity: int,
    evicted_mask: Tensor | None = None,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Tensor:
    """Choose the KV pairs of a region to keep, as `registry.Method` says; the heads keep `retain` in the mean.

    Args:
        queries: those of the region's last KV pairs.
        keys: of all heads of the layer: a part of them decides differently.
        capacity: the most KV pairs one head may keep, buffer included, at least `retain`.
        evicted_mask: as for `snapkv.select`.

    Returns:
        int64 `[S, Hkv, min(capacity, C)]`: ascending offsets in the region, then -1 in heads that keep fewer.
    """
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    scores = snapkv.scores(queries, keys, buffer, evicted_mask=evicted_mask, softmax=softmax)
    return kept_offsets(scores, retain, buffer, capacity)


def kept_offsets(
    scores: Tensor, retain: int, buffer: int, capacity: int, floor: Fraction | str | int = Fraction(1, 5)
) -> Tensor:
    """The result of `select` from the scores `[S, Hkv, n]` of the slots before the buffer, -inf where one is empty.

    Each head keeps the best of its budget. A head whose budget exceeds the capacity is cut to it; its loss goes to
    the best scores of the layer that no head keeps yet, within the capacity of their heads.
    """
    if capacity < retain:
        raise ValueError(f"capacity={capacity} must be at least retain={retain}, the mean of what the heads keep")
    base, room = retain - buffer, capacity - buffer
    rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    excluded = (rank >= room) | scores.isneginf()
    within_budget = rank < head_budgets(scores, base, floor)[..., None]
    kept_first = scores.masked_fill(within_budget, torch.inf).masked_fill(excluded, -torch.inf)
    best = _best_of_layer(kept_first, base)
    kept = torch.zeros_like(excluded).flatten(1).scatter_(-1, best, True).view_as(excluded) & ~excluded
    return _packed(pad(kept, (0, buffer), value=True), capacity)


def _best_of_layer(scores: Tensor, base: int) -> Tensor:
    """The `Hkv * base` best of all heads: `[S, Hkv, n]` -> int64 `[S, Hkv * base]`, indices `head * n + position`."""
    return scores.flatten(1).argsort(dim=-1, descending=True, stable=True)[:, : scores.shape[1] * base]


def _packed(kept: Tensor, capacity: int) -> Tensor:
    """Offsets that `kept`, bool `[S, Hkv, C]`, holds: int64 `[S, Hkv, min(capacity, C)]`, ascending, then -1."""
    length = kept.shape[-1]
    offsets = torch.arange(length, device=kept.device).expand_as(kept).masked_fill(~kept, length)
    offsets = offsets.sort(dim=-1).values[..., :capacity]
    return offsets.masked_fill(offsets == length, -1)


def head_counts(scores: Tensor, base: int) -> Tensor:
    """How many of the `Hkv * base` best scores of the layer lie in each head: `[S, Hkv, n]` -> int64 `[S, Hkv]`."""
    best = _best_of_layer(scores, base)
    counts = torch.zeros(scores.shape[:2], dtype=torch.int64, device=scores.device)
    return counts.scatter_add_(-1, best // scores.shape[-1], torch.ones_like(best))


def head_budgets(scores: Tensor, base: int, floor: Fraction | str | int = Fraction(1, 5)) -> Tensor:
    """`(1 - floor) * head_counts + floor * base`, rounded to a sum of `Hkv * base` (AdaKV, algorithm 1).

    `floor` is exact, like "0.2". The exact fractions are rounded by largest remainder; of equals, the lower head
    rounds up.

    Args:
        scores: `[S, Hkv, n]`, with `base <= n`.

    Returns:
        int64 `[S, Hkv]`.
    """
    floor = Fraction(floor)
    scale = floor.denominator
    numerators = (scale - floor.numerator) * head_counts(scores, base) + floor.numerator * base
    budgets = numerators // scale
    missing = scores.shape[1] * base - budgets.sum(dim=-1, keepdim=True)
    by_remainder = (numerators % scale).argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return budgets + (by_remainder < missing)
