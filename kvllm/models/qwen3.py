"""Qwen3: Llama with an RMSNorm of every query and key head. Windows are as in Qwen2."""

from __future__ import annotations

from typing import Any

from kvllm.models.base import Family, build_decoder
from kvllm.models.qwen2 import Qwen2Keys, layers


class Qwen3Keys(Qwen2Keys, kw_only=True):
    head_dim: int | None = 128
    attention_bias: bool | None = None


def read(keys: Qwen3Keys) -> dict[str, Any]:
    bias = bool(keys.attention_bias)
    return {"qk_norm": True, "qkv_bias": bias, "output_bias": bias, "layers": layers(keys)}


FAMILY = Family(model_type="qwen3", keys=Qwen3Keys, read=read, build=build_decoder)
