"""An attention backend in front of which KV pairs are recalled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kvllm.attention.base import AttentionBackend, AttentionBatch
from kvllm.compression.mass import Softmax
from kvllm.compression.recall import candidates, missing_mass, num_needed, upper_scores
from kvllm.kvcache.tiers.chunks import CHUNK
from kvllm.kvcache.tiers.dropped_pairs import read_pairs, write_pairs

if TYPE_CHECKING:
    from kvllm.worker.recall import CompressedSequence, Recall


@dataclass
class RecallGroup:
    """R sequences of a step with T query tokens each.

    rows: int64 `[R, T]`, their query tokens in the batch. last_kv_index: int32 `[R, T]`, as in AttentionBatch.
    tables: int32 `[R, blocks]`. movable: bool `[R, pairs of these blocks]`.
    chunks: int32 `[R, C]`, of which those up to `last_dropped`, int32 `[R, T]`, are the sequence's.
    masses: of each layer, the bounds `[R]` behind its exchanges.
    """

    seq_ids: Sequence[int]
    sequences: Sequence[CompressedSequence]
    rows: torch.Tensor
    last_kv_index: torch.Tensor
    tables: torch.Tensor
    chunks: torch.Tensor
    last_dropped: torch.Tensor
    movable: torch.Tensor
    masses: list[torch.Tensor] = field(default_factory=list)

    def bounds(self) -> Iterator[tuple[int, float]]:
        """Of each sequence, the largest bound of all layers, heads and query tokens."""
        return zip(self.seq_ids, torch.stack(self.masses).amax(0).tolist(), strict=True)


@dataclass
class _Scores:
    """Scores of a group in one layer, `[R, kv_heads, G, N]` of residents and `[R, kv_heads, G, P]` of dropped pairs.

    upper: bounds on the scores that these had before they were stored.
    """

    resident: torch.Tensor
    dropped: torch.Tensor
    upper: torch.Tensor
    softmax: Softmax

    @property
    def mass(self) -> torch.Tensor:
        """The logarithm of what residents and sinks have in the softmax: `[R, kv_heads, G]`."""
        mass, sinks = self.resident.logsumexp(-1), self.softmax.sinks
        if sinks is None:
            return mass
        of_queries = sinks.view(mass.shape[1], -1).repeat(1, mass.shape[2] * mass.shape[1] // len(sinks))
        return torch.logaddexp(mass, of_queries)


class RecallingBackend(AttentionBackend):
    """A backend, and the exchanges of a step's groups in front of each layer's attention."""

    name = "recalling"

    def __init__(self, backend: AttentionBackend, recall: Recall, groups: list[RecallGroup]) -> None:
        super().__init__(backend.cache, backend.num_query_heads, backend.scale, backend.layers)
        self.backend = backend
        self.recall = recall
        self.groups = groups
        self.scores_windows = backend.scores_windows

    def plan(self, batch: AttentionBatch) -> Any:
        return self.backend.plan(batch)

    def run(self, layer: int, queries: torch.Tensor, plan: Any, sinks: torch.Tensor | None = None) -> torch.Tensor:
        softmax = Softmax(self.scale, self.layers[layer].soft_cap, sinks)
        for group in self.groups:
            self._recall(layer, queries[group.rows], group, softmax)
        return self.backend.run(layer, queries, plan, sinks)

    def _recall(self, layer: int, queries: torch.Tensor, group: RecallGroup, softmax: Softmax) -> None:
        """queries: `[R, T, query_heads, head_dim]`."""
        scores = self._scores(layer, queries, group, softmax)
        mass = scores.mass
        missing = missing_mass(mass, scores.upper)  # [R, kv_heads, G]
        bound = missing.amax(-1)
        limit = self.recall.config.recall_bound
        is_due = torch.ones_like(bound, dtype=torch.bool) if limit is None else bound > limit
        if is_due.any():
            self._exchange(layer, group, scores, mass, missing, is_due)
            bound = missing_mass(scores.mass, scores.upper).amax(-1)
        group.masses.append(bound.amax(-1))

    def _scores(self, layer: int, queries: torch.Tensor, group: RecallGroup, softmax: Softmax) -> _Scores:
        scale, dropped = softmax.scale_of(queries.shape[-1]), self.recall.dropped
        of_residents = self.recall.operations.key_scores
        resident = of_residents(layer, queries, group.tables, group.last_kv_index, scale)
        stored = dropped.operations.key_scores(layer, queries, group.chunks, group.last_dropped, scale)
        upper = stored
        if dropped.errors is not None:
            errors = dropped.errors[layer][group.chunks].transpose(1, 2).flatten(2)
            of_heads = queries.float().unflatten(2, (errors.shape[1], -1)).transpose(1, 2).flatten(2, 3)
            upper = upper_scores(stored, of_heads * scale, errors)
        return _Scores(_bounded(resident, softmax), _bounded(stored, softmax), _bounded(upper, softmax), softmax)

    def _exchange(
        self,
        layer: int,
        group: RecallGroup,
        scores: _Scores,
        mass: torch.Tensor,
        missing: torch.Tensor,
        is_due: torch.Tensor,
    ) -> None:
        """Let pairs change places in the heads that are due, bool `[R, kv_heads]`, and their scores with them.

        mass, missing: `[R, kv_heads, G]`, see _Scores and `missing_mass`.
        """
        row, head = is_due.nonzero(as_tuple=True)
        of_due = mass[row, head][..., None]
        dropped, resident = scores.dropped[row, head] - of_due, scores.resident[row, head] - of_due
        loss = resident.amax(1).masked_fill(~group.movable[row], torch.inf)
        config = self.recall.config
        arriving, leaving, moves = candidates(dropped.amax(1), loss, config.recall_chunks * CHUNK)
        if config.recall_bound is not None:
            share = 1 - missing[row, head][..., None]  # of residents
            shares = share * _gathered(dropped, arriving).exp(), share * _gathered(resident, leaving).exp()
            needed = num_needed(missing[row, head], *shares, config.recall_bound)
            moves &= torch.arange(moves.shape[1]) < needed
        due, rank = moves.nonzero(as_tuple=True)
        if len(due) == 0:
            return
        row, head, arriving, leaving = row[due], head[due], arriving[due, rank], leaving[due, rank]
        self._move(layer, group, row, head, arriving, leaving)
        left = scores.resident[row, head, :, leaving]
        scores.resident[row, head, :, leaving] = scores.dropped[row, head, :, arriving]
        scores.dropped[row, head, :, arriving] = scores.upper[row, head, :, arriving] = left

    def _move(
        self,
        layer: int,
        group: RecallGroup,
        row: torch.Tensor,
        head: torch.Tensor,
        arriving: torch.Tensor,
        leaving: torch.Tensor,
    ) -> None:
        dropped, block_size = self.recall.dropped, self.cache.shape.block_size
        there = group.chunks[row, arriving // CHUNK].long(), head, arriving % CHUNK
        here = group.tables[row, leaving // block_size].long(), head, leaving % block_size
        arrivals, leavers = read_pairs(dropped.cache, layer, there), read_pairs(self.cache, layer, here)
        positions, left = dropped.positions[layer][there], torch.empty_like(leaving, dtype=torch.int32)
        for index in row.unique().tolist():
            is_of, sequence = row == index, group.sequences[index]
            slots = head[is_of], leaving[is_of]
            left[is_of] = sequence.positions[layer][slots]
            sequence.positions[layer][slots] = positions[is_of]
            sequence.is_ordered = False
        write_pairs(self.cache, layer, here, arrivals)
        dropped.store(layer, there, leavers, left)
        self.recall.exchanged_bytes += len(row) * (self.cache.shape.pair_bytes + dropped.cache.shape.pair_bytes)


def _bounded(scores: torch.Tensor, softmax: Softmax) -> torch.Tensor:
    """Scores behind the soft cap, under which -inf, where there is no pair, stays what it is."""
    if softmax.soft_cap is None:
        return scores
    return softmax.bounded(scores).masked_fill_(scores == -torch.inf, -torch.inf)


def _gathered(scores: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """`[M, G, E]` of scores `[M, G, P]` and pairs `[M, E]`."""
    return scores.gather(-1, pairs[:, None].expand(-1, scores.shape[1], -1))
