"""An attention backend in front of which KV pairs are recalled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kvllm.attention.base import AttentionBackend, AttentionBatch
from kvllm.compression.mass import Softmax
from kvllm.compression.recall import exchanges, missing_mass, scores_of, upper_scores
from kvllm.kvcache.tiers.dropped_pairs import CHUNK, read_pairs, write_pairs

if TYPE_CHECKING:
    from kvllm.worker.recall import CompressedSequence, Recall


@dataclass
class RecallGroup:
    """R sequences of a step with T query tokens each.

    rows: int64 `[R, T]`, their query tokens in the batch. last_kv_index: int64 `[R, T]`, as in AttentionBatch.
    tables: int64 `[R, blocks]`. movable: bool `[R, pairs of these blocks]`.
    chunks: int64 `[R, C]`, of which the first `num_dropped` pairs, int64 `[R]`, are the sequence's.
    masses: of each layer, the bounds `[R]` behind its exchanges.
    """

    seq_ids: Sequence[int]
    sequences: Sequence[CompressedSequence]
    rows: torch.Tensor
    last_kv_index: torch.Tensor
    tables: torch.Tensor
    chunks: torch.Tensor
    num_dropped: torch.Tensor
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
            self._recall(layer, queries[group.rows].float(), group, softmax)
        return self.backend.run(layer, queries, plan, sinks)

    def _recall(self, layer: int, queries: torch.Tensor, group: RecallGroup, softmax: Softmax) -> None:
        """queries: `[R, T, query_heads, head_dim]`."""
        scores = self._scores(layer, queries, group, softmax)
        mass = scores.mass
        bound = missing_mass(mass, scores.upper).amax(-1)  # [R, kv_heads]
        limit = self.recall.config.recall_bound
        is_due = torch.ones_like(bound, dtype=torch.bool) if limit is None else bound > limit
        if is_due.any():
            self._exchange(layer, group, scores, mass, is_due)
            bound = missing_mass(scores.mass, scores.upper).amax(-1)
        group.masses.append(bound.amax(-1))

    def _scores(self, layer: int, queries: torch.Tensor, group: RecallGroup, softmax: Softmax) -> _Scores:
        num_rows, num_tokens, num_heads, width = queries.shape
        kv_heads, dropped = self.cache.shape.num_kv_heads, self.recall.dropped
        of_heads = queries.view(num_rows, num_tokens, kv_heads, -1, width).transpose(1, 2)
        scaled = of_heads.flatten(2, 3) * softmax.scale_of(width)  # [R, kv_heads, G, head_dim]
        resident = scores_of(scaled, self.recall.operations.gather_keys(layer, group.tables).float())
        last = group.last_kv_index.repeat_interleave(num_heads // kv_heads, dim=1)
        unseen = torch.arange(resident.shape[-1]) > last[:, None, :, None]
        stored = scores_of(scaled, dropped.keys(layer, group.chunks))
        errors = dropped.errors[layer][group.chunks].transpose(1, 2).flatten(2)
        upper = upper_scores(stored, scaled, errors)
        absent = (torch.arange(stored.shape[-1]) >= group.num_dropped[:, None])[:, None, None]
        return _Scores(
            softmax.bounded(resident).masked_fill_(unseen, -torch.inf),
            softmax.bounded(stored).masked_fill_(absent, -torch.inf),
            softmax.bounded(upper).masked_fill_(absent, -torch.inf),
            softmax,
        )

    def _exchange(
        self, layer: int, group: RecallGroup, scores: _Scores, mass: torch.Tensor, is_due: torch.Tensor
    ) -> None:
        """Let pairs change places in the heads that are due, bool `[R, kv_heads]`, and their scores with them."""
        row, head = is_due.nonzero(as_tuple=True)
        of_due = mass[row, head][..., None]
        gain = (scores.dropped[row, head] - of_due).amax(1)
        loss = (scores.resident[row, head] - of_due).amax(1).masked_fill(~group.movable[row], torch.inf)
        due, arriving, leaving = exchanges(gain, loss, self.recall.config.recall_chunks * CHUNK)
        if len(due) == 0:
            return
        row, head = row[due], head[due]
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
        there = group.chunks[row, arriving // CHUNK], head, arriving % CHUNK
        here = group.tables[row, leaving // block_size], head, leaving % block_size
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
