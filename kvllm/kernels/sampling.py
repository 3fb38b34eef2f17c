"""The bound of a top-p filter without sorting a vocabulary."""

# A launch takes options, and constexpr parameters numbers, of which Triton's types say nothing.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _find_bound(bounds, logits, weights, needed, vocab, TILE: tl.constexpr):
    """One row. A logit is 0 at most, so that the larger one has the smaller bits, but for the sign."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    weights += row * vocab
    need = tl.load(needed + row)
    # The largest number such that all logits with smaller bits weigh less than needed: two of its digits at a time.
    bits = tl.full((), 0, tl.int64)
    for place in tl.static_range(30, -1, -2):
        lighter_1 = tl.zeros([TILE], tl.float64)
        lighter_2 = tl.zeros([TILE], tl.float64)
        lighter_3 = tl.zeros([TILE], tl.float64)
        for begin in range(0, vocab, TILE):
            token = begin + tl.arange(0, TILE)
            logit = tl.load(logits + token, mask=token < vocab, other=0.0)
            weight = tl.load(weights + token, mask=token < vocab, other=0.0).to(tl.float64)
            digits = tl.abs(logit).to(tl.int32, bitcast=True).to(tl.int64)
            lighter_1 += tl.where(digits < bits + (1 << place), weight, 0.0)
            lighter_2 += tl.where(digits < bits + (2 << place), weight, 0.0)
            lighter_3 += tl.where(digits < bits + (3 << place), weight, 0.0)
        digit = (tl.sum(lighter_1, 0) < need).to(tl.int64)
        digit += (tl.sum(lighter_2, 0) < need).to(tl.int64) + (tl.sum(lighter_3, 0) < need).to(tl.int64)
        bits += digit << place
    tl.store(bounds + row, -bits.to(tl.int32).to(tl.float32, bitcast=True))


def top_p_bounds(logits: torch.Tensor, weights: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
    """The largest logit such that it and all larger ones weigh at least what is needed: float32 `[r]`.

    logits: contiguous float32 `[r, V]`, 0 at most. weights: contiguous float32 `[r, V]`, whole numbers whose sum is
        below 2**53, so that no order of adding them shows. needed: float64 `[r]`, above 0 and at most that sum.

    A radix select: 16 passes over a row that stays in the L2 cache, where a sort of all rows takes a multiple of the
    memory's bandwidth.
    """
    bounds = logits.new_empty(len(logits))
    _find_bound[(len(logits),)](bounds, logits, weights, needed, logits.shape[1], TILE=2048, num_warps=8)
    return bounds
