"""DeepSeek-V3 and R1, and what has their form, such as Moonlight: latent attention, and experts of the best groups."""

from __future__ import annotations

from functools import partial

from kvllm.models.base import Family, build_decoder
from kvllm.models.glm4_moe import Glm4MoeMLP, read_experts
from kvllm.models.latent_attention import LatentAttention, LatentKeys


class DeepseekV3Keys(LatentKeys, kw_only=True):
    q_lora_rank: int | None = 1536
    n_routed_experts: int = 256
    moe_intermediate_size: int = 2048
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 3
    n_group: int = 8
    topk_group: int = 4


def read(keys: DeepseekV3Keys) -> dict[str, object]:
    return {**keys.latent_fields(), "experts": read_experts(keys)}


FAMILY = Family(
    model_type="deepseek_v3",
    keys=DeepseekV3Keys,
    read=read,
    build=partial(build_decoder, make_attention=LatentAttention, make_expert_mlp=Glm4MoeMLP),
    extra_layers=True,
)
