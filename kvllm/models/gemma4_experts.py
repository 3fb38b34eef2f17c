"""The experts of Gemma 4, which compute the residual beside an MLP for all tokens."""

from __future__ import annotations

import torch

from kvllm.models.config import ModelConfig
from kvllm.models.elementwise import gelu_mul, rms_norm
from kvllm.models.expert_stacks import ExpertRows
from kvllm.models.experts import ExpertsMLP, whole_matrix
from kvllm.models.layers import Weight, whole
from kvllm.models.parts import norm_weight
from kvllm.parallel import Shard


class Gemma4Experts(ExpertsMLP):
    """`norm_1(mlp) + norm_2(experts(norm_3(residual)))`; the router sees the residual after a norm of its own.

    scale: of what the router sees. expert_scales: of the probability of each expert.
    """

    NORMS = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")

    def __init__(self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, shard, dtype, device)
        self.eps = config.rms_norm_eps
        self.norms = [norm_weight(config, config.hidden_size, dtype, device) for _ in self.NORMS]
        self.ones = torch.ones(config.hidden_size, dtype=dtype, device=device)
        self.scale = torch.empty_like(self.ones)
        self.expert_scales = torch.empty(self.experts.count, dtype=dtype, device=device)

    def weights(self, prefix: str) -> dict[str, Weight]:
        inner, start, hidden = self.experts.intermediate_size, self.shard.rank * self.inner, self.down.out_features
        own = torch.arange(start, start + self.inner)
        gates_then_ups, columns = torch.cat((own, inner + own)), slice(start, start + self.inner)
        norms = zip(self.NORMS, self.norms, strict=True)
        return {
            f"{prefix}.router.proj.weight": whole_matrix(self.router),
            f"{prefix}.router.scale": whole(self.scale),
            f"{prefix}.router.per_expert_scale": whole(self.expert_scales),
            f"{prefix}.experts.gate_up_proj": ExpertRows.of(self.gate_up, (2 * inner, hidden), gates_then_ups),
            f"{prefix}.experts.down_proj": ExpertRows.of(self.down, (hidden, inner), torch.arange(hidden), columns),
            **{f"{prefix}.{name}.weight": whole(norm) for name, norm in norms},
        }

    def beside(self, of_mlp: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """What the MLP has computed, and the residual, both `[T, hidden_size]` -> what is added to the residual, before
        its norm."""
        of_mlp_norm, output_norm, input_norm = self.norms
        found = self.compute(rms_norm(residual, input_norm, self.eps), *self.route(residual))
        return rms_norm(of_mlp, of_mlp_norm, self.eps) + rms_norm(found, output_norm, self.eps)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = rms_norm(x, self.ones, self.eps) * self.scale * x.shape[1] ** -0.5
        probabilities, experts = super().route(seen)
        return probabilities * self.expert_scales[experts], experts

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gelu_mul(gate_up)
