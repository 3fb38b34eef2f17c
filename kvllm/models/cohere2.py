"""Cohere2, of Command R7B and A: attention and MLP side by side on one LayerNorm, and RoPE in window layers alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import torch
from torch.nn.functional import layer_norm

from kvllm.errors import CheckpointError
from kvllm.models.base import Family, build_decoder
from kvllm.models.config import ConfigKeys
from kvllm.models.parts import DecoderLayer
from kvllm.models.rope import FULL, NO_ROPE, SLIDING
from kvllm.models.windows import named_layers, sliding_layers


class Cohere2Keys(ConfigKeys, kw_only=True):
    INTERLEAVED = True

    rms_norm_eps: float = msgspec.field(name="layer_norm_eps", default=1e-5)
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    logit_scale: float = 0.0625
    sliding_window: int | None = 4096
    sliding_window_pattern: int = 4
    bos_token_id: int | None = 5
    eos_token_id: int | list[int] | None = 255001


class Cohere2Layer(DecoderLayer):
    """A layer whose attention and MLP read one norm, and are added to the residual together."""

    def norms(self) -> dict[str, torch.Tensor | None]:
        return {"input_layernorm": self.input_norm}

    def normalized(self, residual: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        return layer_norm(residual, residual.shape[-1:], norm, eps=self.eps)

    def finish(self, attended: torch.Tensor, residual: torch.Tensor, next_norm: torch.Tensor | None) -> torch.Tensor:
        x = self.normalized(residual, self.input_norm)  # what attention has read
        residual.add_(self.attention.finish(attended)).add_(self.mlp.forward(x))
        return self.normalized(residual, next_norm)


def read(keys: Cohere2Keys) -> dict[str, Any]:
    if keys.sliding_window_pattern < 1:
        raise CheckpointError(f"sliding_window_pattern is {keys.sliding_window_pattern}, but must be at least 1")
    if not 1e-4 <= keys.logit_scale <= 1e4:
        raise CheckpointError(f"logit_scale is {keys.logit_scale}, but must be at least 0.0001 and at most 10000")
    kinds = keys.layer_types
    if kinds is None:
        kinds = [SLIDING if i % keys.sliding_window_pattern else FULL for i in range(1, keys.num_hidden_layers + 1)]
    sliding = named_layers(keys, kinds)
    return {
        "qkv_bias": keys.attention_bias,
        "output_bias": keys.attention_bias,
        "logit_divisor": 1 / keys.logit_scale,
        "layers": sliding_layers(keys, keys.sliding_window, sliding),
        "second_rope": NO_ROPE,
        "second_rope_layers": tuple(i for i, slides in enumerate(sliding) if not slides),
    }


build = partial(build_decoder, make_layer=Cohere2Layer)

FAMILY = Family(model_type="cohere2", keys=Cohere2Keys, read=read, build=build)
