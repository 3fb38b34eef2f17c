"""The interface between the engine and an attention implementation.

A step calls `plan` once and `run` once per layer with the plan, so that work which depends only on lengths and tables
is not repeated in every layer. Prefill chunks, decodes and the recomputation of queries are one case: query tokens,
grouped by sequence, each of which attends the cached KV pairs up to an index of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from kvllm.attention.layer import PLAIN, LayerAttention
from kvllm.kvcache.cache import PagedKVCache
from kvllm.kvcache.residual import ResidualStep

Plan = TypeVar("Plan")
"""What a backend prepares once in a step for all layers."""


@dataclass(frozen=True)
class ScoredChunk:
    """Query tokens `begin .. end - 1` of the batch, which belong to sequence `sequence`.

    kv_index: the index of the first one's KV pair. scored_from: that of the first pair that is scored.
    """

    sequence: int
    begin: int
    end: int
    kv_index: int
    scored_from: int


class HostRows(NamedTuple):
    """What the host knows of a batch, int32: the tensors of these names in AttentionBatch.

    They are valid only until the step is launched: the next steps use the memory.
    """

    query_start_loc: np.ndarray
    last_kv_index: np.ndarray


class Recording:
    """The identity of a batch that a graph holds, by which a backend that `plans_on_host` knows its plan. It lives as
    long as the graph. part: of the KV groups, one of those that a graph has."""

    def __init__(self, part: int = 0) -> None:
        self.part = part


@dataclass(frozen=True)
class AttentionBatch:
    """The query tokens of one step. All tensors but `mass` are int32; all are on the cache's device.

    query_start_loc: `[S + 1]`, query tokens of sequence s are `query_start_loc[s] : query_start_loc[s + 1]`, each
        sequence has at least one; with a backend that `captures_chunks`, the last ones may have none.
    last_kv_index: `[T]`, the index in its sequence's cache of the newest KV pair that a query token attends (its own):
        token i attends pairs `0 .. last_kv_index[i]`. Ascending within a sequence. It is an index into the cache, not a
        position: after a compaction the two differ.
    block_tables: `[S, max_blocks]`, KV pair j of sequence s is in block `block_tables[s, j // block_size]`; columns
        beyond what `last_kv_index` reaches are arbitrary. For a layer with a window, those before what the sequence's
        first query token attends may name any block of the cache: nothing that they hold counts.
    packed_len, head_lengths: `[S]` and `[layers, S, kv_heads]`, where heads hold different numbers of KV pairs: index e
        is evicted for head h of layer l of sequence s, not attended, if `head_lengths[l, s, h] <= e < packed_len[s]`.
        The pairs of the query tokens follow.
    table_slots: `[S]`, the sequences' slots in the worker's tables, where attention is observed. Padding
        shares one that belongs to no sequence.
    mass: float32 `[layers, table slots, kv_heads, pairs]`, what a backend that `adds_mass` adds the attention
        probabilities of all query tokens to, summed over the query heads of a KV head. Not beside `packed_len`.
    scored_from: `[S]`, the index of the first KV pair of a sequence that is scored; beyond its query tokens if none is.
        The softmax of a query token goes over these pairs, from the first to its own, and each of them adds the square
        of its probability to its score in `cache.scores`; those of the query heads of a KV head add up. A pair's own
        query token comes first, and sets the score. None: nothing is scored in this pass. Not beside `packed_len`.
    scored_chunks: sequences that a backend which `adds_scores` leaves to others: those with several query tokens.
    residual: the last KV pairs of the sequences before they were rounded, which are attended in place of those in the
        cache: by a query token its own and those right before it. `run` adds the pairs of the step's tokens. For the
        backends that the registry says read it, and at most as many as a layer's window has.
    on_host: the same rows in the host's memory, so that a backend that plans there need not wait for the device.
    recording: of a batch whose tensors a graph reads in each of its replays.
    """

    query_start_loc: torch.Tensor
    last_kv_index: torch.Tensor
    block_tables: torch.Tensor
    packed_len: torch.Tensor | None = None
    head_lengths: torch.Tensor | None = None
    table_slots: torch.Tensor | None = None
    mass: torch.Tensor | None = None
    scored_from: torch.Tensor | None = None
    scored_chunks: tuple[ScoredChunk, ...] = ()
    residual: ResidualStep | None = None
    on_host: HostRows | None = None
    recording: Recording | None = None

    @property
    def of_window(self) -> AttentionBatch:
        """The batch for layers with a window: none of their KV pairs was evicted, and none is scored."""
        return AttentionBatch(
            self.query_start_loc, self.last_kv_index, self.block_tables, residual=self.residual, on_host=self.on_host
        )


class AttentionBackend(ABC, Generic[Plan]):
    """Attention over one `PagedKVCache`. KV pairs are moved by `kvllm.kvcache.ops`, whatever the backend.

    layers: the options of each layer; none given: all are PLAIN. Layers with a window add up no scores and no
        `mass`: their KV pairs are never compressed.
    capturable: a CUDA graph may hold `plan` and `run` for sequences of one query token each. They read nothing back to
        the host, and what they launch depends on the shapes of a batch alone, not on what its tensors hold.
    captures_chunks: the same for sequences of any number of query tokens.
    plans_on_host: a graph holds `run` alone, and `before_replay` plans the step that it is about to compute.
    adds_mass: `run` adds to `AttentionBatch.mass`.
    adds_scores: `run` adds to `cache.scores` as `AttentionBatch.scored_from` says, for sequences with one query token.
    """

    name: str
    capturable: bool = False
    captures_chunks: bool = False
    plans_on_host: bool = False
    adds_mass: bool = False
    adds_scores: bool = False

    def __init__(
        self, cache: PagedKVCache, num_query_heads: int, scale: float, layers: Sequence[LayerAttention] = ()
    ) -> None:
        self.cache = cache
        self.keys = [cache.keys(layer) for layer in range(cache.shape.num_layers)]
        self.values = [cache.values(layer) for layer in range(cache.shape.num_layers)]
        self.num_query_heads = num_query_heads
        self.scale = scale
        self.layers = tuple(layers) or (PLAIN,) * cache.shape.num_layers

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> Plan:
        """Prepare the work that all layers share. The result is passed to `run` unchanged."""

    def before_replay(self, batch: AttentionBatch) -> None:
        """Plan a batch of a graph again: its tensors and `on_host` are those of another step than at the last time.

        For a backend that `plans_on_host`. The first `plan` of such a batch comes ahead of the capture, and those in it
        return the same plan.
        """
        raise NotImplementedError

    @abstractmethod
    def run(self, layer: int, queries: torch.Tensor, plan: Plan, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Causal attention of `queries` `[T, query_heads, head_dim]` over the paged cache -> the same shape.

        sinks: float32 `[query_heads]`, the learned scores of a layer that has them.
        Query head h reads KV head `h // (query_heads // kv_heads)`. Softmax and accumulation in float32. The output
        of a query token depends on it and its sequence's cache alone, bit for bit, whatever else is in the batch.
        """
