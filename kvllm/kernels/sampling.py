"""Tokens of rows of logits without a sort: the most likely ones, and draws among those that filters leave.

Programs share out a row: each has a span of its tokens, and whatever a row's programs have found is put together by the
launch after. Probabilities are whole numbers, whose sums are exact, so tokens do not depend on how rows are shared
out.

A logit is taken relative to the row's largest, and divided by the temperature: it is 0 at most. Its key is the bits of
its absolute value as a number: the larger the logit, the smaller the key. A filter's bound is the largest key that
stays. It is found by a search: each pass sums up what lies below several thresholds, and leaves the range of keys
between two of them. From the second pass on only the keys of that range are read.

Source of the search with many thresholds at a time, and of its goal: the pivots of FlashInfer (arXiv 2501.01005).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_MAX_SPLITS = 32
_TILE = 1024
# Thresholds of a pass, and the keys that it takes at a time.
_WAYS = 16
_SEARCH_TILE = 512
# Passes after the first that narrow any range of keys to a single one.
_FINE_PASSES = 8
_END = tl.constexpr(0x7F800001)  # after the key of an impossible token
_FILTERS = tl.constexpr(5)
_COARSE, _COMPACT, _FINE = (tl.constexpr(kind) for kind in range(3))  # the kinds of passes


@triton.jit(do_not_specialize=["row_stride", "vocab", "span"])
def _find_maxima(maxima, tokens, logits, row_stride, vocab, span, TILE: tl.constexpr):
    """The largest logit of a span, NaN if it has one, and the first token with that logit."""
    row, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    highest = tl.full([TILE], float("-inf"), tl.float32)
    best = tl.zeros([TILE], tl.int32)
    is_nan = tl.zeros([TILE], tl.int32)
    for begin in range(split * span, tl.minimum(split * span + span, vocab), TILE):
        token = begin + tl.arange(0, TILE)
        logit = tl.load(logits + row * row_stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        best = tl.where(logit > highest, token, best)
        highest = tl.where(logit > highest, logit, highest)
        is_nan |= (logit != logit).to(tl.int32)
    maximum = tl.max(highest, 0)
    first = tl.min(tl.where(highest == maximum, best, vocab), 0)
    tl.store(maxima + row * splits + split, tl.where(tl.max(is_nan, 0) > 0, float("nan"), maximum))
    tl.store(tokens + row * splits + split, first)


@triton.jit
def _maximum_of(maxima, row, SPLITS: tl.constexpr):
    """The largest logit of a row, NaN if it has one."""
    of_spans = tl.load(maxima + row * SPLITS + tl.arange(0, SPLITS))
    is_nan = tl.max((of_spans != of_spans).to(tl.int32), 0) > 0
    return tl.where(is_nan, float("nan"), tl.max(tl.where(of_spans == of_spans, of_spans, float("-inf")), 0))


@triton.jit
def _choose(chosen, maxima, tokens, SPLITS: tl.constexpr):
    """The first token with a row's largest logit, -1 if that is not finite."""
    row = tl.program_id(0).to(tl.int64)
    split = row * SPLITS + tl.arange(0, SPLITS)
    maximum = _maximum_of(maxima, row, SPLITS)
    first = tl.min(tl.where(tl.load(maxima + split) == maximum, tl.load(tokens + split), 0x7FFFFFFF), 0)
    tl.store(chosen + row, tl.where(tl.abs(maximum) < float("inf"), first, -1).to(tl.int64))


@triton.jit
def _source(logits, row_stride, rows, row, maxima, filters, SPLITS: tl.constexpr):
    """Where a row's logits are, their maximum, and the temperature."""
    source = tl.load(rows + row)
    temperature = tl.load(filters + row * _FILTERS).to(tl.float32)
    return logits + source * row_stride, _maximum_of(maxima, source, SPLITS), temperature


