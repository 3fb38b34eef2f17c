"""Phi-3 and Phi-4: Llama with fused projections, LongRoPE, and heads of which only a part may be rotated."""

from __future__ import annotations

from typing import Any, ClassVar

from kvllm.models.base import Family, build_decoder
from kvllm.models.config import ConfigKeys
from kvllm.models.windows import sliding_layers


class Phi3Keys(ConfigKeys, kw_only=True):
    PARTIAL = True
    RENAMED: ClassVar = {"su": "longrope", "yarn": "longrope"}

    rms_norm_eps: float = 1e-5
    original_max_position_embeddings: int | None = 4096


def read(keys: Phi3Keys) -> dict[str, Any]:
    layers = sliding_layers(keys, keys.sliding_window, [True] * keys.num_hidden_layers)
    return {"fused_projections": True, "layers": layers}


FAMILY = Family(model_type="phi3", keys=Phi3Keys, read=read, build=build_decoder)
