"""Mistral: Llama with a sliding window in every layer, whatever `layer_types` says."""

from __future__ import annotations

from typing import Any

from kvllm.models.base import Family, build_decoder
from kvllm.models.config import ConfigKeys
from kvllm.models.windows import sliding_layers


class MistralKeys(ConfigKeys, kw_only=True):
    num_key_value_heads: int | None = 8
    sliding_window: int | None = 4096


def read(keys: MistralKeys) -> dict[str, Any]:
    return {"layers": sliding_layers(keys, keys.sliding_window, [True] * keys.num_hidden_layers)}


FAMILY = Family(model_type="mistral", keys=MistralKeys, read=read, build=build_decoder)
