"""gpt-oss: windows in every other layer, learned scores in each softmax, experts with biases and a bounded SwiGLU."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import torch

from kvllm.attention.layer import LayerAttention
from kvllm.errors import CheckpointError
from kvllm.models.base import Family, build_decoder
from kvllm.models.config import ConfigKeys, ModelConfig
from kvllm.models.expert_stacks import ExpertMatrices, ExpertVectors
from kvllm.models.experts import ExpertsMLP, GroupedLinear, whole_matrix
from kvllm.models.layers import Weight, whole
from kvllm.models.mixture import make_experts
from kvllm.models.parts import SelfAttention
from kvllm.models.rope import TopKeys
from kvllm.models.weights import MatrixRows
from kvllm.models.windows import has_effect, named_layers
from kvllm.parallel import Shard

ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The scaling where the config has none."""


class GptOssKeys(ConfigKeys, kw_only=True):
    THETA = 150000.0
    DTYPE = "bfloat16"
    QUANTIZED = ("mxfp4",)

    num_key_value_heads: int | None = 8
    head_dim: int | None = 64
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = 128
    attention_bias: bool = True
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    def rope_keys(self) -> TopKeys:
        if self.rope_parameters is None and self.rope_scaling is None:
            self.rope_scaling = ROPE
        return self


class GptOssAttention(SelfAttention):
    """Attention with a learned score for each query head."""

    def __init__(
        self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device, cos_sin: torch.Tensor
    ) -> None:
        super().__init__(config, shard, dtype, device, cos_sin)
        self.total_heads, self.rank = config.num_query_heads, shard.rank
        self.sinks = torch.empty(self.qkv.num_query_heads, dtype=torch.float32, device=device)

    def weights(self, prefix: str) -> dict[str, Weight]:
        assert self.sinks is not None
        sinks = Weight((self.total_heads,), self.sinks, 0, self.rank * len(self.sinks))
        return {**super().weights(prefix), f"{prefix}.sinks": sinks}


class GptOssMLP(ExpertsMLP):
    """Experts with biases. The checkpoint has one tensor for all of them, in which gates and ups alternate."""

    BIAS = True

    def weights(self, prefix: str) -> dict[str, Weight]:
        assert self.router_bias is not None and self.gate_up.bias is not None and self.down.bias is not None
        count, inner, hidden = self.experts.count, self.experts.intermediate_size, self.down.out_features
        start = self.shard.rank * self.inner
        own = torch.arange(start, start + self.inner)
        gates_then_ups, every = torch.cat((2 * own, 2 * own + 1)), torch.arange(hidden)

        def target(linear: GroupedLinear) -> MatrixRows:
            return MatrixRows(linear.weight, 0, linear.weight.out_features)

        experts = f"{prefix}.experts"
        return {
            f"{prefix}.router.weight": whole_matrix(self.router),
            f"{prefix}.router.bias": whole(self.router_bias),
            f"{experts}.gate_up_proj": ExpertMatrices(
                (count, hidden, 2 * inner),
                target(self.gate_up),
                linear=self.gate_up,
                outputs=gates_then_ups,
                inputs=slice(None),
            ),
            f"{experts}.gate_up_proj_bias": ExpertVectors(
                (count, 2 * inner), self.gate_up.bias, outputs=gates_then_ups
            ),
            f"{experts}.down_proj": ExpertMatrices(
                (count, inner, hidden),
                target(self.down),
                linear=self.down,
                outputs=every,
                inputs=slice(start, start + self.inner),
            ),
            f"{experts}.down_proj_bias": whole(self.down.bias),
        }

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, experts = self.router.multiply(x, self.router_bias).float().topk(self.experts.per_token)
        return scores.softmax(-1), experts

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        limit, alpha = self.experts.limit, self.experts.alpha
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(gate_up.dtype)


def read(keys: GptOssKeys) -> dict[str, Any]:
    if keys.swiglu_limit <= 0:
        raise CheckpointError(f"swiglu_limit is {keys.swiglu_limit}, but must be positive")
    sliding = [i % 2 == 0 for i in range(keys.num_hidden_layers)]
    if keys.layer_types is not None:
        sliding = named_layers(keys, keys.layer_types)
    window = keys.sliding_window if has_effect(keys, keys.sliding_window) else None
    experts = make_experts(keys.num_local_experts, keys.num_experts_per_tok, keys.intermediate_size)
    return {
        "qkv_bias": keys.attention_bias,
        "output_bias": keys.attention_bias,
        "float32_norms": True,
        "layers": tuple(LayerAttention(window if slides else None, sinks=True) for slides in sliding),
        "experts": msgspec.structs.replace(experts, alpha=keys.swiglu_alpha, limit=keys.swiglu_limit),
    }


FAMILY = Family(
    model_type="gpt_oss",
    keys=GptOssKeys,
    read=read,
    build=partial(build_decoder, make_attention=GptOssAttention, make_expert_mlp=GptOssMLP),
)
