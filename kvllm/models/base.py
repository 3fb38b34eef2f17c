"""The base of all families: the parts of a decoder layer, the loop over the layers, and a family's description.

A model is put together from parts: an embedding, layers of an attention part and an MLP part, and a head. Every part
has `weights`, the tensors of the checkpoint that it holds, and `allocate`, which makes room for them. A family that
varies one part writes that part and hands it to `build_decoder`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvllm.attention.context import AttentionContext
from kvllm.models.compiled import CompiledLayers
from kvllm.models.config import ConfigKeys, ModelConfig
from kvllm.models.elementwise import add_rms_norm, rms_norm, rotary, silu_mul
from kvllm.models.layers import (
    LMHead,
    MergedColumnLinear,
    QKVLinear,
    RowLinear,
    VocabEmbedding,
    Weight,
    whole,
)
from kvllm.models.rotary import rotary_table
from kvllm.models.weights import Packing
from kvllm.parallel import Shard


def norm_weight(config: ModelConfig, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Room for the weight of an RMSNorm `[size]`. With an offset, 16 bits would lose what lies beside the 1."""
    return torch.empty(
        size, dtype=torch.float32 if config.float32_norms or config.norm_offset else dtype, device=device
    )


class SelfAttention:
    """The work around attention in a layer: the projections, the norms of heads, if any, and the rotation.

    cos_sin: float32 `[max_model_len, head_dim]`, from `rotary_table`; the layers of a model share it.
    sinks: float32 `[query_heads]`, those of this rank: learned scores of the softmax, where a family has them.
    """

    sinks: torch.Tensor | None = None

    def __init__(
        self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device, cos_sin: torch.Tensor
    ) -> None:
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        self.cos_sin = cos_sin
        self.qkv = QKVLinear(config, shard, dtype, device, fused=config.fused_projections)
        self.norm_offset = config.norm_offset
        self.q_norm = norm_weight(config, config.head_dim, dtype, device) if config.qk_norm else None
        self.k_norm = norm_weight(config, config.head_dim, dtype, device) if config.qk_norm else None
        width = config.num_query_heads * config.head_dim
        self.o = RowLinear(width, config.hidden_size, shard, dtype, device, bias=config.output_bias)

    def weights(self, prefix: str) -> dict[str, Weight]:
        found = {**self.qkv.weights(prefix), **self.o.weights(f"{prefix}.o_proj")}
        if self.q_norm is not None and self.k_norm is not None:
            found[f"{prefix}.q_norm.weight"] = whole(self.q_norm, self.norm_offset)
            found[f"{prefix}.k_norm.weight"] = whole(self.k_norm, self.norm_offset)
        return found

    def allocate(self, packing: Packing) -> None:
        self.qkv.allocate(packing)
        self.o.allocate(packing)

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`[T, hidden_size]` -> rotated queries `[T, query_heads, head_dim]`; rotated keys, and values,
        `[T, kv_heads, head_dim]`."""
        qkv = self.qkv.forward(x)
        self._rotate(qkv, positions, self.qkv.num_kv_heads)
        queries, keys, values = qkv.split(self.qkv.sizes, 1)
        heads = (-1, self.head_dim)
        return queries.unflatten(1, heads), keys.unflatten(1, heads), values.unflatten(1, heads)

    def project_queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The queries of `project` alone."""
        queries = self.qkv.forward_queries(x)
        self._rotate(queries, positions, 0)
        return queries.unflatten(1, (-1, self.head_dim))

    def finish(self, attended: torch.Tensor) -> torch.Tensor:
        """Attention's result `[T, query_heads, head_dim]` -> `[T, hidden_size]`."""
        return self.o.forward(attended.flatten(1))

    def _rotate(self, heads: torch.Tensor, positions: torch.Tensor, num_kv_heads: int) -> None:
        rotary(
            heads,
            positions,
            self.cos_sin,
            self.qkv.num_query_heads,
            num_kv_heads,
            self.head_dim,
            self.q_norm,
            self.k_norm,
            self.eps,
        )


