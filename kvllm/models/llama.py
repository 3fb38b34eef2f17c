"""Llama, the decoder that the other families vary."""

from __future__ import annotations

from typing import Any

from kvllm.models.base import Family, build_decoder
from kvllm.models.config import ConfigKeys
from kvllm.models.windows import named_layers, refuse_window


class LlamaKeys(ConfigKeys, kw_only=True):
    attention_bias: bool | None = None
    use_sliding_window: bool | None = None


def read(keys: LlamaKeys) -> dict[str, Any]:
    # transformers applies a window to cached tokens alone, so decoding and prefill contradict each other. Checkpoints
    # that were converted from another family have the key, switched off.
    switched_on = keys.use_sliding_window is not False
    if switched_on if keys.layer_types is None else any(named_layers(keys, keys.layer_types)):
        refuse_window(keys, keys.sliding_window)
    bias = bool(keys.attention_bias)
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bool(keys.mlp_bias)}


FAMILY = Family(model_type="llama", keys=LlamaKeys, read=read, build=build_decoder)
