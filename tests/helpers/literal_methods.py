"""Compression methods written out in float64 as their papers define them, for one sequence, head by head.

Every function takes a `Sequence` and the number of KV pairs to keep in front of the buffer. It returns their offsets
for each KV head, in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from kvllm.compression.gates import Gates
from kvllm.compression.statistics import QueryStatistics

OPTIONS = {"lag": 11, "protected": 0.3, "sketch": 5, "attention_chunk": 13, "blend": 0.6, "future": 20}
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
    statistics: QueryStatistics
    gates: Gates
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
        return self.unrotated(self.keys)

    def unrotated(self, vectors: np.ndarray) -> np.ndarray:
        """The same for the last vectors of the region, `[heads, n, d]`."""
        positions = self.last_position - vectors.shape[1] + 1 + np.arange(vectors.shape[1])
        return halves(pairs(vectors) * np.exp(-1j * np.outer(positions, self.frequencies)))


def best(scores: np.ndarray, count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda j: (-scores[j], j))[: max(count, 0)]


def pairs(vectors: np.ndarray) -> np.ndarray:
    """Each pair of channels that turns together, as a complex number."""
    width = vectors.shape[-1] // 2
    return vectors[..., :width] + 1j * vectors[..., width:]


def halves(numbers: np.ndarray) -> np.ndarray:
    return np.concatenate((numbers.real, numbers.imag), axis=-1)


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


def expected(sequence: Sequence, means: np.ndarray, covariances: np.ndarray, total: int) -> list[list[int]]:
    """Scores of Expected Attention, with rotations as matrices and their mean, and four sinks."""
    ahead = sequence.last_position + 1 + np.arange(OPTIONS["future"])
    turns = np.exp(1j * np.outer(ahead, sequence.frequencies)).mean(axis=0)
    rotation = np.block([[np.diag(turns.real), -np.diag(turns.imag)], [np.diag(turns.imag), np.diag(turns.real)]])
    first, group, kept = sequence.sinks(4), len(means) // len(sequence.keys), []
    for head, keys in enumerate(sequence.keys):
        width, scores = keys.shape[1], 0
        for mean, covariance in zip(means[head * group :][:group], covariances[head * group :][:group], strict=True):
            mean, covariance = rotation @ mean, rotation @ covariance @ rotation.T
            logits = [mean @ key / np.sqrt(width) + key @ covariance @ key / (2 * width) for key in keys[first:]]
            scores = scores + softmax(np.array(logits)) / group
        scores = scores * np.linalg.norm(sequence.values[head, first:], axis=1)
        chosen = best(scores[: sequence.scored - first], total - first)
        kept.append(list(range(first))[:total] + [first + j for j in chosen])
    return kept


def expected_attention(sequence: Sequence, total: int) -> list[list[int]]:
    queries = sequence.unrotated(sequence.queries)
    covariances = np.array([np.cov(of_head, rowvar=False, ddof=0) for of_head in queries])
    return expected(sequence, queries.mean(axis=1), covariances, total)


def expected_attention_calibrated(sequence: Sequence, total: int) -> list[list[int]]:
    statistics = sequence.statistics
    return expected(sequence, statistics.mean.double().numpy(), statistics.covariance.double().numpy(), total)


def triattention(sequence: Sequence, total: int) -> list[list[int]]:
    """Keys before the rotation, their distance to queries 1, 2, 4 and so on ahead, and a cosine for each pair."""
    length, group = sequence.keys.shape[1], len(sequence.statistics.mean) // len(sequence.keys)
    positions = sequence.last_position - length + 1 + np.arange(length)
    centres = pairs(sequence.statistics.mean.double().numpy())
    magnitudes, kept = sequence.statistics.magnitude.double().numpy(), []
    for head, keys in enumerate(pairs(sequence.unrotated_keys())):
        highest = np.full(sequence.scored, -np.inf)
        for centre, magnitude in zip(centres[head * group :][:group], magnitudes[head * group :][:group], strict=True):
            scores = np.zeros(sequence.scored)
            for j in range(sequence.scored):
                phase = np.angle(centre * keys[j].conj())
                offsets = [2**i for i in range(17) if 2**i <= OPTIONS["future"]]
                for offset in offsets:
                    distance = sequence.last_position + 1 + offset - positions[j]
                    cosines = np.cos(sequence.frequencies * distance + phase)
                    scores[j] += (abs(centre) * abs(keys[j]) * cosines).sum() / len(offsets)
                scores[j] += ((magnitude - abs(centre)) * abs(keys[j])).sum()
            highest = np.maximum(highest, (scores - scores.mean()) / scores.std())
        kept.append(best(highest, total))
    return kept


def gate_logits(sequence: Sequence) -> np.ndarray:
    """`[Hkv, C - buffer]`: a hidden layer of `x sigmoid(x)`, unit by unit, over the key before its rotation, then the
    value."""
    weights = {field.name: getattr(sequence.gates, field.name).double().numpy() for field in fields(Gates)}
    found = np.zeros((len(sequence.keys), sequence.scored))
    for head, keys in enumerate(sequence.unrotated_keys()):
        for j in range(sequence.scored):
            found[head, j] = weights["output_bias"][head]
            for unit, bias in enumerate(weights["hidden_bias"][head]):
                key, value = np.split(weights["hidden"][head, unit], 2)
                x = key @ keys[j] + value @ sequence.values[head, j] + bias
                found[head, j] += weights["output"][head, unit] * x / (1 + np.exp(-x))
    return found


def dms(sequence: Sequence, total: int) -> list[list[int]]:
    """The highest logits; a KV pair is ahead of the one before it by very little."""
    return [best(logits + 1e-4 * np.arange(sequence.scored), total) for logits in gate_logits(sequence)]


def trimkv(sequence: Sequence, total: int) -> list[list[int]]:
    """A retention for each KV pair, to the power of the tokens that follow in the region."""
    age = sequence.keys.shape[1] - 1 - np.arange(sequence.scored)
    return [best((1 / (1 + np.exp(-logits))) ** age, total) for logits in gate_logits(sequence)]


LITERALS: dict[str, Callable[[Sequence, int], list[list[int]]]] = {
    "lagkv": lagkv,
    "vase": vase,
    "leverage": leverage,
    "compactor": compactor,
    "expected_attention": expected_attention,
    "expected_attention_calibrated": expected_attention_calibrated,
    "triattention": triattention,
    "dms": dms,
    "trimkv": trimkv,
}
