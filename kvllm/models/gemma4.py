"""Gemma 4, text: Gemma 3 with larger heads in full layers, KV pairs that several layers attend, and
inputs of every layer.

The cache has heads of one size. `PackedAttention` packs small heads beside each other, or pads them with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from msgspec import structs

from kvllm.attention.context import Attention
from kvllm.errors import CheckpointError
from kvllm.models.base import Decoder, Family
from kvllm.models.config import ConfigKeys, ModelConfig, check_size, refuse
from kvllm.models.elementwise import add_rms_norm, rms_norm
from kvllm.models.gemma2 import GELU, GemmaLayer
from kvllm.models.gemma4_experts import Gemma4Experts
from kvllm.models.layers import LMHead, QKVLinear, VocabEmbedding, Weight, whole
from kvllm.models.mixture import Experts, make_experts
from kvllm.models.parts import MLP, GatedMLP, SelfAttention, TokenMixer, norm_weight, normalized
from kvllm.models.rope import FULL, SLIDING, TopKeys, read_rope
from kvllm.models.rotary import rotary_table
from kvllm.models.two_sizes import HeadSizes, TwoSizes
from kvllm.models.weights import LinearWeight, MatrixRows, Packing
from kvllm.models.windows import sliding_layers
from kvllm.parallel import Shard, kv_heads

FULL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}


class FullRopeKeys(TopKeys, kw_only=True):
    PARTIAL = True


class Gemma4Keys(ConfigKeys, kw_only=True):
    SCALED = True

    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    max_position_embeddings: int = 131072
    tie_word_embeddings: bool = True
    attention_bias: bool | None = None
    hidden_activation: str | None = GELU
    sliding_window: int | None = 512
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | str | None = None
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    enable_moe_block: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None
    hidden_size_per_layer_input: int = 256
    vocab_size_per_layer_input: int = 262144

    def __post_init__(self) -> None:
        """transformers writes the sizes of full layers as those of single ones."""
        given = self.per_layer_config
        if not isinstance(given, dict):
            return
        full = {str(i) for i, slides in enumerate(self.slides()) if not slides}
        last = given.get(str(self.num_hidden_layers - 1))
        known = {"head_dim", "num_key_value_heads"} if self.attention_k_eq_v else {"head_dim"}
        if set(given) != full or not isinstance(last, dict) or not set(last) <= known:
            return
        if all(each == last for each in given.values()) and all(type(size) is int for size in last.values()):
            self.per_layer_config = None
            self.global_head_dim = last.get("head_dim", self.head_dim)
            self.num_global_key_value_heads = last.get("num_key_value_heads")

    def slides(self) -> list[bool]:
        """Of each layer, whether it has a window. The last one has none, whatever the config says."""
        if self.layer_types is None:
            kinds = [(i + 1) % 6 != 0 for i in range(min(self.num_hidden_layers, 1 << 10))]
        else:
            kinds = [kind == SLIDING for kind in self.layer_types]
        return [*kinds[:-1], False]

    def rope_keys(self) -> TopKeys:
        return self._rope_keys(FULL, FULL_ROPE)

    def sliding_rope_keys(self) -> TopKeys:
        """The keys of the RoPE of layers with a window."""
        return self._rope_keys(SLIDING, {})

    def _rope_keys(self, kind: str, default: dict[str, Any]) -> TopKeys:
        given = self.rope_of_layers(kind)
        rope = default if given is None else given
        return FullRopeKeys(max_position_embeddings=self.max_position_embeddings, rope_parameters=rope)


def read(keys: Gemma4Keys) -> dict[str, Any]:
    _refuse_others(keys)
    sizes = _two_sizes(keys)
    cached, own = sizes.cached, len(set(sizes.sources))
    slides = sizes.slides[:own]
    return {
        "num_layers": own,
        "num_kv_heads": cached.kv_heads,
        "head_dim": cached.head_dim,
        "two_sizes": sizes,
        "experts": _experts(keys) if keys.enable_moe_block else None,
        "rope": read_rope(keys.rope_keys(), cached.head_dim),
        "second_rope": read_rope(keys.sliding_rope_keys(), sizes.sliding.head_dim),
        "second_rope_layers": tuple(i for i in range(own) if slides[i]),
        "layers": sliding_layers(keys, keys.sliding_window, slides),
        "softmax_scale": 1.0,
        "qk_norm": True,
        "float32_norms": True,
        "embedding_scale": keys.hidden_size**0.5,
        "logit_cap": keys.final_logit_softcapping,
    }


def _refuse_others(keys: Gemma4Keys) -> None:
    if keys.attention_bias:
        refuse("attention_bias is true: projections to heads have a bias")
    if keys.hidden_activation not in (None, GELU):
        refuse(f"hidden_activation is {keys.hidden_activation!r} instead of {GELU!r}")
    if keys.use_bidirectional_attention not in (None, False, "vision"):
        refuse("use_bidirectional_attention is given: tokens attend to those after them, too")
    if keys.final_logit_softcapping is not None and keys.final_logit_softcapping <= 0:
        raise CheckpointError(
            f"final_logit_softcapping is {keys.final_logit_softcapping}, but must be positive, or null"
        )
    if keys.sliding_window is None:
        refuse("sliding_window is null")


def _experts(keys: Gemma4Keys) -> Experts:
    sizes = keys.num_experts or 0, keys.top_k_experts or 0, keys.moe_intermediate_size or 0
    return make_experts(*sizes, shared_intermediate_size=keys.intermediate_size)


def _two_sizes(keys: Gemma4Keys) -> TwoSizes:
    assert keys.head_dim and keys.num_key_value_heads
    check_size("head_dim", keys.global_head_dim)
    full_heads = keys.num_global_key_value_heads if keys.attention_k_eq_v else None
    full = HeadSizes(kv_heads=full_heads or keys.num_key_value_heads, head_dim=keys.global_head_dim)
    sliding = HeadSizes(kv_heads=keys.num_key_value_heads, head_dim=keys.head_dim)
    sizes = TwoSizes(
        full=full,
        sliding=sliding,
        slides=tuple(keys.slides()),
        sources=_sources(keys),
        keys_are_values=keys.attention_k_eq_v,
        wide=keys.use_double_wide_mlp,
        input_size=keys.hidden_size_per_layer_input,
        input_vocab_size=keys.vocab_size_per_layer_input,
    )
    heads = sizes.cached.kv_heads
    if (
        full.head_dim % sliding.head_dim
        or full.kv_heads < 1
        or heads % full.kv_heads
        or keys.num_attention_heads % heads
    ):
        raise CheckpointError(
            f"layers have {sliding.kv_heads} KV heads of {sliding.head_dim} numbers, and {full.kv_heads} of "
            f"{full.head_dim}: neither size is a multiple of the other"
        )
    if not 0 <= sizes.input_size <= 1 << 14 or (sizes.input_size and not 1 <= sizes.input_vocab_size <= 1 << 22):
        raise CheckpointError(f"layers have inputs of {sizes.input_size} numbers for {sizes.input_vocab_size} tokens")
    return sizes


def _sources(keys: Gemma4Keys) -> tuple[int, ...]:
    slides, own = keys.slides(), keys.num_hidden_layers - keys.num_kv_shared_layers
    if not 1 <= own <= keys.num_hidden_layers:
        raise CheckpointError(f"num_kv_shared_layers is {keys.num_kv_shared_layers} of {keys.num_hidden_layers} layers")
    last = {kind: i for i, kind in enumerate(slides[:own])}
    if set(last) != set(slides):
        raise CheckpointError(
            f"num_kv_shared_layers is {keys.num_kv_shared_layers}, but those before have not all kinds of layer_types"
        )
    return (*range(own), *(last[kind] for kind in slides[own:]))


class SomeOfQKVLinear(QKVLinear):
    """The projections to queries, and to keys and values where a layer has them. names: of those that it has."""

    def __init__(self, names: str, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, shard, dtype, device)
        self.heads = {name: self.heads[name] for name in names}
        self.sizes = self.sizes[: len(names)]
        self.weight = LinearWeight(sum(self.sizes), config.hidden_size, dtype, device)


class PackedAttention(SelfAttention):
    """Attention of heads that are smaller than those of the cache, or fewer.

    A head of the cache holds one after the other as many of a layer's heads as there are for each, then zeros; where
    there are less, several heads of the cache hold the same. A query is zero where the other heads lie.

    cached: KV heads of this rank, and their size, in the cache. owns: the layer has KV pairs. keys_are_values: it has
    no projection to values.
    """

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
        cos_sin: torch.Tensor,
        *,
        cached: HeadSizes,
        owns: bool,
        keys_are_values: bool,
    ) -> None:
        super().__init__(config, shard, dtype, device, cos_sin)
        names = ("qk" if keys_are_values else "qkv") if owns else "q"
        self.qkv = SomeOfQKVLinear(names, config, shard, dtype, device)
        self.owns, self.cached = owns, cached
        self.packed = max(1, self.num_kv_heads // cached.kv_heads)
        self.copies = max(1, cached.kv_heads // self.num_kv_heads)
        self.ones = torch.ones(config.head_dim, dtype=dtype, device=device)

    def weights(self, prefix: str) -> dict[str, Weight]:
        found = super().weights(prefix)
        return found if self.owns else {name: each for name, each in found.items() if ".k_norm." not in name}

    def attend(self, x: torch.Tensor, positions: torch.Tensor, attention: Attention, index: int) -> torch.Tensor:
        """`[T, query_heads, head_dim of the cache]`. index: of the layer whose KV pairs are attended."""
        if not self.owns:
            return attention.run(index, self.project_queries(x, positions))
        queries, keys, values = self.project(x, positions)
        attention.store(index, keys, values)
        return attention.run(index, queries)

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As they lie in the cache."""
        qkv, size, heads = self.qkv.forward(x), self.qkv.sizes[1], (-1, self.head_dim)
        values = rms_norm(qkv[:, -size:].reshape(heads).contiguous(), self.ones, self.eps).view(len(x), *heads)
        self._rotate(qkv, positions, self.num_kv_heads)
        queries, keys = qkv.split(self.qkv.sizes, 1)[:2]
        return (
            self._place_queries(queries.unflatten(1, heads)),
            self._place(keys.unflatten(1, heads)),
            self._place(values),
        )

    def project_queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._place_queries(super().project_queries(x, positions))

    def finish(self, attended: torch.Tensor) -> torch.Tensor:
        if self.packed == 1:
            return super().finish(attended[..., : self.head_dim])
        found = self._packs(attended)
        return super().finish(torch.stack([found[:, :, i, :, i] for i in range(self.packed)], 2).flatten(1, 3))

    def _place(self, pairs: torch.Tensor) -> torch.Tensor:
        """`[T, kv_heads, head_dim]` -> the same of the cache."""
        if self.packed > 1:
            pairs = pairs.reshape(len(pairs), self.cached.kv_heads, -1)
        elif self.copies > 1:
            pairs = pairs.repeat_interleave(self.copies, 1)
        return F.pad(pairs, (0, self.cached.head_dim - pairs.shape[2]))

    def _place_queries(self, queries: torch.Tensor) -> torch.Tensor:
        """`[T, query_heads, head_dim]` -> the same of the cache."""
        if self.packed == 1:
            return F.pad(queries, (0, self.cached.head_dim - self.head_dim))
        placed = queries.new_zeros(*queries.shape[:2], self.cached.head_dim)
        own = queries.unflatten(1, (self.cached.kv_heads, self.packed, -1))
        for i in range(self.packed):
            self._packs(placed)[:, :, i, :, i] = own[:, :, i]
        return placed

    def _packs(self, heads: torch.Tensor) -> torch.Tensor:
        """`[T, query_heads, head_dim of the cache]` -> a view `[T, heads of the cache, heads in one, query heads of
        each, heads in one, head_dim]`."""
        parts = heads.unflatten(1, (self.cached.kv_heads, self.packed, -1))
        return parts[..., : self.packed * self.head_dim].unflatten(-1, (self.packed, self.head_dim))