class MLP(Protocol):
    """The part of a layer that computes each token by itself.

    name: its name in a checkpoint's layers.
    """

    name: str

    def weights(self, prefix: str) -> dict[str, Weight]:
        """The tensors of the checkpoint by name; each name begins with `prefix`, such as `model.layers.0.mlp`."""
        ...

    def allocate(self, packing: Packing) -> None:
        """Make room for the matrices, before they are written."""
        ...

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, hidden_size]` -> `[T, hidden_size]`, summed over the ranks."""
        ...


class GatedMLP:
    """`down(silu(gate(x)) * up(x))`."""

    name = "mlp"

    def __init__(self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        names, fused = ("gate_proj", "up_proj"), "gate_up_proj" if config.fused_projections else None
        self.gate_up = MergedColumnLinear(hidden, inner, names, shard, dtype, device, bias=bias, fused=fused)
        self.down = RowLinear(inner, hidden, shard, dtype, device, bias=bias)

    def weights(self, prefix: str) -> dict[str, Weight]:
        return {**self.gate_up.weights(prefix), **self.down.weights(f"{prefix}.down_proj")}

    def allocate(self, packing: Packing) -> None:
        self.gate_up.allocate(packing)
        self.down.allocate(packing)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, hidden_size]` -> `[T, hidden_size]`."""
        return self.down.forward(silu_mul(self.gate_up.forward(x)))


class DecoderLayer:
    """One layer: attention, then the MLP, each behind a norm and added to the residual."""

    def __init__(
        self, config: ModelConfig, attention: SelfAttention, mlp: MLP, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.eps = config.rms_norm_eps
        self.norm_offset = config.norm_offset
        self.input_norm = norm_weight(config, config.hidden_size, dtype, device)
        self.attention = attention
        self.post_attention_norm = norm_weight(config, config.hidden_size, dtype, device)
        self.mlp = mlp

    def norms(self) -> dict[str, torch.Tensor]:
        """The weights of the layer's own norms, by name."""
        return {"input_layernorm": self.input_norm, "post_attention_layernorm": self.post_attention_norm}

    def weights(self, prefix: str) -> dict[str, Weight]:
        return {
            **{f"{prefix}.{name}.weight": whole(norm, self.norm_offset) for name, norm in self.norms().items()},
            **self.attention.weights(f"{prefix}.self_attn"),
            **self.mlp.weights(f"{prefix}.{self.mlp.name}"),
        }

    def allocate(self, packing: Packing) -> None:
        self.attention.allocate(packing)
        self.mlp.allocate(packing)

    def finish(self, attended: torch.Tensor, residual: torch.Tensor, next_norm: torch.Tensor) -> torch.Tensor:
        """All that follows attention.

        attended: `[T, query_heads, head_dim]`. residual: `[T, hidden_size]`, updated in place. next_norm:
        `[hidden_size]`, the norm that follows the layer, because a residual addition and a norm are one operation.
        Returns the normalized input of the next layer `[T, hidden_size]`.
        """
        x = add_rms_norm(residual, self.attention.finish(attended), self.post_attention_norm, self.eps)
        return add_rms_norm(residual, self.mlp.forward(x), next_norm, self.eps)


def _compilable(attention: SelfAttention, mlp: GatedMLP) -> bool:
    """Whether the compiled operator computes these parts: packed weights, no bias but that of queries, keys, values."""
    if any(part.bias is not None for part in (attention.o, mlp.gate_up, mlp.down)):
        return False
    weights = [part.weight for part in (attention.qkv, attention.o, mlp.gate_up, mlp.down)]
    return all(weight.packed is not None and not weight.sums and weight.order is None for weight in weights)


Visitor = Callable[[int, torch.Tensor], None]
"""Called with a layer's index and its rotated queries `[T, query_heads, head_dim]`, those of this rank."""


