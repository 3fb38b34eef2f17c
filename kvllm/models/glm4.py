"""GLM-4: four norms in a layer, and RoPE that turns neighbouring channels in the first half of each head."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import torch

from kvllm.models.base import Family, build_decoder
from kvllm.models.config import ConfigKeys
from kvllm.models.gemma2 import GemmaLayer
from kvllm.models.parts import GatedMLP


class Glm4Keys(ConfigKeys, kw_only=True):
    PARTIAL = True
    DEFAULT_PARTIAL = 0.5
    INTERLEAVED = True

    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    rms_norm_eps: float = 1.5625e-7
    attention_bias: bool = True
    eos_token_id: int | list[int] | None = msgspec.field(default_factory=lambda: [151329, 151336, 151338])


class Glm4Layer(GemmaLayer):
    """The layer with four norms under GLM's names."""

    def norms(self) -> dict[str, torch.Tensor | None]:
        return {
            "input_layernorm": self.input_norm,
            "post_self_attn_layernorm": self.attention_output_norm,
            "post_attention_layernorm": self.post_attention_norm,
            "post_mlp_layernorm": self.mlp_output_norm,
        }


def read(keys: Glm4Keys) -> dict[str, Any]:
    return {"qkv_bias": keys.attention_bias}


FAMILY = Family(
    model_type="glm4",
    keys=Glm4Keys,
    read=read,
    build=partial(build_decoder, make_mlp=partial(GatedMLP, fused="gate_up_proj"), make_layer=Glm4Layer),
)