@triton.jit
def _keys(logits, token, end, maximum, temperature):
    """The keys of some tokens of a row; those from `end` on are impossible ones."""
    logit = tl.load(logits + token, mask=token < end, other=float("-inf")).to(tl.float32)
    return tl.abs(tl.div_rn(logit - maximum, temperature)).to(tl.int32, bitcast=True)


@triton.jit
def _weights(keys):
    """Probabilities as whole multiples of 2**-34 of the largest."""
    scaled = tl.exp(-keys.to(tl.float32, bitcast=True)) * 17179869184.0
    # From 2**23 on a float32 is a whole number, and an addition of that rounds what is smaller to one.
    return tl.where(scaled < 8388608.0, (scaled + 8388608.0) - 8388608.0, scaled).to(tl.int64)


@triton.jit
def _threshold(low, high, way, PASS: tl.constexpr, WAYS: tl.constexpr):
    """The first key of part `way` of a range. The first pass has half octaves of logits from -1/8 to -16, where most
    bounds are, and the others cut their range evenly."""
    if PASS == _COARSE:
        return tl.where(way == 0, 0, 0x3E000000 + (way - 1) * (1 << 22)).to(tl.int64)
    return low + (high - low) * way // WAYS


@triton.jit
def _narrowed(
    ranges,
    sums,
    bounds,
    row,
    option,
    PASS: tl.constexpr,
    COUNTED: tl.constexpr,
    CAPPED: tl.constexpr,
    SPLITS: tl.constexpr,
    WAYS: tl.constexpr,
):
    """The range of keys that a pass leaves: its first key and the one after its last; the sum of all keys before it,
    and how much is needed. ranges, sums: those of the pass."""
    way = tl.arange(0, WAYS)
    offsets = (row * SPLITS + tl.arange(0, SPLITS))[:, None] * WAYS + way[None, :]
    lighter = tl.sum(tl.load(sums + offsets), 0)
    if PASS == _COARSE:
        low, high = tl.full((), 0, tl.int64), tl.full((), _END, tl.int64)
        # No key lies below the first threshold, so what stands there is the sum of all.
        needed = option
        if not COUNTED:
            total = tl.sum(tl.where(way == 0, lighter, 0), 0)
            if CAPPED:
                total += tl.load(bounds + row * 2 + 1) * _weights(tl.load(bounds + row * 2).to(tl.int32))
            needed = total.to(tl.float64) * option
        lighter = tl.where(way == 0, 0, lighter)
    else:
        low, high = tl.load(ranges + row * 4), tl.load(ranges + row * 4 + 1)
        needed = tl.load(ranges + row * 4 + 3).to(tl.float64, bitcast=True)
        # Where a single key was left before the pass, it has summed up nothing.
        lighter = tl.load(ranges + row * 4 + 2) + tl.where(high - low > 1, lighter, 0)
    enough = lighter.to(tl.float64) >= needed
    last = WAYS - 1 - tl.sum(enough.to(tl.int32), 0)
    first_key = _threshold(low, high, last, PASS, WAYS)
    end_key = tl.where(last == WAYS - 1, high, _threshold(low, high, last + 1, PASS, WAYS))
    if PASS != _COARSE:
        first_key, end_key = tl.where(high - low > 1, first_key, low), tl.where(high - low > 1, end_key, high)
    return first_key, end_key, tl.max(tl.where(enough, 0, lighter), 0), needed


