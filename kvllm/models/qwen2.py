"""Qwen2: Llama with a bias on queries, keys and values. The layers from `max_window_layers` on may have a window."""

from __future__ import annotations

from typing import Any

from kvllm.models.base import Family, build_decoder
from kvllm.models.config import ConfigKeys, refuse_window


class Qwen2Keys(ConfigKeys, kw_only=True):
    num_key_value_heads: int | None = 32
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28


def refuse_last_windows(keys: Qwen2Keys) -> None:
    """Raise CheckpointError if a window has an effect. `layer_types`, where it is given, says which layers have one."""
    if keys.use_sliding_window and keys.layer_types is None and keys.max_window_layers < keys.num_hidden_layers:
        refuse_window(keys, keys.sliding_window)


def read(keys: Qwen2Keys) -> dict[str, Any]:
    refuse_last_windows(keys)
    return {"qkv_bias": True}


FAMILY = Family(model_type="qwen2", keys=Qwen2Keys, read=read, build=build_decoder)
