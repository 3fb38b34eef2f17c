"""LFM2 with experts, which sigmoids choose, in the place of the MLP of all layers but the first ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import torch

from kvllm.models.base import Family
from kvllm.models.config import ModelConfig, refuse
from kvllm.models.experts import ExpertsMLP, choose_with_bias
from kvllm.models.layers import Weight, whole
from kvllm.models.lfm2 import Lfm2BaseKeys, build, read_layers
from kvllm.models.mixture import make_experts
from kvllm.parallel import Shard


class Lfm2MoeKeys(Lfm2BaseKeys, kw_only=True):
    intermediate_size: int = 7168
    moe_intermediate_size: int = 1792
    num_dense_layers: int = 2
    num_experts: int = 32
    num_experts_per_tok: int = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    use_expert_bias: bool = True


class Lfm2Experts(ExpertsMLP):
    """Experts of the largest `sigmoid(router(x)) + bias`; the bias has no part in the sum."""

    name = "feed_forward"
    NAMES = ("w1", "w3", "w2")

    def __init__(self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, shard, dtype, device)
        self.correction = torch.empty(self.experts.count, dtype=torch.float32, device=device)

    def weights(self, prefix: str) -> dict[str, Weight]:
        return {**super().weights(prefix), f"{prefix}.expert_bias": whole(self.correction)}

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.router.multiply(x).float().sigmoid()
        return choose_with_bias(scores, scores + self.correction, self.experts, 1e-6)


def read(keys: Lfm2MoeKeys) -> dict[str, Any]:
    if not keys.use_expert_bias:
        refuse("use_expert_bias is false: experts are chosen without a bias")
    experts = make_experts(
        keys.num_experts,
        keys.num_experts_per_tok,
        keys.moe_intermediate_size,
        keys.norm_topk_prob,
        tuple(range(min(keys.num_dense_layers, keys.num_hidden_layers))),
    )
    experts = msgspec.structs.replace(experts, scale=keys.routed_scaling_factor)
    return {**read_layers(keys, keys.layer_types), "experts": experts}


FAMILY = Family(model_type="lfm2_moe", keys=Lfm2MoeKeys, read=read, build=partial(build, make_expert_mlp=Lfm2Experts))
