"""Ministral 3, text only: Mistral with YaRN, and queries that grow after each multiple of the pretraining length."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kvllm.errors import CheckpointError
from kvllm.models.base import Family, build_decoder
from kvllm.models.config import ConfigKeys, ModelConfig
from kvllm.models.parts import SelfAttention
from kvllm.models.rope import TopKeys
from kvllm.models.windows import sliding_layers
from kvllm.parallel import Shard

BETA = "llama_4_scaling_beta"
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    BETA: 0.1,
}
"""`rope_parameters` where the config has none."""


class Ministral3Keys(ConfigKeys, kw_only=True):
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    rms_norm_eps: float = 1e-5

    def rope_keys(self) -> TopKeys:
        found = {name: value for name, value in self._given().items() if name not in (BETA, "max_position_embeddings")}
        return TopKeys(
            max_position_embeddings=self.max_position_embeddings, rope_parameters=found, rope_theta=self.rope_theta
        )

    def beta(self) -> float:
        beta = self._given().get(BETA)
        if not isinstance(beta, float | int) or beta < 0:
            raise CheckpointError(f"rope_parameters has {BETA} {beta!r}, but must have a number of at least 0")
        return beta

    def _given(self) -> dict[str, Any]:
        if self.rope_parameters and self.rope_scaling:
            raise CheckpointError("rope_parameters and rope_scaling are both given: keep one of them")
        return self.rope_parameters or self.rope_scaling or ROPE


class ScaledAttention(SelfAttention):
    """Attention whose rotated queries are multiplied by a number for each position."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
        cos_sin: torch.Tensor,
        scales: torch.Tensor,
    ) -> None:
        super().__init__(config, shard, dtype, device, cos_sin)
        self.scales = scales

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        queries, keys, values = super().project(x, positions)
        return self._scale(queries, positions), keys, values

    def project_queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._scale(super().project_queries(x, positions), positions)

    def _scale(self, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return queries.mul_(self.scales[positions].view(-1, 1, 1))


def make_attention(
    config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device, cos_sin: torch.Tensor
) -> SelfAttention:
    """A layer's attention, which scales queries if texts may be long enough."""
    scaling, longest = config.rope.scaling, len(cos_sin)
    if scaling is None or longest <= scaling.original_max_position_embeddings or not config.query_scaling_beta:
        return SelfAttention(config, shard, dtype, device, cos_sin)
    lengths = torch.arange(longest, device=device) // scaling.original_max_position_embeddings
    scales = 1 + config.query_scaling_beta * torch.log(1 + lengths.float())
    return ScaledAttention(config, shard, dtype, device, cos_sin, scales.to(dtype))


def read(keys: Ministral3Keys) -> dict[str, Any]:
    return {
        "query_scaling_beta": keys.beta(),
        "layers": sliding_layers(keys, keys.sliding_window, [True] * keys.num_hidden_layers),
    }


FAMILY = Family(
    model_type="ministral3", keys=Ministral3Keys, read=read, build=partial(build_decoder, make_attention=make_attention)
)
