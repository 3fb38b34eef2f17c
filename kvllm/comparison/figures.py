"""Means over texts with their intervals, paired differences, and the variants that lose least in a given memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from kvllm.comparison.measurement import Piece, Result
from kvllm.comparison.variants import FULL

CONFIDENCE = 0.95
MEASURES = ("kl_last_quarter", "kl", "nll", "same_top")


class Mean(Struct, frozen=True):
    """A mean over texts and half its confidence interval (Student's t); None for a single text."""

    mean: float
    half_width: float | None

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.half_width is not None and abs(self.mean) > self.half_width

    def show(self, form: str) -> str:
        return format(self.mean, form) + ("" if self.half_width is None else f" ± {self.half_width:{form.lstrip('+')}}")


class Figures(Struct, frozen=True, kw_only=True):
    """What a variant's texts say.

    minus_random: its KL of the last quarter minus that of choice by lot in the same bytes and dtype. minus_all_pairs:
    its minus log probability of a token minus that of the full cache. by_kind: the measures of each kind of text.
    """

    measures: dict[str, Mean]
    perplexity: float
    minus_random: Mean | None
    minus_all_pairs: Mean | None
    by_kind: dict[str, dict[str, Mean]]


def t_quantile(freedom: int) -> float:
    """The quantile of Student's distribution for two-sided intervals. Its density is a power of an angle's cosine."""
    angles = np.linspace(0, np.pi / 2, 200_001)
    mass = np.cumsum(np.cos(angles) ** (freedom - 1))
    return float(np.sqrt(freedom) * np.tan(np.interp(CONFIDENCE, mass / mass[-1], angles)))


def mean_of(values: Sequence[float]) -> Mean:
    count = len(values)
    if count < 2:
        return Mean(float(np.mean(values)), None)
    return Mean(float(np.mean(values)), float(t_quantile(count - 1) * np.std(values, ddof=1) / count**0.5))


def difference(first: Sequence[Piece], second: Sequence[Piece], measure: str) -> Mean:
    """The mean difference of the same texts."""
    return mean_of([getattr(a, measure) - getattr(b, measure) for a, b in zip(first, second, strict=True)])


def figures_of(result: Result, results: Mapping[str, Result]) -> Figures:
    """results: all variants, by name."""
    pieces = result.pieces
    where = result.memory, result.kv_cache_dtype
    lots = (each for each in results.values() if each.method == "random" and each.pieces)
    lot = next((each for each in lots if (each.memory, each.kv_cache_dtype) == where), None)
    full = results[FULL.name]
    kinds = {kind: [piece for piece in pieces if piece.kind == kind] for kind in dict.fromkeys(p.kind for p in pieces)}
    compared = result.method is not None and lot is not result
    return Figures(
        measures=_measures(pieces),
        perplexity=float(np.exp(np.mean([piece.nll for piece in pieces]))),
        minus_random=difference(pieces, lot.pieces, "kl_last_quarter") if compared and lot else None,
        minus_all_pairs=None if result is full else difference(pieces, full.pieces, "nll"),
        by_kind={kind: _measures(own) for kind, own in kinds.items()},
    )


def _measures(pieces: Sequence[Piece]) -> dict[str, Mean]:
    return {measure: mean_of([getattr(piece, measure) for piece in pieces]) for measure in MEASURES}


class Choice(NamedTuple):
    """The variant that loses least within a share of the bytes, and the next one. difference: of their losses."""

    budget: float
    best: Result | None
    second: Result | None = None
    difference: Mean | None = None


def choose(results: Mapping[str, Result], budget: float) -> Choice:
    fitting = [each for each in results.values() if each.pieces and each.memory <= budget]
    fitting.sort(key=lambda each: float(np.mean([piece.kl_last_quarter for piece in each.pieces])))
    if not fitting:
        return Choice(budget, None)
    if len(fitting) == 1:
        return Choice(budget, fitting[0])
    best, second = fitting[:2]
    return Choice(budget, best, second, difference(second.pieces, best.pieces, "kl_last_quarter"))
