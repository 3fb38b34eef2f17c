"""The layers of a decoder as compiled operators, for a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch

from kvllm._extension import operator
from kvllm.attention.context import Attention, AttentionContext
from kvllm.attention.cpu import CpuBackend, window_arguments

if TYPE_CHECKING:
    from kvllm.models.parts import DecoderLayer, GatedMLP


class CompiledLayers:
    """The loop over the layers without Python: the same kernels in the same order, so the same bits.

    layers: packed, each with its MLP.
    """

    def __init__(self, layers: Sequence[tuple[DecoderLayer, GatedMLP]], final_norm: torch.Tensor, eps: float) -> None:
        first = layers[0][0].attention
        self._num_layers = len(layers)
        self._run = operator("run_decoder")
        self._queries = operator("decoder_queries")
        self._decoder = operator("make_decoder")(
            first.cos_sin, final_norm, first.qkv.num_query_heads, first.qkv.num_kv_heads, first.head_dim, eps
        )
        for layer, mlp in layers:
            self._add(layer, mlp)

    def _add(self, layer: DecoderLayer, mlp: GatedMLP) -> None:
        attention = layer.attention
        operator("add_decoder_layer")(
            self._decoder,
            layer.input_norm,
            attention.qkv.weight.packed,
            attention.qkv.weight.scales,
            attention.qkv.bias,
            attention.q_norm,
            attention.k_norm,
            attention.o.weight.packed,
            attention.o.weight.scales,
            layer.post_attention_norm,
            mlp.gate_up.weight.packed,
            mlp.gate_up.weight.scales,
            mlp.down.weight.packed,
            mlp.down.weight.scales,
            mlp.down.weight.in_features,
        )

    def forward(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionContext,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `Decoder.forward`, of embedded tokens `[T, hidden_size]`, which are overwritten."""
        batch, backend = attention.plan, attention.backend
        assert isinstance(backend, CpuBackend)  # as `serves` has said
        scores = None if batch.window_start is None else backend.cache.scores
        held = batch.residual
        return self._run(
            self._decoder,
            residual,
            positions,
            attention.slot_mapping,
            backend.all_keys,
            backend.all_values,
            batch.query_start_loc,
            batch.last_kv_index,
            batch.block_tables,
            batch.packed_len,
            batch.head_lengths,
            scores,
            batch.window_start,
            *window_arguments(batch.windows),
            backend.scale,
            backend.sliding_windows,
            *((held.pairs, held.slots, held.first) if held else (None, None, None)),
            wanted,
        )

    def recompute_queries(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionContext,
        visit: Callable[[int, torch.Tensor], None],
    ) -> None:
        """As `Decoder.recompute_queries`, of embedded tokens `[T, hidden_size]`, which are overwritten."""
        batch, backend = attention.plan, attention.backend
        assert isinstance(backend, CpuBackend)  # as `serves` has said
        queries = None
        for layer in range(self._num_layers):
            queries = self._queries(
                self._decoder,
                layer,
                residual,
                queries,
                positions,
                backend.all_keys,
                backend.all_values,
                batch.query_start_loc,
                batch.last_kv_index,
                batch.block_tables,
                batch.packed_len,
                batch.head_lengths,
                backend.scale,
                backend.sliding_windows,
            )
            visit(layer, queries)

    @staticmethod
    def serves(attention: Attention) -> TypeGuard[AttentionContext]:
        """Whether the operators compute the attention of a pass: it is the CPU's own, all layers share a block table,
        nobody observes it, and no layer has options but a window."""
        if not isinstance(attention, AttentionContext) or type(attention.backend) is not CpuBackend:
            return False
        return all(options.soft_cap is None and not options.sinks for options in attention.backend.layers)
