"""Mixtral: Mistral with a mixture of experts in the place of the MLP."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvllm.models.base import Family, build_decoder
from kvllm.models.config import ConfigKeys
from kvllm.models.experts import ExpertsMLP
from kvllm.models.mixture import make_experts
from kvllm.models.windows import sliding_layers


class MixtralKeys(ConfigKeys, kw_only=True):
    THETA = 1e6

    num_key_value_heads: int | None = 8
    rms_norm_eps: float = 1e-5
    num_local_experts: int = 8
    num_experts_per_tok: int = 2


class MixtralMLP(ExpertsMLP):
    """The experts under Mixtral's names."""

    name = "block_sparse_moe"
    NAMES = ("w1", "w3", "w2")


def read(keys: MixtralKeys) -> dict[str, Any]:
    return {
        "experts": make_experts(keys.num_local_experts, keys.num_experts_per_tok, keys.intermediate_size),
        "layers": sliding_layers(keys, keys.sliding_window, [True] * keys.num_hidden_layers),
    }


FAMILY = Family(
    model_type="mixtral", keys=MixtralKeys, read=read, build=partial(build_decoder, make_expert_mlp=MixtralMLP)
)