class Decoder:
    """One rank's shard of a model. A loader calls `allocate`, fills what `weights` names, then calls `compile`.

    num_query_heads, num_kv_heads: of this rank.
    """

    def __init__(
        self,
        embedding: VocabEmbedding,
        layers: Sequence[DecoderLayer],
        final_norm: torch.Tensor,
        lm_head: LMHead,
        config: ModelConfig,
    ) -> None:
        self.embedding = embedding
        self.layers = layers
        self.final_norm = final_norm
        self.lm_head = lm_head
        self.eps = config.rms_norm_eps
        self.norm_offset = config.norm_offset
        self.logit_cap = config.logit_cap
        self.num_query_heads = layers[0].attention.qkv.num_query_heads
        self.num_kv_heads = layers[0].attention.qkv.num_kv_heads
        self._next_norms = [layer.input_norm for layer in layers[1:]] + [final_norm]
        self._compiled: CompiledLayers | None = None

    def weights(self) -> dict[str, Weight]:
        """Every tensor of the checkpoint, by name."""
        found = self.embedding.weights("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            found |= layer.weights(f"model.layers.{index}")
        found["model.norm.weight"] = whole(self.final_norm, self.norm_offset)
        return found | self.lm_head.weights("lm_head")

    def allocate(self, packing: Packing) -> None:
        """Make room for all matrices, in the form that is multiplied fastest. Called once, before any is written."""
        if not self.lm_head.tied:
            self.embedding.allocate()
        for layer in self.layers:
            layer.allocate(packing)
        self.lm_head.allocate(packing)

    def compile(self) -> None:
        """Make one operator of the layers, if they have no parts but the common ones, whole and packed. Called once all
        weights are written."""
        layers = [
            (layer, layer.mlp)
            for layer in self.layers
            if type(layer) is DecoderLayer
            and type(layer.attention) is SelfAttention
            and type(layer.mlp) is GatedMLP
            and _compilable(layer.attention, layer.mlp)
        ]
        whole = len(layers) == len(self.layers) and self.lm_head.shard.world_size == 1
        self._compiled = CompiledLayers(layers, self.final_norm, self.eps) if whole else None

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionContext) -> torch.Tensor:
        """Compute tokens and write their keys and values to the cache.

        token_ids, positions: int64 `[T]`; positions below `max_model_len`. attention: for these query tokens.
        Returns the normalized hidden states `[T, hidden_size]`, the input of `logits`.
        """
        if self._compiled and self._compiled.serves(attention):
            return self._compiled.forward(self.embedding.forward(token_ids), positions, attention)
        return self._run_layers(token_ids, positions, attention, None)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[R, hidden_size]` -> float32 `[R, vocab_size]`."""
        logits = self.lm_head.forward(hidden).float()
        return logits if self.logit_cap is None else (logits / self.logit_cap).tanh_().mul_(self.logit_cap)

    def recompute_queries(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionContext,
        visit: Visitor,
    ) -> None:
        """Recover the queries of cached tokens: a forward pass that reads the cache and writes nothing.

        The arguments are those of `forward`; the keys and values of the tokens are in the cache already, so any subset
        of them may be asked for. `visit` gets the queries, layer by layer.

        Kara (paper, C.2) scores a window with these. Tokens whose prefix was compressed since they were computed get
        other queries than back then, from the second layer on.
        """
        self._run_layers(token_ids, positions, attention, visit)

    def _run_layers(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionContext,
        visit: Visitor | None,
    ) -> torch.Tensor:
        """The loop over the layers.

        Without `visit`, keys and values are stored, and the normalized hidden states `[T, hidden_size]` are returned.
        With it, they are in the cache already, and nothing is computed behind the last layer's queries.
        """
        residual = self.embedding.forward(token_ids)
        x = rms_norm(residual, self.layers[0].input_norm, self.eps)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            if visit is None:
                queries, keys, values = layer.attention.project(x, positions)
                attention.store(index, keys, values)
            else:
                queries = layer.attention.project_queries(x, positions)
                visit(index, queries)
                if index == last:
                    break
            x = layer.finish(attention.run(index, queries, layer.attention.sinks), residual, self._next_norms[index])
        return x


def build_decoder(
    config: ModelConfig,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    *,
    make_attention: Callable[..., SelfAttention] = SelfAttention,
    make_mlp: Callable[..., MLP] | None = None,
    make_layer: Callable[..., DecoderLayer] = DecoderLayer,
) -> Decoder:
    """The decoder that all families are, or one with other parts, on one rank.

    dtype, device: of weights and activations. max_model_len: positions that the table of rotations has.
    make_attention: called for each layer with the arguments of SelfAttention.
    make_mlp: called with a layer's index and the arguments of GatedMLP, which is the default.
    make_layer: called for each layer with the arguments of DecoderLayer.
    Raises ConfigError if the ranks cannot share a size out equally.
    """
    embedding = VocabEmbedding(config.vocab_size, config.hidden_size, shard, dtype, device, config.embedding_scale)
    cos_sin = rotary_table(config, max_model_len, device)
    sliding = cos_sin
    if config.sliding_rope is not None:
        sliding = rotary_table(config, max_model_len, device, config.sliding_rope)
    layers = [
        make_layer(
            config,
            make_attention(config, shard, dtype, device, sliding if index in config.sliding_rope_layers else cos_sin),
            make_mlp(index, config, shard, dtype, device) if make_mlp else GatedMLP(config, shard, dtype, device),
            dtype,
            device,
        )
        for index in range(config.num_layers)
    ]
    final_norm = norm_weight(config, config.hidden_size, dtype, device)
    return Decoder(embedding, layers, final_norm, LMHead(embedding, config.tie_word_embeddings, shard), config)


@dataclass(frozen=True)
class Family:
    """One architecture: the meaning of its `config.json`, and how its model is built.

    model_type: the value of that key.
    keys: the keys that it has, with what transformers assumes where one is absent.
    read: from these keys to the fields of ModelConfig that other families leave at their defaults. Raises
        CheckpointError for what the family does not compute.
    build: called with the arguments of `build_decoder`.
    hidden_act: the only value of that key that the family computes.
    """

    model_type: str
    keys: type[ConfigKeys]
    read: Callable[[Any], dict[str, Any]]
    build: Callable[[ModelConfig, Shard, torch.dtype, torch.device, int], Decoder]
    hidden_act: str = "silu"
