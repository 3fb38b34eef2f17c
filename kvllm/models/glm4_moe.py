"""GLM-4 MoE, GLM-4.5 to 4.7 among them: experts that sigmoids choose, and an MLP beside them for all tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import torch

from kvllm.errors import CheckpointError
from kvllm.models.base import Family, build_decoder
from kvllm.models.config import ConfigKeys, ModelConfig, refuse
from kvllm.models.experts import SharedExpertMLP, choose_with_bias
from kvllm.models.layers import Weight, whole
from kvllm.models.mixture import Experts, make_experts
from kvllm.models.weights import LinearWeight
from kvllm.parallel import Shard


class SigmoidExpertsKeys(ConfigKeys, kw_only=True):
    """The keys of experts that sigmoids choose."""

    n_routed_experts: int = 128
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 1408
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 1
    n_group: int = 1
    topk_group: int = 1


class Glm4MoeKeys(SigmoidExpertsKeys, kw_only=True):
    PARTIAL = True
    DEFAULT_PARTIAL = 0.5

    num_key_value_heads: int | None = 8
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    use_qk_norm: bool = False


class Glm4MoeMLP(SharedExpertMLP):
    """Experts of the largest `sigmoid(router(x)) + bias`; the bias has no part in the sum. The router is of float32.

    With groups of experts, those of the best groups alone: the sum of a group's two best counts.
    """

    def __init__(self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, shard, dtype, device)
        self.router = LinearWeight(self.experts.count, config.hidden_size, torch.float32, device)
        self.correction = torch.empty(self.experts.count, dtype=torch.float32, device=device)

    def weights(self, prefix: str) -> dict[str, Weight]:
        return {**super().weights(prefix), f"{prefix}.gate.e_score_correction_bias": whole(self.correction)}

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.router.multiply(x.float()).sigmoid()
        return choose_with_bias(scores, self._in_best_groups(scores + self.correction), self.experts, 1e-20)

    def _in_best_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores `[T, experts]`, those of the other groups minus infinity."""
        if self.experts.groups == 1:
            return scores
        grouped = scores.unflatten(1, (self.experts.groups, -1))
        best = grouped.topk(2).values.sum(-1).topk(self.experts.best_groups).indices
        left_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, value=False)
        return grouped.masked_fill(left_out.unsqueeze(2), -torch.inf).flatten(1)


def read_experts(keys: SigmoidExpertsKeys) -> Experts:
    """Raises CheckpointError for numbers that cannot be."""
    groups, best, count = keys.n_group, keys.topk_group, keys.n_routed_experts
    if not 1 <= best <= groups or (groups > 1 and (count % groups or count // groups < 2)):
        raise CheckpointError(
            f"n_group is {groups} and topk_group {best}, but must be groups of at least 2 of the {count} experts, and "
            "how many of them a token chooses from"
        )
    if keys.num_experts_per_tok > best * (count // groups):
        raise CheckpointError(
            f"num_experts_per_tok is {keys.num_experts_per_tok}, more than {best} of {groups} groups have"
        )
    experts = make_experts(
        keys.n_routed_experts,
        keys.num_experts_per_tok,
        keys.moe_intermediate_size,
        keys.norm_topk_prob,
        tuple(range(min(keys.first_k_dense_replace, keys.num_hidden_layers))),
    )
    shared = keys.n_shared_experts * keys.moe_intermediate_size
    if not 1 <= shared <= 1 << 20:
        refuse(f"n_shared_experts is {keys.n_shared_experts}: an MLP for all tokens of {shared} columns")
    return msgspec.structs.replace(
        experts, scale=keys.routed_scaling_factor, shared_intermediate_size=shared, groups=groups, best_groups=best
    )


def read(keys: Glm4MoeKeys) -> dict[str, Any]:
    return {"qkv_bias": keys.attention_bias, "qk_norm": keys.use_qk_norm, "experts": read_experts(keys)}


FAMILY = Family(
    model_type="glm4_moe",
    keys=Glm4MoeKeys,
    read=read,
    build=partial(build_decoder, make_expert_mlp=Glm4MoeMLP),
    extra_layers=True,
)