class LayerInputs:
    """What each layer gets of each token beside the residual, made of a second embedding and the first.

    Filled for a pass by `read`; then `of` has the part of a layer.
    """

    def __init__(self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device) -> None:
        sizes = config.two_sizes
        assert sizes is not None
        self.size, self.eps = sizes.input_size, config.rms_norm_eps
        width = len(sizes.slides) * sizes.input_size
        scale = sizes.input_size**0.5
        self.embedding = VocabEmbedding(sizes.input_vocab_size, width, shard, dtype, device, scale)
        self.projection = LinearWeight(width, config.hidden_size, dtype, device)
        self.norm = norm_weight(config, sizes.input_size, dtype, device)
        self.scale = config.hidden_size**-0.5
        self.values = torch.empty(0)

    def weights(self) -> dict[str, Weight]:
        return {
            **self.embedding.weights("model.embed_tokens_per_layer"),
            "model.per_layer_model_projection.weight": _whole_rows(self.projection),
            "model.per_layer_projection_norm.weight": whole(self.norm),
        }

    def allocate(self, packing: Packing) -> None:
        self.embedding.allocate(packing)
        self.projection.allocate(packing)

    def read(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> None:
        """int64 `[T]`, and their embeddings `[T, hidden_size]`."""
        projected = (self.projection.multiply(embedded) * self.scale).view(-1, self.size)
        projected = rms_norm(projected, self.norm, self.eps).view(len(embedded), -1)
        self.values = (projected + self.embedding.forward(token_ids)) * 0.5**0.5

    def of(self, layer: int) -> torch.Tensor:
        """`[T, size]`."""
        return self.values[:, layer * self.size : (layer + 1) * self.size]


class LayerInputGate:
    """`norm(project(gelu(gate(x)) * input))`, of the residual x and the layer's own input."""

    def __init__(self, config: ModelConfig, inputs: LayerInputs, dtype: torch.dtype, device: torch.device) -> None:
        self.inputs, self.eps = inputs, config.rms_norm_eps
        self.gate = LinearWeight(inputs.size, config.hidden_size, dtype, device)
        self.projection = LinearWeight(config.hidden_size, inputs.size, dtype, device)
        self.norm = norm_weight(config, config.hidden_size, dtype, device)

    def weights(self, prefix: str) -> dict[str, Weight]:
        return {
            f"{prefix}.per_layer_input_gate.weight": _whole_rows(self.gate),
            f"{prefix}.per_layer_projection.weight": _whole_rows(self.projection),
            f"{prefix}.post_per_layer_input_norm.weight": whole(self.norm),
        }

    def allocate(self, packing: Packing) -> None:
        self.gate.allocate(packing)
        self.projection.allocate(packing)

    def forward(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """`[T, hidden_size]` -> `[T, hidden_size]`."""
        gated = F.gelu(self.gate.multiply(x), approximate="tanh") * self.inputs.of(layer)
        return rms_norm(self.projection.multiply(gated), self.norm, self.eps)


class Gemma4Layer(GemmaLayer):
    """A layer whose result is multiplied by a learned number, after an input of its own, if there is one. It may have
    experts beside the MLP."""

    def __init__(
        self,
        number: int,
        inputs: LayerInputs | None,
        config: ModelConfig,
        shard: Shard,
        attention: TokenMixer,
        mlp: MLP,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(config, attention, mlp, dtype, device)
        self.number = number
        self.scalar = torch.empty(1, dtype=dtype, device=device)
        self.input_gate = LayerInputGate(config, inputs, dtype, device) if inputs else None
        self.experts = Gemma4Experts(config, shard, dtype, device) if config.experts else None

    def weights(self, prefix: str) -> dict[str, Weight]:
        found = {**super().weights(prefix), f"{prefix}.layer_scalar": whole(self.scalar)}
        for part in (self.experts, self.input_gate):
            found |= part.weights(prefix) if part else {}
        return found

    def allocate(self, packing: Packing) -> None:
        super().allocate(packing)
        for part in (self.experts, self.input_gate):
            if part:
                part.allocate(packing)

    def finish(self, attended: torch.Tensor, residual: torch.Tensor, next_norm: torch.Tensor | None) -> torch.Tensor:
        x = normalized(self.attention.finish(attended), self.attention_output_norm, self.eps)
        x = add_rms_norm(residual, x, self.post_attention_norm, self.eps)
        added = self.mlp.forward(x)
        added = self.experts.beside(added, residual) if self.experts else added
        residual.add_(normalized(added, self.mlp_output_norm, self.eps))
        if self.input_gate:
            residual.add_(self.input_gate.forward(residual, self.number))
        residual.mul_(self.scalar)
        assert next_norm is not None
        return rms_norm(residual, next_norm, self.eps)


class Gemma4Decoder(Decoder):
    """A decoder some of whose layers attend KV pairs of others, and get inputs of their own."""

    inputs: LayerInputs | None = None

    def share(self, config: ModelConfig, cached: HeadSizes, inputs: LayerInputs | None) -> None:
        """Called once, first. cached: KV heads of this rank in the cache."""
        assert config.two_sizes is not None
        self.inputs = inputs
        self.num_kv_heads = cached.kv_heads
        self.attentions = self.attentions[: config.num_layers]
        self._places = list(config.two_sizes.sources)

    def weights(self) -> dict[str, Weight]:
        return {**super().weights(), **(self.inputs.weights() if self.inputs else {})}

    def allocate(self, packing: Packing) -> None:
        super().allocate(packing)
        if self.inputs:
            self.inputs.allocate(packing)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        embedded = super().embed(token_ids)
        if self.inputs:
            self.inputs.read(token_ids, embedded)
        return embedded

    def narrow(self, wanted: torch.Tensor) -> None:
        super().narrow(wanted)
        if self.inputs:
            self.inputs.values = self.inputs.values[wanted]


def build(
    config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> Gemma4Decoder:
    """As `build_decoder`."""
    sizes = config.two_sizes
    assert sizes is not None and config.second_rope is not None
    embedding = VocabEmbedding(config.vocab_size, config.hidden_size, shard, dtype, device, config.embedding_scale)
    of_kind = {
        slides: structs.replace(config, num_kv_heads=heads.kv_heads, head_dim=heads.head_dim, rope=rope)
        for slides, heads, rope in ((False, sizes.full, config.rope), (True, sizes.sliding, config.second_rope))
    }
    tables = {slides: rotary_table(each, max_model_len, device) for slides, each in of_kind.items()}
    cached = structs.replace(sizes.cached, kv_heads=kv_heads(config.num_kv_heads, shard).count)
    inputs = LayerInputs(config, shard, dtype, device) if sizes.input_size else None
    layers = []
    for number, slides in enumerate(sizes.slides):
        owns = number < config.num_layers
        attention = PackedAttention(
            of_kind[slides],
            shard,
            dtype,
            device,
            tables[slides],
            cached=cached,
            owns=owns,
            keys_are_values=sizes.keys_are_values and not slides,
        )
        wide = sizes.wide and not owns
        inner = config.intermediate_size * (2 if wide else 1)
        mlp = GatedMLP(config, shard, dtype, device, inner=inner, gelu=True)
        layers.append(Gemma4Layer(number, inputs, config, shard, attention, mlp, dtype, device))
    final_norm = norm_weight(config, config.hidden_size, dtype, device)
    head = LMHead(embedding, config.tie_word_embeddings or not config.generates, shard)
    model = Gemma4Decoder(embedding, layers, final_norm, head, config)
    model.share(config, cached, inputs)
    return model


def _whole_rows(matrix: LinearWeight) -> Weight:
    """A matrix that every rank holds completely."""
    part = MatrixRows(matrix, 0, matrix.out_features)
    return Weight((matrix.out_features, matrix.in_features), part, quantized=True)


def unused(config: ModelConfig, names: Sequence[str]) -> list[str]:
    """Tensors of published checkpoints that no model computes with: keys and values of layers that have none."""
    assert config.two_sizes is not None
    without = range(config.num_layers, len(config.two_sizes.slides))
    parts = tuple(f"model.layers.{i}.self_attn.{part}_" for i in without for part in "kv")
    return [name for name in names if name.startswith(parts)]


FAMILY = Family(model_type="gemma4_text", keys=Gemma4Keys, read=read, build=build, hidden_act=GELU, unused=unused)
