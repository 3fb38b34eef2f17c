"""An attention backend in front of which KV pairs are recalled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvllm.attention.base import AttentionBackend, AttentionBatch, Plan
from kvllm.compression.mass import Softmax
from kvllm.compression.recall import Exchanges, exchange, upper_scores
from kvllm.config import CompressionConfig
from kvllm.kvcache.ops.base import KVOperations
from kvllm.kvcache.tiers.chunks import CHUNK, HeldPairs
from kvllm.kvcache.tiers.dropped_pairs import DroppedPairs, read_pairs, write_pairs


@dataclass(slots=True)
class CompressedSequence:
    """Where the KV pairs of a compressed sequence are.

    positions: int32 `[layers, kv_heads, n]`, of its first n residents. No gaps follow them.
    movable: bool `[n]`, those in compressed windows, which may change places.
    held: those that it has dropped.
    is_ordered: whether the positions ascend.
    """

    positions: torch.Tensor
    movable: torch.Tensor
    held: HeldPairs = field(default_factory=HeldPairs)
    is_ordered: bool = True


@dataclass
class RecallGroup:
    """R sequences of a step with T query tokens each.

    rows: int64 `[R, T]`, their query tokens in the batch. last_kv_index: int32 `[R, T]`, as in AttentionBatch.
    tables: int32 `[R, blocks]`. movable: bool `[R, pairs of these blocks]`.
    chunks: int32 `[R, C]`, of which those up to `last_dropped`, int32 `[R, T]`, are the sequence's.
    masses: of each layer, the bounds `[R]` after its exchanges. exchanged_bytes: that these have moved, both ways.
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
    exchanged_bytes: int = 0

    def bounds(self) -> Iterator[tuple[int, float]]:
        """Of each sequence, the largest bound of all layers, heads and query tokens."""
        return zip(self.seq_ids, torch.stack(self.masses).amax(0).tolist(), strict=True)


class RecallingBackend(AttentionBackend[Plan]):
    """A backend, and the exchanges of a step's groups in front of each layer's attention."""

    name = "recalling"

    def __init__(
        self,
        backend: AttentionBackend[Plan],
        groups: list[RecallGroup],
        operations: KVOperations,
        dropped: DroppedPairs,
        config: CompressionConfig,
    ) -> None:
        super().__init__(backend.cache, backend.num_query_heads, backend.scale, backend.layers)
        self.backend = backend
        self.groups = groups
        self.operations = operations
        self.dropped = dropped
        self.config = config
        self.adds_scores = backend.adds_scores

    def plan(self, batch: AttentionBatch) -> Plan:
        return self.backend.plan(batch)

    def run(self, layer: int, queries: torch.Tensor, plan: Plan, sinks: torch.Tensor | None = None) -> torch.Tensor:
        softmax = Softmax(self.scale, self.layers[layer].soft_cap, sinks)
        for group in self.groups:
            self._recall(layer, queries[group.rows], group, softmax)
        return self.backend.run(layer, queries, plan, sinks)

    def _recall(self, layer: int, queries: torch.Tensor, group: RecallGroup, softmax: Softmax) -> None:
        """queries: `[R, T, query_heads, head_dim]`."""
        resident, dropped, upper = self._scores(layer, queries, group, softmax)
        most = self.config.recall_chunks * CHUNK
        found = exchange(resident, dropped, upper, group.movable, most, self.config.recall_bound, softmax.sinks)
        if len(found.row):
            self._move(layer, group, found)
        group.masses.append(found.bounds.amax(-1))

    def _scores(
        self, layer: int, queries: torch.Tensor, group: RecallGroup, softmax: Softmax
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of residents, of dropped pairs, and bounds on what the scores of these were before they were stored."""
        scale, dropped = softmax.scale_of(queries.shape[-1]), self.dropped
        resident = self.operations.key_scores(layer, queries, group.tables, group.last_kv_index, scale)
        stored = dropped.operations.key_scores(layer, queries, group.chunks, group.last_dropped, scale)
        resident, bounded = _bounded(resident, softmax), _bounded(stored, softmax)
        if dropped.errors is None:
            return resident, bounded, bounded
        errors = dropped.errors[layer][group.chunks].transpose(1, 2).flatten(2)
        of_heads = queries.float().unflatten(2, (errors.shape[1], -1)).transpose(1, 2).flatten(2, 3)
        return resident, bounded, _bounded(upper_scores(stored, of_heads * scale, errors), softmax)

    def _move(self, layer: int, group: RecallGroup, found: Exchanges) -> None:
        dropped, block_size = self.dropped, self.cache.shape.block_size
        row, head, arriving, leaving = found[1:]
        there = group.chunks[row, arriving // CHUNK].long(), head, arriving % CHUNK
        here = group.tables[row, leaving // block_size].long(), head, leaving % block_size
        arrivals, leavers = read_pairs(dropped.cache, layer, there), read_pairs(self.cache, layer, here)
        left = _swap_positions(layer, group.sequences, found, dropped.positions[layer][there])
        write_pairs(self.cache, layer, here, arrivals)
        dropped.store(layer, there, leavers, left)
        group.exchanged_bytes += len(row) * (self.cache.shape.pair_bytes + dropped.cache.shape.pair_bytes)


def _swap_positions(
    layer: int, sequences: Sequence[CompressedSequence], found: Exchanges, positions: torch.Tensor
) -> torch.Tensor:
    """Note the positions of pairs that come back, int32 `[E]`. Returns those of the pairs that make way.

    NumPy, because a few numbers of each sequence take torch several times as long.
    """
    row, head, leaving = (each.numpy() for each in (found.row, found.head, found.leaving))
    arrived = positions.numpy()
    left = np.empty_like(arrived)
    begin = 0
    for end in (*(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)):  # rows ascend
        sequence, part = sequences[row[begin]], slice(begin, end)
        known, places = sequence.positions[layer].numpy(), (head[part], leaving[part])
        left[part] = known[places]
        known[places] = arrived[part]
        sequence.is_ordered = False
        begin = end
    return torch.from_numpy(left)


def _bounded(scores: torch.Tensor, softmax: Softmax) -> torch.Tensor:
    """Scores after the soft cap, under which -inf, where there is no pair, stays what it is."""
    if softmax.soft_cap is None:
        return scores
    return softmax.bounded(scores).masked_fill_(scores == -torch.inf, -torch.inf)
