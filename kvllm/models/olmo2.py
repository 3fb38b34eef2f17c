"""OLMo 2: norms after attention and MLP instead of in front of them, and of all queries and all keys of a token."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kvllm.models.base import Family, build_decoder
from kvllm.models.config import ConfigKeys, ModelConfig
from kvllm.models.elementwise import rms_norm
from kvllm.models.layers import Weight
from kvllm.models.parts import MLP, DecoderLayer, SelfAttention, TokenMixer, norm_weight, normalized
from kvllm.parallel import Shard


class Olmo2Keys(ConfigKeys, kw_only=True):
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False


class Olmo2Attention(SelfAttention):
    """Attention whose queries, all heads together, are normalized before the rotation, and whose keys are, too."""

    def __init__(
        self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device, cos_sin: torch.Tensor
    ) -> None:
        super().__init__(config, shard, dtype, device, cos_sin)
        self.shard = shard
        self.query_norm, self.key_norm = (norm_weight(config, size, dtype, device) for size in self.qkv.sizes[:2])
        # Ranks may hold the same keys, whose squares count as often then.
        self.counts = [shard.world_size * size for size in self.qkv.sizes[:2]]

    def weights(self, prefix: str) -> dict[str, Weight]:
        found = super().weights(prefix)
        for name, norm in (("q", self.query_norm), ("k", self.key_norm)):
            total, first = self.qkv.heads[name]
            start = first * self.head_dim
            found[f"{prefix}.{name}_norm.weight"] = Weight((total * self.head_dim,), norm, 0, start)
        return found

    def _rotate(self, heads: torch.Tensor, positions: torch.Tensor, num_kv_heads: int) -> None:
        queries, keys = self.qkv.sizes[0], num_kv_heads * self.head_dim
        parts = [heads[:, :queries], heads[:, queries : queries + keys]]
        squares = self.shard.all_reduce(torch.stack([part.float().square().sum(1) for part in parts], 1))
        for i, norm in enumerate((self.query_norm, self.key_norm)):
            scales = torch.rsqrt(squares[:, i : i + 1] / self.counts[i] + self.eps)
            if parts[i].shape[1]:
                parts[i].copy_(parts[i].float() * scales * norm)
        super()._rotate(heads, positions, num_kv_heads)


class Olmo2Layer(DecoderLayer):
    """A layer whose parts have a norm after them alone."""

    def __init__(
        self, config: ModelConfig, attention: TokenMixer, mlp: MLP, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(config, attention, mlp, dtype, device)
        self.input_norm = None
        self.mlp_output_norm = self.post_attention_norm.new_empty(config.hidden_size)

    def norms(self) -> dict[str, torch.Tensor | None]:
        return {
            "post_attention_layernorm": self.post_attention_norm,
            "post_feedforward_layernorm": self.mlp_output_norm,
        }

    def finish(self, attended: torch.Tensor, residual: torch.Tensor, next_norm: torch.Tensor | None) -> torch.Tensor:
        residual.add_(rms_norm(self.attention.finish(attended), self.post_attention_norm, self.eps))
        residual.add_(normalized(self.mlp.forward(residual), self.mlp_output_norm, self.eps))
        return normalized(residual, next_norm, self.eps)


def read(keys: Olmo2Keys) -> dict[str, Any]:
    return {"qkv_bias": keys.attention_bias, "output_bias": keys.attention_bias, "float32_norms": True}


build = partial(build_decoder, make_attention=Olmo2Attention, make_layer=Olmo2Layer)

FAMILY = Family(model_type="olmo2", keys=Olmo2Keys, read=read, build=build)
