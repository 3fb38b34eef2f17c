"""The layers of a decoder as compiled operators, for a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from kvllm._extension import operator
from kvllm.attention.base import AttentionBatch
from kvllm.attention.context import Attention, AttentionContext, PartedAttention
from kvllm.attention.cpu import CpuBackend
from kvllm.lora.product import AdapterRows, LowRank, PackedAdapters
from kvllm.models.weights import LinearWeight

if TYPE_CHECKING:
    from kvllm.models.parts import DecoderLayer, GatedMLP, SelfAttention

CompiledAttention = AttentionContext | PartedAttention
NOTHING = LowRank(torch.empty(0), torch.empty(0))
"""What an adapter adds to a matrix that it does not change."""


class CompiledLayers:
    """The loop over the layers without Python: the same kernels in the same order, so the same bits.

    layers: packed, each with its parts.
    """

    def __init__(
        self, layers: Sequence[tuple[DecoderLayer, SelfAttention, GatedMLP]], final_norm: torch.Tensor, eps: float
    ) -> None:
        _, first, mlp = layers[0]
        self._num_layers = len(layers)
        self._matrices = [
            matrix.weight
            for _, attention, mlp in layers
            for matrix in (attention.qkv, attention.o, mlp.gate_up, mlp.down)
        ]
        self._run = operator("run_decoder")
        self._queries = operator("decoder_queries")
        self._decoder = operator("make_decoder")(
            final_norm,
            first.qkv.num_query_heads,
            first.qkv.num_kv_heads,
            first.head_dim,
            eps,
            first.qkv.weight.tensor.dtype == torch.float32,
            mlp.gelu,
        )
        for each in layers:
            self._add(*each)

    def _add(self, layer: DecoderLayer, attention: SelfAttention, mlp: GatedMLP) -> None:
        operator("add_decoder_layer")(
            self._decoder,
            attention.cos_sin,
            layer.input_norm,
            attention.qkv.weight.packed,
            attention.qkv.weight.scales,
            attention.qkv.bias,
            attention.q_norm,
            attention.k_norm,
            attention.o.weight.packed,
            attention.o.weight.scales,
            layer.attention_output_norm,
            layer.post_attention_norm,
            mlp.gate_up.weight.packed,
            mlp.gate_up.weight.scales,
            mlp.down.weight.packed,
            mlp.down.weight.scales,
            layer.mlp_output_norm,
            mlp.down.weight.in_features,
        )

    def forward(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        attention: CompiledAttention,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `Decoder.forward`, of embedded tokens `[T, hidden_size]`, which are overwritten."""
        tables = _Tables(attention)
        backend, held = tables.backend, tables.batches[0].residual
        scored_from = [batch.scored_from for batch in tables.batches if batch.scored_from is not None]
        return self._run(
            self._decoder,
            residual,
            positions,
            [part.slot_mapping for part in tables.parts],
            *tables.arguments(),
            backend.cache.scores if scored_from else None,
            scored_from,
            backend.scale,
            *((held.pairs, held.slots, held.first) if held else (None, None, None)),
            wanted,
            *self._adapters(attention.adapters),
        )

    def _adapters(self, tokens: AdapterRows | None) -> tuple[Any, ...]:
        """The tokens of each adapter of a pass, and what it adds to each matrix, as the operator takes them."""
        if not tokens or not tokens.adapters:
            return None, None, [], []
        pairs = [_added(matrix, number) for matrix in self._matrices for number in tokens.adapters]
        return *tokens.grouped(tokens.adapters), [each.down for each in pairs], [each.up for each in pairs]

    def recompute_queries(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        attention: CompiledAttention,
        visit: Callable[[int, torch.Tensor], None],
    ) -> None:
        """As `Decoder.recompute_queries`, of embedded tokens `[T, hidden_size]`, which are overwritten."""
        tables = _Tables(attention)
        arguments, queries = tables.arguments(), None
        for layer in range(self._num_layers):
            queries = self._queries(
                self._decoder, layer, residual, queries, positions, *arguments, tables.backend.scale
            )
            visit(layer, queries)

    @staticmethod
    def serves(attention: Attention) -> TypeGuard[CompiledAttention]:
        """Whether the operators compute a pass: its attention is the CPU's own, nobody observes it, and no layer has
        options but a window."""
        if not isinstance(attention, AttentionContext | PartedAttention):
            return False
        backend = attention.parts[0].backend
        if type(backend) is not CpuBackend:
            return False
        return all(options.soft_cap is None and not options.sinks for options in backend.layers)


def _added(matrix: LinearWeight, adapter: int) -> LowRank:
    """What an adapter adds to a matrix."""
    if matrix.adapters is None:
        return NOTHING
    assert isinstance(matrix.adapters, PackedAdapters)  # as the matrix is packed
    return matrix.adapters.adapters.get(adapter, NOTHING)


class _Tables:
    """What the layers read of an attention, which the operators serve."""

    def __init__(self, attention: CompiledAttention) -> None:
        self.parts = attention.parts
        self.part_of = attention.part_of
        self.batches: list[AttentionBatch] = [part.plan for part in self.parts]
        backend = self.parts[0].backend
        assert isinstance(backend, CpuBackend)  # as `serves` has said
        self.backend = backend

    def arguments(self) -> tuple[Any, ...]:
        """Keys, values, tables, the lengths of heads and what layers read of these, as the operators take them."""
        first, backend = self.batches[0], self.backend
        return (
            backend.all_keys,
            backend.all_values,
            first.query_start_loc,
            [batch.last_kv_index for batch in self.batches],
            [batch.block_tables for batch in self.batches],
            first.packed_len,
            first.head_lengths,
            self.part_of,
            backend.places,
            backend.sliding_windows,
        )
