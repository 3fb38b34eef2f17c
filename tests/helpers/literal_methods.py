"""Compression methods written out in float64 as their papers define them, for one sequence, head by head.

Every function takes a `Sequence` and the number of KV pairs to keep in front of the buffer. It returns their offsets
for each KV head, in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

OPTIONS = {"lag": 11, "protected": 0.3, "sketch": 5, "attention_chunk": 13, "blend": 0.6}
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

    def sinks(self, of_cache: int) -> int:
        """How many of the first KV pairs of the cache the region has."""
        return min(max(0, of_cache - self.start), self.scored)

    def group(self, head: int) -> np.ndarray:
        """The query heads of a KV head."""
        size = len(self.queries) // len(self.keys)
        return self.queries[head * size : (head + 1) * size]

    def unrotated_keys(self) -> np.ndarray:
        """Keys as they were before the rotary embedding, by complex numbers."""
        length, width = self.keys.shape[1], self.keys.shape[2] // 2
        turns = np.outer(self.last_position - length + 1 + np.arange(length), self.frequencies)
        pairs = (self.keys[..., :width] + 1j * self.keys[..., width:]) * np.exp(-1j * turns)
        return np.concatenate((pairs.real, pairs.imag), axis=-1)


def best(scores: np.ndarray, count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda j: (-scores[j], j))[: max(count, 0)]


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def lagkv(sequence: Sequence, total: int) -> list[list[int]]:
    """Equations 4 to 9: partitions of `lag` KV pairs, each in relation to the one that follows."""
    lag, sinks = OPTIONS["lag"], sequence.sinks(4)
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


def pooled(scores: np.ndarray, kernel: int) -> np.ndarray:
    padded = np.pad(scores, kernel // 2)
    return np.array([padded[j : j + kernel].sum() / kernel for j in range(len(scores))])


def vase(sequence: Sequence, total: int) -> list[list[int]]:
    """VaSE-AttnV as in its public code: large values first, the others drawn by their attention."""
    num_scored = sequence.scored
    lots = np.random.default_rng((sequence.seed, sequence.layer)).exponential(size=(len(sequence.keys), num_scored))
    kept = []
    for head, (keys, values) in enumerate(zip(sequence.keys, sequence.values, strict=True)):
        extent = values.max(axis=1) - values.min(axis=1)
        extent[: sequence.sinks(4)] = np.inf
        chosen = best(extent[:num_scored], int(OPTIONS["protected"] * total))
        attention = np.zeros(num_scored)
        for rows in sequence.group(head):
            of_head = np.mean([softmax(row @ keys[:num_scored].T / np.sqrt(len(row))) for row in rows], axis=0)
            attention += pooled(of_head, 5)
        drawn = best(attention / lots[head], num_scored)
        kept.append(chosen + [j for j in drawn if j not in chosen][: total - len(chosen)])
    return kept


def leverage_of(keys: np.ndarray, layer: int) -> np.ndarray:
    """The diagonal of `X (X'X + ridge)^-1 X'` for keys `[n, d]` less their mean, projected."""
    width, sketch = keys.shape[1], OPTIONS["sketch"]
    projection = np.random.default_rng(layer).standard_normal((width, sketch)) / np.sqrt(sketch)
    projected = (keys - keys.mean(axis=0)) @ projection
    return np.diag(projected @ np.linalg.inv(projected.T @ projected + 0.01 * np.eye(sketch)) @ projected.T)


def leverage(sequence: Sequence, total: int) -> list[list[int]]:
    unrotated = sequence.unrotated_keys()
    return [best(leverage_of(keys, sequence.layer)[: sequence.scored].round(4), total) for keys in unrotated]


def compactor(sequence: Sequence, total: int) -> list[list[int]]:
    """Leverage plus non-causal attention by chunk, both standardized over all heads; eight sinks."""
    first, end = sequence.sinks(8), sequence.scored
    unrotated, chunk = sequence.unrotated_keys(), OPTIONS["attention_chunk"]
    distinct = np.array([leverage_of(keys[first:end], sequence.layer) for keys in unrotated])
    attention = np.zeros_like(distinct)
    for head, keys in enumerate(sequence.keys):
        for i in range(first, end):
            begin = first + (i - first) // chunk * chunk
            stop = min(begin + chunk, end)
            for rows in sequence.group(head):
                attention[head, begin - first : stop - first] += softmax(rows[i] @ keys[begin:stop].T)
        attention[head] /= len(sequence.group(head))
        attention[head] = pooled(attention[head] * np.linalg.norm(sequence.values[head, first:end], axis=1), 3)
    scores = OPTIONS["blend"] * (distinct - distinct.mean()) / distinct.std()
    scores += (attention - attention.mean()) / attention.std()
    return [list(range(first))[:total] + [first + j for j in best(row, total - first)] for row in scores]


LITERALS: dict[str, Callable[[Sequence, int], list[list[int]]]] = {
    "lagkv": lagkv,
    "vase": vase,
    "leverage": leverage,
    "compactor": compactor,
}
