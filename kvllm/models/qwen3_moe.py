"""Qwen3-MoE: Qwen3 with a mixture of experts in the place of the MLP, in all layers or some."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvllm.errors import CheckpointError
from kvllm.models.base import Family, build_decoder
from kvllm.models.config import ConfigKeys
from kvllm.models.experts import ExpertsMLP
from kvllm.models.mixture import make_experts
from kvllm.models.windows import sliding_layers


class Qwen3MoeKeys(ConfigKeys, kw_only=True):
    num_key_value_heads: int | None = 4
    attention_bias: bool | None = None
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    num_experts: int | None = None
    num_local_experts: int | None = None
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None


def read(keys: Qwen3MoeKeys) -> dict[str, Any]:
    bias = bool(keys.attention_bias)
    window = keys.sliding_window if keys.use_sliding_window else None
    experts = make_experts(
        _num_experts(keys),
        keys.num_experts_per_tok,
        keys.moe_intermediate_size,
        keys.norm_topk_prob,
        dense_layers(keys.num_hidden_layers, keys.decoder_sparse_step, keys.mlp_only_layers),
    )
    return {
        "qk_norm": True,
        "qkv_bias": bias,
        "output_bias": bias,
        "experts": experts,
        "layers": sliding_layers(keys, window, [True] * keys.num_hidden_layers),
    }


def _num_experts(keys: Qwen3MoeKeys) -> int:
    """The number has two names, of older and of newer checkpoints."""
    given = {number for number in (keys.num_experts, keys.num_local_experts) if number is not None}
    if len(given) > 1:
        raise CheckpointError(f"num_experts is {keys.num_experts}, but num_local_experts is {keys.num_local_experts}")
    return given.pop() if given else 128


def dense_layers(num_layers: int, step: int, dense: list[int] | None) -> tuple[int, ...]:
    """The layers without experts: `dense`, and all but each `step`-th. Raises CheckpointError."""
    if step < 1:
        raise CheckpointError(f"decoder_sparse_step is {step}, but must be at least 1")
    return tuple(i for i in range(num_layers) if i in (dense or ()) or (i + 1) % step)


FAMILY = Family(
    model_type="qwen3_moe", keys=Qwen3MoeKeys, read=read, build=partial(build_decoder, make_expert_mlp=ExpertsMLP)
)
