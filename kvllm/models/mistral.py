"""Mistral: Llama with a sliding window in every layer. Only checkpoints whose window has no effect are accepted."""

from __future__ import annotations

from typing import Any

from kvllm.models.base import Family, build_decoder
from kvllm.models.config import ConfigKeys, refuse_window


class MistralKeys(ConfigKeys, kw_only=True):
    num_key_value_heads: int | None = 8
    sliding_window: int | None = 4096


def read(keys: MistralKeys) -> dict[str, Any]:
    refuse_window(keys, keys.sliding_window)
    return {}


FAMILY = Family(model_type="mistral", keys=MistralKeys, read=read, build=build_decoder)
