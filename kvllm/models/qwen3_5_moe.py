"""Qwen3.5 with experts: the layers of Qwen3.5, with the mixture of experts of Qwen3-Next."""

from __future__ import annotations

from functools import partial

from kvllm.models.base import Family, build_decoder
from kvllm.models.qwen3_5 import GatedAttention, GatedDeltaNet
from kvllm.models.qwen3_next import GatedSharedExpertMLP, Qwen3NextKeys, read


class Qwen35MoeKeys(Qwen3NextKeys, kw_only=True):
    intermediate_size: int = 1  # of no layer
    num_experts: int = 256
    num_experts_per_tok: int = 8


FAMILY = Family(
    model_type="qwen3_5_moe_text",
    keys=Qwen35MoeKeys,
    read=read,
    build=partial(
        build_decoder, make_attention=GatedAttention, make_recurrent=GatedDeltaNet, make_expert_mlp=GatedSharedExpertMLP
    ),
    extra_layers=True,
)
