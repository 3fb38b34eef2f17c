"""Granite 4 without experts and Mamba layers: Granite 3 with other names, and perhaps without RoPE."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvllm.models.base import Family, build_decoder
from kvllm.models.config import refuse
from kvllm.models.granite import GraniteKeys
from kvllm.models.granite import read as read_granite
from kvllm.models.parts import GatedMLP
from kvllm.models.rope import NO_ROPE


class GraniteMoeHybridKeys(GraniteKeys, kw_only=True):
    num_local_experts: int | None = 8
    shared_intermediate_size: int = 1024
    position_embedding_type: str | None = None


def read(keys: GraniteMoeHybridKeys) -> dict[str, Any]:
    if keys.layer_types is None:
        refuse("layer_types is not given, so that all layers are Mamba layers")
    if keys.num_local_experts:
        refuse(f"num_local_experts is {keys.num_local_experts}: experts beside an MLP for all tokens")
    if keys.position_embedding_type not in (None, "rope", "nope"):
        refuse(f"position_embedding_type is {keys.position_embedding_type!r} instead of 'rope' or null")
    fields = {**read_granite(keys), "intermediate_size": keys.shared_intermediate_size, "mlp_bias": False}
    return fields if keys.position_embedding_type == "rope" else {**fields, "rope": NO_ROPE}


make_mlp = partial(GatedMLP, name="shared_mlp", fused="input_linear", down="output_linear")

FAMILY = Family(
    model_type="granitemoehybrid", keys=GraniteMoeHybridKeys, read=read, build=partial(build_decoder, make_mlp=make_mlp)
)