@triton.jit(do_not_specialize=["row_stride", "vocab", "span"])
def _search(
    ranges,
    sums,
    earlier_ranges,
    earlier_sums,
    candidates,
    counts,
    bounds,
    logits,
    rows,
    maxima,
    filters,
    row_stride,
    vocab,
    span,
    PASS: tl.constexpr,
    COUNTED: tl.constexpr,
    CAPPED: tl.constexpr,
    SPLITS: tl.constexpr,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One pass over a row's span. The needed sum is one of tokens if COUNTED (top-k), else one of weights (top-p).

    PASS: whether the first pass, the second, which keeps the keys of its range in `candidates` as it reads logits, or
    a later one. CAPPED: a search by count has left `bounds`.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    option = tl.load(filters + row * _FILTERS + (1 if COUNTED else 2))
    if (COUNTED and option == 0) or (not COUNTED and option >= 1):  # the row has no such filter
        return
    low, high = tl.full((), 0, tl.int64), tl.full((), _END, tl.int64)
    cap = high
    if PASS == _COARSE:
        if CAPPED:
            cap = tl.load(bounds + row * 2)
    else:
        low, high, before, needed = _narrowed(
            earlier_ranges, earlier_sums, bounds, row, option, PASS - 1, COUNTED, CAPPED, SPLITS, WAYS
        )
        if split == 0:
            tl.store(ranges + row * 4, low)
            tl.store(ranges + row * 4 + 1, high)
            tl.store(ranges + row * 4 + 2, before)
            tl.store(ranges + row * 4 + 3, needed.to(tl.int64, bitcast=True))
    if high - low == 1:
        return
    way = tl.arange(0, WAYS)
    thresholds = _threshold(low, high, way, PASS, WAYS).to(tl.int32)
    if PASS == _COARSE:
        thresholds = tl.where(way == 0, cap.to(tl.int32), thresholds)
    low, high = low.to(tl.int32), high.to(tl.int32)
    of_row, maximum, temperature = _source(logits, row_stride, rows, row, maxima, filters, SPLITS)
    begin, end = split * span, tl.minimum(split * span + span, vocab)
    if PASS == _FINE:
        end = begin + tl.load(counts + row * SPLITS + split)
    lighter = tl.zeros([WAYS, TILE], tl.int64)
    kept = 0
    for start in range(begin, end, TILE):
        index = start + tl.arange(0, TILE)[None, :]  # of two dimensions, which the thresholds make necessary below
        if PASS == _FINE:
            key = tl.load(candidates + row * vocab + index, mask=index < end, other=0x7F800000)
        else:
            key = _keys(of_row, index, end, maximum, temperature)
        inside = (key >= low) & (index < end)
        if PASS != _COARSE:
            inside = inside & (key < high)
        if PASS == _COMPACT:
            target = begin + kept + tl.cumsum(inside.to(tl.int32), 1) - 1
            tl.store(candidates + row * vocab + target, key, mask=inside)
            kept += tl.sum(tl.sum(inside.to(tl.int32), 1), 0)
        weight = tl.where(inside, 1 if COUNTED else _weights(key), 0).to(tl.int64)
        lighter += tl.where(key < thresholds[:, None], weight, 0)
    if PASS == _COMPACT:
        tl.store(counts + row * SPLITS + split, kept)
    tl.store(sums + (row * SPLITS + split) * WAYS + way, tl.sum(lighter, 1))


@triton.jit
def _end_search(
    bounds,
    ranges,
    sums,
    filters,
    PASS: tl.constexpr,
    COUNTED: tl.constexpr,
    CAPPED: tl.constexpr,
    SPLITS: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Write a row's bound; after a search by count also how many tokens with just that key belong to the top-k."""
    row = tl.program_id(0).to(tl.int64)
    option = tl.load(filters + row * _FILTERS + (1 if COUNTED else 2))
    if COUNTED:
        bound, ties = tl.full((), _END, tl.int64) - 1, tl.full((), 0, tl.int64)
    elif CAPPED:
        bound, ties = tl.load(bounds + row * 2), tl.load(bounds + row * 2 + 1)
    else:
        bound, ties = tl.full((), _END, tl.int64) - 1, tl.full((), 0, tl.int64)
    if (COUNTED and option > 0) or (not COUNTED and option < 1):
        bound, _, before, _ = _narrowed(ranges, sums, bounds, row, option, PASS, COUNTED, CAPPED, SPLITS, WAYS)
        ties = option.to(tl.int64) - before
    tl.store(bounds + row * 2, bound)
    tl.store(bounds + row * 2 + 1, ties)


@triton.jit
def _largest_key(filters, bounds, row, FILTERED: tl.constexpr):
    """The bound of all filters of a row."""
    bound = tl.abs(tl.load(filters + row * _FILTERS + 3).to(tl.float32)).to(tl.int32, bitcast=True).to(tl.int64)
    if FILTERED:
        bound = tl.minimum(bound, tl.load(bounds + row * 2))
    return bound


@triton.jit
def _kept_weights(logits, token, end, maximum, temperature, bound):
    """The weights of tokens up to the bound, 0 of others."""
    key = _keys(logits, token, end, maximum, temperature)
    return tl.where((key <= bound) & (token < end), _weights(key), 0)


@triton.jit(do_not_specialize=["row_stride", "vocab", "span"])
def _sum_kept(
    sums,
    logits,
    rows,
    maxima,
    filters,
    bounds,
    row_stride,
    vocab,
    span,
    FILTERED: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """What the kept tokens of a span weigh."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    of_row, maximum, temperature = _source(logits, row_stride, rows, row, maxima, filters, SPLITS)
    bound = _largest_key(filters, bounds, row, FILTERED)
    total = tl.zeros([TILE], tl.int64)
    end = tl.minimum(split * span + span, vocab)
    for begin in range(split * span, end, TILE):
        total += _kept_weights(of_row, begin + tl.arange(0, TILE), end, maximum, temperature, bound)
    tl.store(sums + row * SPLITS + split, tl.sum(total, 0))


@triton.jit(do_not_specialize=["row_stride", "vocab", "span"])
def _draw(
    drawn,
    sums,
    logits,
    rows,
    maxima,
    filters,
    bounds,
    row_stride,
    vocab,
    span,
    FILTERED: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The first token at which the sum of kept weights exceeds a random part of all; -1 without a finite maximum."""
    row = tl.program_id(0).to(tl.int64)
    of_row, maximum, temperature = _source(logits, row_stride, rows, row, maxima, filters, SPLITS)
    bound = _largest_key(filters, bounds, row, FILTERED)
    split = tl.arange(0, SPLITS)
    of_spans = tl.load(sums + row * SPLITS + split)
    target = (tl.load(filters + row * _FILTERS + 4) * tl.sum(of_spans, 0).to(tl.float64)).to(tl.int64)
    chosen_span = tl.minimum(tl.sum((tl.cumsum(of_spans, 0) <= target).to(tl.int32), 0), SPLITS - 1)
    passed = tl.sum(tl.where(split < chosen_span, of_spans, 0), 0)
    first = tl.full((), 0x7FFFFFFF, tl.int32)
    end = tl.minimum(chosen_span * span + span, vocab)
    for begin in range(chosen_span * span, end, TILE):
        token = begin + tl.arange(0, TILE)
        weight = _kept_weights(of_row, token, end, maximum, temperature, bound)
        reached = (passed + tl.cumsum(weight, 0) > target) & (token < end)
        first = tl.minimum(first, tl.min(tl.where(reached, token, 0x7FFFFFFF), 0))
        passed += tl.sum(weight, 0)
    tl.store(drawn + row, tl.where(tl.abs(maximum) < float("inf"), first, -1).to(tl.int64))


@dataclass(frozen=True)
class Maxima:
    """What the spans of rows have found: values, float32, and the first tokens that have them, int32, `[R, splits]`.

    span: tokens of one.
    """

    values: torch.Tensor
    tokens: torch.Tensor
    span: int

    @staticmethod
    def of(logits: torch.Tensor) -> Maxima:
        rows, vocab = logits.shape
        splits = min(_MAX_SPLITS, triton.next_power_of_2(triton.cdiv(vocab, _TILE)))
        span = triton.cdiv(triton.cdiv(vocab, splits), _TILE) * _TILE
        maxima = Maxima(
            torch.empty(rows, splits, dtype=torch.float32, device=logits.device),
            torch.empty(rows, splits, dtype=torch.int32, device=logits.device),
            span,
        )
        _find_maxima[(rows, splits)](
            maxima.values, maxima.tokens, logits, logits.stride(0), vocab, span, TILE=_TILE, num_warps=4
        )
        return maxima

    def most_likely(self) -> torch.Tensor:
        """The first token with the largest logit of each row, -1 where that is not finite: int64 `[R]`."""
        chosen = torch.empty(len(self.values), dtype=torch.int64, device=self.values.device)
        _choose[(len(chosen),)](chosen, self.values, self.tokens, SPLITS=self.values.shape[1], num_warps=1)
        return chosen


def draw(
    logits: torch.Tensor, maxima: Maxima, rows: torch.Tensor, filters: torch.Tensor, *, top_k: bool, top_p: bool
) -> torch.Tensor:
    """One draw for each of some rows, by the inverse of the cumulative distribution in token order: int64 `[r]`, -1
    where the largest logit is not finite.

    logits: `[R, V]`, of any floating dtype, a row contiguous. maxima: of these. rows: int64 `[r]`.
    filters: float64 `[r, 5]`: temperature; top-k, at most V, or 0; top-p; logarithm of min-p; a random number above 0
        and below 1. top_k, top_p: whether a row has such a filter.
    """
    splits = maxima.values.shape[1]
    sizes = (logits.stride(0), logits.shape[1], maxima.span)
    bounds = torch.empty(len(rows), 2, dtype=torch.int64, device=logits.device)
    if top_k:
        _find_bounds(bounds, logits, maxima, rows, filters, counted=True, capped=False)
    if top_p:
        _find_bounds(bounds, logits, maxima, rows, filters, counted=False, capped=top_k)
    sums = torch.empty(len(rows), splits, dtype=torch.int64, device=logits.device)
    drawn = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    inputs = (logits, rows, maxima.values, filters, bounds, *sizes)
    shape = {"FILTERED": top_k or top_p, "SPLITS": splits, "TILE": _TILE, "num_warps": 4}
    _sum_kept[(len(rows), splits)](sums, *inputs, **shape)
    _draw[(len(rows),)](drawn, sums, *inputs, **shape)
    return drawn


def _find_bounds(
    bounds: torch.Tensor,
    logits: torch.Tensor,
    maxima: Maxima,
    rows: torch.Tensor,
    filters: torch.Tensor,
    *,
    counted: bool,
    capped: bool,
) -> None:
    """Search the bounds of top-k (`counted`) or of top-p among those of top-k (`capped`), or of all tokens."""
    splits, vocab = maxima.values.shape[1], logits.shape[1]

    def numbers(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(len(rows), *size, dtype=dtype, device=logits.device)

    # Two of each, since a program reads what those of the pass before have left while others write.
    ranges, sums = [numbers(4), numbers(4)], [numbers(splits, _WAYS), numbers(splits, _WAYS)]
    candidates, counts = numbers(vocab, dtype=torch.int32), numbers(splits, dtype=torch.int32)
    inputs = (candidates, counts, bounds, logits, rows, maxima.values, filters)
    sizes = (logits.stride(0), vocab, maxima.span)
    shape = {"COUNTED": counted, "CAPPED": capped, "SPLITS": splits, "WAYS": _WAYS, "num_warps": 4}
    kinds = [_COARSE.value, _COMPACT.value, *[_FINE.value] * (_FINE_PASSES - 1)]
    for number, kind in enumerate(kinds):
        here, earlier = number % 2, 1 - number % 2
        _search[(len(rows), splits)](
            ranges[here],
            sums[here],
            ranges[earlier],
            sums[earlier],
            *inputs,
            *sizes,
            PASS=kind,
            TILE=_SEARCH_TILE,
            **shape,
        )
    last = (len(kinds) - 1) % 2
    _end_search[(len(rows),)](bounds, ranges[last], sums[last], filters, PASS=kinds[-1], **shape)
