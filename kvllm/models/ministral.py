"""Ministral: Mistral whose layers may differ, some with a sliding window, some without."""

from __future__ import annotations

from typing import Any

from kvllm.models.base import Family, build_decoder
from kvllm.models.config import ConfigKeys
from kvllm.models.windows import named_layers, sliding_layers


class MinistralKeys(ConfigKeys, kw_only=True):
    num_key_value_heads: int | None = 8
    sliding_window: int | None = 4096


def read(keys: MinistralKeys) -> dict[str, Any]:
    sliding = [True] * keys.num_hidden_layers
    if keys.layer_types is not None:
        sliding = named_layers(keys, keys.layer_types)
    return {"layers": sliding_layers(keys, keys.sliding_window, sliding)}


FAMILY = Family(model_type="ministral", keys=MinistralKeys, read=read, build=build_decoder)
