"""Qwen2: Llama with a bias on queries, keys and values. The layers from `max_window_layers` on may have a window."""

from __future__ import annotations

from typing import Any

from kvllm.attention.layer import LayerAttention
from kvllm.models.base import Family, build_decoder
from kvllm.models.config import ConfigKeys, refuse
from kvllm.models.windows import named_layers, sliding_layers


class Qwen2Keys(ConfigKeys, kw_only=True):
    num_key_value_heads: int | None = 32
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28


def layers(keys: Qwen2Keys) -> tuple[LayerAttention, ...]:
    """The layers from `max_window_layers` on have a window, or those that `layer_types` names, where it is given."""
    sliding = [i >= keys.max_window_layers for i in range(keys.num_hidden_layers)]
    if keys.layer_types is not None:
        sliding = named_layers(keys, keys.layer_types)
        if any(sliding) and not keys.use_sliding_window:
            refuse("layer_types has 'sliding_attention', but use_sliding_window is false")
    return sliding_layers(keys, keys.sliding_window if keys.use_sliding_window else None, sliding)


def read(keys: Qwen2Keys) -> dict[str, Any]:
    return {"qkv_bias": True, "layers": layers(keys)}


FAMILY = Family(model_type="qwen2", keys=Qwen2Keys, read=read, build=build_decoder)
