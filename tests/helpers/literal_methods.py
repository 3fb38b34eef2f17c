"""Compression methods written out in float64 as their papers define them, for one sequence, head by head.

Every function takes a `Sequence` and the number of KV pairs to keep in front of the buffer. It returns their offsets
for each KV head, in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

OPTIONS = {"lag": 11}
"""Options of the methods, small enough for small regions."""


@dataclass
class Sequence:
    """One region. queries: `[Hq, tokens, d]`, rotated, of the region's last tokens. keys: `[Hkv, C, d]`, rotated."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    buffer: int
    start: int
    last_position: int
    frequencies: np.ndarray
    seed: int
    layer: int

    @property
    def scored(self) -> int:
        return self.keys.shape[1] - self.buffer

    @property
    def sinks(self) -> int:
        """How many of the first four KV pairs of the cache the region has."""
        return min(max(0, 4 - self.start), self.scored)


def best(scores: np.ndarray, count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda j: (-scores[j], j))[: max(count, 0)]


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def lagkv(sequence: Sequence, total: int) -> list[list[int]]:
    """Equations 4 to 9: partitions of `lag` KV pairs, each in relation to the one that follows."""
    lag, sinks = OPTIONS["lag"], sequence.sinks
    kept = []
    for keys, values in zip(sequence.keys, sequence.values, strict=True):
        shares = np.full(sequence.scored, np.inf)
        end = sequence.scored
        while end > sinks:
            begin = max(sinks, end - lag)
            score = np.zeros(end - begin)
            for states in (keys, values):
                following = states[end : end + lag]
                least, greatest = following.min(axis=0), following.max(axis=0)
                normal = (states[begin:end] - least) / (greatest - least)
                score += softmax(normal.std(axis=1, ddof=1))
            for rank, j in enumerate(best(score, end - begin)):
                shares[begin + j] = 1 - rank / (end - begin)
            end = begin
        kept.append(best(np.round(shares, 9), total))
    return kept


LITERALS: dict[str, Callable[[Sequence, int], list[list[int]]]] = {"lagkv": lagkv}
