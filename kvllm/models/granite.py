"""Granite 3: Llama with multipliers of embeddings, scores, residuals and logits."""

from __future__ import annotations

from typing import Any

from kvllm.errors import CheckpointError
from kvllm.models.base import Family, build_decoder
from kvllm.models.config import ConfigKeys


class GraniteKeys(ConfigKeys, kw_only=True):
    attention_bias: bool = False
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


def read(keys: GraniteKeys) -> dict[str, Any]:
    for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"):
        if not 1e-4 <= getattr(keys, name) <= 1e4:
            raise CheckpointError(f"{name} is {getattr(keys, name)}, but must be at least 0.0001 and at most 10000")
    return {
        "qkv_bias": keys.attention_bias,
        "output_bias": keys.attention_bias,
        "mlp_bias": bool(keys.mlp_bias),
        "embedding_scale": keys.embedding_multiplier,
        "softmax_scale": keys.attention_multiplier,
        "residual_multiplier": keys.residual_multiplier,
        "logit_divisor": keys.logits_scaling,
    }


FAMILY = Family(model_type="granite", keys=GraniteKeys, read=read, build=build_decoder)
