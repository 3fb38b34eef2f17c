"""Attention and the KV cache as the layers of a model use them in one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol

import torch

from kvllm.attention.base import AttentionBackend, Plan
from kvllm.kvcache.ops.base import KVOperations
from kvllm.kvcache.recurrent import RecurrentStep
from kvllm.kvcache.residual import ResidualStep
from kvllm.lora.product import AdapterRows


@dataclass(frozen=True, slots=True)
class AttentionContext(Generic[Plan]):
    """One for each step, for all layers.

    plan: of `backend`, for the step's query tokens.
    slot_mapping: int64 `[T]`, the slot of each query token's KV pair, negative where none is stored. None in a pass
        that only reads the cache: it must not call `store`.
    residual: that of the plan's batch. recurrent: of a model with recurrent layers. adapters: of the query tokens; None
        if none has one.
    """

    backend: AttentionBackend[Plan]
    operations: KVOperations
    plan: Plan
    slot_mapping: torch.Tensor | None
    residual: ResidualStep | None = None
    recurrent: RecurrentStep | None = None
    adapters: AdapterRows | None = None

    @property
    def parts(self) -> Sequence[AttentionContext]:
        """As of a PartedAttention whose only part has all layers."""
        return (self,)

    @property
    def part_of(self) -> Sequence[int]:
        """As of a PartedAttention."""
        return [0] * len(self.backend.layers)

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the KV pairs of the step's tokens, `[T, kv_heads, head_dim]` each, to the cache."""
        assert self.slot_mapping is not None
        self.operations.store(layer, keys, values, self.slot_mapping)
        if self.residual:
            self.residual.new_pairs = keys, values

    def run(self, layer: int, queries: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of `queries` `[T, query_heads, head_dim]` over the cache -> the same shape.

        sinks: float32 `[query_heads]`, the learned scores of a layer that has them.
        """
        return self.backend.run(layer, queries, self.plan, sinks)


@dataclass(frozen=True, slots=True)
class PartedAttention:
    """The same for layers in several parts of KV groups, which have block tables of their own.

    parts: one context for each. part_of: the index of each layer's.
    """

    parts: Sequence[AttentionContext]
    part_of: Sequence[int]

    @property
    def recurrent(self) -> RecurrentStep | None:
        """As of an AttentionContext."""
        return self.parts[0].recurrent

    @property
    def adapters(self) -> AdapterRows | None:
        """As of an AttentionContext."""
        return self.parts[0].adapters

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """As AttentionContext.store."""
        self.parts[self.part_of[layer]].store(layer, keys, values)

    def run(self, layer: int, queries: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """As AttentionContext.run."""
        return self.parts[self.part_of[layer]].run(layer, queries, sinks)


class Attention(Protocol):
    """What the layers of a model ask for: an AttentionContext, or what does the same in another way."""

    @property
    def recurrent(self) -> RecurrentStep | None:
        """As of an AttentionContext."""
        ...

    @property
    def adapters(self) -> AdapterRows | None:
        """As of an AttentionContext."""
        ...

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """As AttentionContext.store."""
        ...

    def run(self, layer: int, queries: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """As AttentionContext.run."""
        ...
