"""The base of all families: the loop over the layers of a decoder, and the description of a family.

A model is put together from parts: an embedding, layers of an attention part and an MLP part, and a head. Every part
has `weights`, the tensors of the checkpoint that it holds, and `allocate`, which makes room for them. A family that
varies one part writes that part and hands it to `build_decoder`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvllm.attention.context import Attention
from kvllm.lora.product import PassAdapters
from kvllm.models.compiled import CompiledLayers
from kvllm.models.config import ConfigKeys, ModelConfig
from kvllm.models.layers import LMHead, VocabEmbedding, Weight, whole
from kvllm.models.parts import MLP, DecoderLayer, GatedMLP, SelfAttention, TokenMixer, norm_weight
from kvllm.models.rotary import rotary_table
from kvllm.models.weights import Packing
from kvllm.parallel import Shard


def _compilable(layer: DecoderLayer, attention: SelfAttention, mlp: GatedMLP) -> bool:
    """Whether the compiled operator computes these parts: packed weights, no bias but that of queries, keys, values."""
    biased = any(part.bias is not None for part in (attention.o, mlp.gate_up, mlp.down))
    if biased or type(layer).finish is not DecoderLayer.finish:
        return False
    weights = [part.weight for part in (attention.qkv, attention.o, mlp.gate_up, mlp.down)]
    return all(weight.packed is not None and not weight.sums and weight.order is None for weight in weights)


Visitor = Callable[[int, torch.Tensor], None]
"""Called with a layer's index and its rotated queries `[T, query_heads, head_dim]`, those of this rank."""


