"""GLM-4.7-Flash: latent attention, and the experts of GLM-4.5."""

from __future__ import annotations

from functools import partial
from typing import Any

from msgspec import structs

from kvllm.models.base import Family, build_decoder
from kvllm.models.config import refuse
from kvllm.models.glm4_moe import Glm4MoeMLP, read_experts
from kvllm.models.latent_attention import LatentAttention, LatentKeys

DENSE, SPARSE = "dense", "sparse"


class Glm4MoeLiteKeys(LatentKeys, kw_only=True):
    rms_norm_eps: float = 1e-5
    q_lora_rank: int | None = 768
    qk_nope_head_dim: int = 192
    v_head_dim: int = 256
    n_routed_experts: int = 64
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 1536
    routed_scaling_factor: float = 1.8
    mlp_layer_types: list[str] | None = None


def read(keys: Glm4MoeLiteKeys) -> dict[str, Any]:
    kinds = keys.mlp_layer_types
    if kinds is not None and (set(kinds) - {DENSE, SPARSE} or len(kinds) != keys.num_hidden_layers):
        refuse(
            f"mlp_layer_types is {kinds}, and not {DENSE!r} or {SPARSE!r} for each of {keys.num_hidden_layers} layers"
        )
    experts = read_experts(keys)
    if kinds is not None:
        experts = structs.replace(experts, dense_layers=tuple(i for i, kind in enumerate(kinds) if kind == DENSE))
    return {**keys.latent_fields(), "experts": experts}


FAMILY = Family(
    model_type="glm4_moe_lite",
    keys=Glm4MoeLiteKeys,
    read=read,
    build=partial(build_decoder, make_attention=LatentAttention, make_expert_mlp=Glm4MoeMLP),
    extra_layers=True,
)
