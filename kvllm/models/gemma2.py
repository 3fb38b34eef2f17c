"""Gemma 2: windows in every other layer, bounded scores and logits, norms on both sides of each part, and GELU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from kvllm.attention.layer import LayerAttention
from kvllm.errors import CheckpointError
from kvllm.models.base import Family, build_decoder
from kvllm.models.config import ConfigKeys, ModelConfig, refuse
from kvllm.models.parts import MLP, DecoderLayer, GatedMLP, TokenMixer
from kvllm.models.windows import has_effect, named_layers

GELU = "gelu_pytorch_tanh"


class GemmaKeys(ConfigKeys, kw_only=True):
    """The keys of Gemma 2 and 3."""

    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    tie_word_embeddings: bool = True
    attention_bias: bool | None = None
    hidden_activation: str | None = GELU
    query_pre_attn_scalar: float = 256
    sliding_window: int | None = 4096
    use_bidirectional_attention: bool | str | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None


class Gemma2Keys(GemmaKeys, kw_only=True):
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0


class GemmaLayer(DecoderLayer):
    """A layer whose parts have a norm in front of them and one after."""

    def __init__(
        self, config: ModelConfig, attention: TokenMixer, mlp: MLP, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(config, attention, mlp, dtype, device)
        # Not empty_like: on the meta device it imports sympy, which takes half a second.
        size = self.post_attention_norm.shape
        self.attention_output_norm = self.post_attention_norm.new_empty(size)
        self.mlp_output_norm = self.post_attention_norm.new_empty(size)

    def norms(self) -> dict[str, torch.Tensor | None]:
        return {
            "input_layernorm": self.input_norm,
            "post_attention_layernorm": self.attention_output_norm,
            "pre_feedforward_layernorm": self.post_attention_norm,
            "post_feedforward_layernorm": self.mlp_output_norm,
        }


def read_gemma(keys: GemmaKeys, sliding: Sequence[bool]) -> dict[str, Any]:
    """The fields of ModelConfig that Gemma 2 and 3 have in common. sliding: of each layer."""
    if keys.hidden_activation not in (None, GELU):
        refuse(f"hidden_activation is {keys.hidden_activation!r} instead of {GELU!r}")
    if keys.use_bidirectional_attention:
        refuse("use_bidirectional_attention is given: tokens attend to those after them, too")
    if keys.query_pre_attn_scalar <= 0:
        raise CheckpointError(f"query_pre_attn_scalar is {keys.query_pre_attn_scalar}, but must be positive")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        cap = getattr(keys, name)
        if cap is not None and cap <= 0:
            raise CheckpointError(f"{name} is {cap}, but must be positive, or null")
    bias, window = bool(keys.attention_bias), keys.sliding_window
    layers = [
        LayerAttention(window if slides and has_effect(keys, window) else None, keys.attn_logit_softcapping)
        for slides in sliding
    ]
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "layers": tuple(layers),
        "softmax_scale": keys.query_pre_attn_scalar**-0.5,
        "logit_cap": keys.final_logit_softcapping,
        "embedding_scale": keys.hidden_size**0.5,
        "norm_offset": 1.0,
    }


def read(keys: Gemma2Keys) -> dict[str, Any]:
    if keys.layer_types is not None:
        return read_gemma(keys, named_layers(keys, keys.layer_types))
    return read_gemma(keys, [i % 2 == 0 for i in range(keys.num_hidden_layers)])


build = partial(build_decoder, make_mlp=partial(GatedMLP, gelu=True), make_layer=GemmaLayer)

FAMILY = Family(model_type="gemma2", keys=Gemma2Keys, read=read, build=build, hidden_act=GELU)