class Decoder:
    """One rank's shard of a model. A loader calls `allocate`, fills what `weights` names, then calls `compile`.

    attentions: of the layers that have one. num_query_heads, num_kv_heads: of this rank. adapters: of the pass that is
        computed. weights_note: what the loader says of the weights, for the log.
    """

    weights_note: str | None = None

    def __init__(
        self,
        embedding: VocabEmbedding,
        layers: Sequence[DecoderLayer],
        final_norm: torch.Tensor,
        lm_head: LMHead,
        config: ModelConfig,
        final_norm_name: str = "norm",
    ) -> None:
        self.embedding = embedding
        self.layers = layers
        self.final_norm = final_norm
        self.final_norm_name = final_norm_name
        self.lm_head = lm_head
        self.eps = config.residual_eps
        self.norm_offset = config.norm_offset
        self.logit_cap = config.logit_cap
        self.logit_divisor = config.logit_divisor
        self.attentions = [layer.attention for layer in layers if isinstance(layer.attention, SelfAttention)]
        self.num_query_heads, self.num_kv_heads = self.attentions[0].num_query_heads, self.attentions[0].num_kv_heads
        self._places = _places([isinstance(layer.attention, SelfAttention) for layer in layers])
        self._next_norms = [layer.input_norm for layer in layers[1:]] + [final_norm]
        self.adapters = PassAdapters()
        self._compiled: CompiledLayers | None = None

    def weights(self) -> dict[str, Weight]:
        """Every tensor of the checkpoint, by name."""
        found = self.embedding.weights("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            found |= layer.weights(f"model.layers.{index}")
        found[f"model.{self.final_norm_name}.weight"] = whole(self.final_norm, self.norm_offset)
        return found | self.lm_head.weights("lm_head")

    def allocate(self, packing: Packing) -> None:
        """Make room for all matrices, in the form that is multiplied fastest. Called once, before any is written."""
        if not self.lm_head.tied:
            self.embedding.allocate(packing)
        for layer in self.layers:
            layer.allocate(packing)
        self.lm_head.allocate(packing)

    def compile(self) -> None:
        """Let compiled operators run the layers, if these have no parts but the common ones, whole and packed. Called
        once all weights are written."""
        layers = [
            (layer, layer.attention, layer.mlp)
            for layer in self.layers
            if type(layer.attention) is SelfAttention
            and type(layer.mlp) is GatedMLP
            and _compilable(layer, layer.attention, layer.mlp)
        ]
        whole = len(layers) == len(self.layers) and self.lm_head.shard.world_size == 1
        self._compiled = CompiledLayers(layers, self.final_norm, self.eps) if whole else None

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute tokens and write their keys and values to the cache.

        token_ids, positions: int64 `[T]`; positions below `max_model_len`. attention: for these query tokens.
        wanted: int64, ascending, the tokens whose hidden states are returned; all are if it is None. What follows the
            last layer's attention is computed for these alone.
        Returns the normalized hidden states `[T or len(wanted), hidden_size]`, the input of `logits`.
        """
        if self._compiled and self._compiled.serves(attention):
            return self._compiled.forward(self.embed(token_ids), positions, attention, wanted)
        return self._run_layers(token_ids, positions, attention, None, wanted)

    def logits(self, hidden: torch.Tensor, *, rounded: bool = False, into: torch.Tensor | None = None) -> torch.Tensor:
        """`[R, hidden_size]` -> float32 `[R, n]`, those of `LMHead.forward`, with `rounded` in the dtype of the head.

        into: written and returned; of the shape and dtype of the result.
        """
        if rounded and self.logit_cap is None and self.logit_divisor == 1:
            return self.lm_head.forward(hidden, into)
        logits = self.lm_head.forward(hidden)
        logits = logits.float() if into is None else into.copy_(logits)
        if self.logit_divisor != 1:
            logits.div_(self.logit_divisor)
        return logits if self.logit_cap is None else logits.div_(self.logit_cap).tanh_().mul_(self.logit_cap)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Begin a pass: int64 `[T]` -> the residual `[T, hidden_size]`."""
        return self.embedding.forward(token_ids)

    def narrow(self, wanted: torch.Tensor) -> None:
        """Go on with tokens `wanted` of the pass alone: int64, ascending."""
        self.adapters.narrow(wanted)

    def recompute_queries(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention, visit: Visitor
    ) -> None:
        """Recover the queries of cached tokens: a forward pass that reads the cache and writes nothing.

        The arguments are those of `forward`; the keys and values of the tokens are in the cache already, so any subset
        of them may be asked for. `visit` gets the queries, layer by layer.

        Kara (paper, C.2) scores a window with these. Tokens whose prefix was compressed since they were computed get
        other queries than back then, from the second layer on.
        """
        if self._compiled and attention.adapters is None and self._compiled.serves(attention):
            self._compiled.recompute_queries(self.embedding.forward(token_ids), positions, attention, visit)
        else:
            self._run_layers(token_ids, positions, attention, visit)

    def _run_layers(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: Attention,
        visit: Visitor | None,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The loop over the layers.

        Without `visit`, keys and values are stored, and the normalized hidden states of `wanted` are returned.
        With it, they are in the cache already, and nothing is computed after the last layer's queries.
        """
        self.adapters.rows = attention.adapters
        residual = self.embed(token_ids)
        x = self.layers[0].normalized(residual, self.layers[0].input_norm)
        last, last_visited = len(self.layers) - 1, len(self.attentions) - 1
        for index, layer in enumerate(self.layers):
            if visit is None:
                attended = layer.attention.attend(x, positions, attention, self._places[index])
            else:
                assert isinstance(layer.attention, SelfAttention)  # no option asks for it beside recurrent layers
                queries = layer.attention.project_queries(x, positions)
                visit(index, queries)
                if index == last_visited:
                    break
                attended = attention.run(index, queries, layer.attention.sinks)
            if index == last and wanted is not None:
                attended, residual = attended[wanted], residual[wanted]
                self.narrow(wanted)
            x = layer.finish(attended, residual, self._next_norms[index])
        return x


def _places(attends: Sequence[bool]) -> list[int]:
    """Of each layer the number of those before it that attend, too, or that have a state, too."""
    return [attends[:index].count(kind) for index, kind in enumerate(attends)]


MakeAttention = Callable[[ModelConfig, Shard, torch.dtype, torch.device, torch.Tensor], SelfAttention]
MakeRecurrent = Callable[[ModelConfig, Shard, torch.dtype, torch.device], TokenMixer]
MakeMLP = Callable[[ModelConfig, Shard, torch.dtype, torch.device], MLP]
MakeLayer = Callable[[ModelConfig, TokenMixer, MLP, torch.dtype, torch.device], DecoderLayer]


def build_decoder(
    config: ModelConfig,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    *,
    make_attention: MakeAttention = SelfAttention,
    make_recurrent: MakeRecurrent | None = None,
    make_mlp: MakeMLP = GatedMLP,
    make_expert_mlp: MakeMLP = GatedMLP,
    make_layer: MakeLayer = DecoderLayer,
    final_norm_name: str = "norm",
) -> Decoder:
    """The decoder that all families are, or one with other parts, on one rank.

    dtype, device: of weights and activations. max_model_len: positions that the table of rotations has.
    make_attention: called for each layer with attention. make_recurrent: for each of the others.
    make_mlp: called for each layer without experts. make_expert_mlp: for each of the others.
    make_layer: called for each layer. final_norm_name: in the checkpoint.
    Raises ConfigError if the ranks cannot share a size out equally.
    """
    scales = (config.embedding_scale, config.residual_multiplier)
    embedding = VocabEmbedding(config.vocab_size, config.hidden_size, shard, dtype, device, *scales)
    cos_sin = rotary_table(config, max_model_len, device)
    second = cos_sin
    if config.second_rope is not None:
        second = rotary_table(config, max_model_len, device, config.second_rope)
    arguments = (config, shard, dtype, device)
    mixers: list[TokenMixer] = [
        make_attention(*arguments, second if number in config.second_rope_layers else cos_sin)
        for number in range(config.num_layers)
    ]
    if config.recurrent is not None and make_recurrent is not None:
        for index in config.recurrent.indices:
            mixers.insert(index, make_recurrent(*arguments))
    layers = []
    for index, mixer in enumerate(mixers):
        has_experts = config.experts is not None and index not in config.experts.dense_layers
        mlp = (make_expert_mlp if has_experts else make_mlp)(*arguments)
        layers.append(make_layer(config, mixer, mlp, dtype, device))
    final_norm = norm_weight(config, config.hidden_size, dtype, device)
    tied = config.tie_word_embeddings or not config.generates
    return Decoder(embedding, layers, final_norm, LMHead(embedding, tied, shard), config, final_norm_name)


@dataclass(frozen=True)
class Family:
    """One architecture: the meaning of its `config.json`, and how its model is built.

    model_type: the value of that key.
    keys: the keys that it has, with what transformers assumes where one is absent.
    read: from these keys to the fields of ModelConfig that other families leave at their defaults. Raises
        CheckpointError for what the family does not compute.
    build: called with the arguments of `build_decoder`.
    hidden_act: the only value of that key that the family computes.
    extra_layers: checkpoints may have layers after the last, or `mtp`, which predict later tokens. They are not loaded.
    unused: of the names of a checkpoint's tensors those that are not loaded, either.
    """

    model_type: str
    keys: type[ConfigKeys]
    read: Callable[[Any], dict[str, Any]]
    build: Callable[[ModelConfig, Shard, torch.dtype, torch.device, int], Decoder]
    hidden_act: str = "silu"
    extra_layers: bool = False
    unused: Callable[[ModelConfig, Sequence[str]], list[str]] | None = None
