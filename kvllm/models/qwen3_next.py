"""Qwen3-Next: the layers of Qwen3.5, with their projections in another order, and experts, one for all tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kvllm.models.base import Family, build_decoder
from kvllm.models.config import ModelConfig
from kvllm.models.experts import SharedExpertMLP, whole_matrix
from kvllm.models.layers import Weight
from kvllm.models.mixture import make_experts
from kvllm.models.qwen3_5 import GatedAttention, GatedDeltaNet, Qwen35Keys
from kvllm.models.qwen3_5 import read as read_layers
from kvllm.models.qwen3_moe import dense_layers
from kvllm.models.weights import LinearWeight, MatrixRows, Packing
from kvllm.parallel import Shard


class Qwen3NextKeys(Qwen35Keys, kw_only=True):
    num_key_value_heads: int | None = 2
    num_experts: int = 512
    num_experts_per_tok: int = 10
    moe_intermediate_size: int = 512
    shared_expert_intermediate_size: int = 512
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None


def read(keys: Qwen3NextKeys) -> dict[str, Any]:
    experts = make_experts(
        keys.num_experts,
        keys.num_experts_per_tok,
        keys.moe_intermediate_size,
        keys.norm_topk_prob,
        dense_layers(keys.num_hidden_layers, keys.decoder_sparse_step, keys.mlp_only_layers),
        shared_intermediate_size=keys.shared_expert_intermediate_size,
    )
    return {**read_layers(keys), "experts": experts}


class GatedSharedExpertMLP(SharedExpertMLP):
    """The MLP for all tokens is multiplied by `sigmoid(gate(x))`."""

    SHARED = "shared_expert"

    def __init__(self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, shard, dtype, device)
        self.shared_gate = LinearWeight(1, config.hidden_size, dtype, device)

    def weights(self, prefix: str) -> dict[str, Weight]:
        return {**super().weights(prefix), f"{prefix}.shared_expert_gate.weight": whole_matrix(self.shared_gate)}

    def allocate(self, packing: Packing) -> None:
        super().allocate(packing)
        self.shared_gate.allocate(packing.unquantized)

    def forward_shared(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared_gate.multiply(x).sigmoid() * super().forward_shared(x)


class InTurnsDeltaNet(GatedDeltaNet):
    """Gated DeltaNet of a checkpoint that has, for each key head in turn, its query, its key, and the values and gates
    of its value heads in one tensor, and their strengths and decays in another."""

    def projections(self, prefix: str) -> dict[str, Weight]:
        sizes, hidden = self.sizes, self.inputs.in_features
        values = sizes.value_heads // sizes.key_heads
        mixed = self._rows((sizes.key_dim, sizes.key_dim, values * sizes.value_dim, values * sizes.value_dim))
        strengths, decays = self._rows((values, values)).chunk(2)
        found = {"in_proj_qkvz": (self.inputs, mixed), "in_proj_ba": (self.controls, torch.cat((decays, strengths)))}
        whole = {
            "in_proj_qkvz": sizes.channels + sizes.value_heads * sizes.value_dim,
            "in_proj_ba": 2 * sizes.value_heads,
        }
        return {
            f"{prefix}.{name}.weight": Weight(
                (whole[name], hidden), MatrixRows(weight, 0, len(rows)), order=rows, quantized=weight is self.inputs
            )
            for name, (weight, rows) in found.items()
        }

    def _rows(self, widths: tuple[int, ...]) -> torch.Tensor:
        """Rows of a tensor that has parts of `widths` for each key head: the first part of all heads of this rank, then
        the second, and so on."""
        heads = (torch.arange(self.key_heads) + self.shard.rank * self.key_heads)[:, None] * sum(widths)
        parts = torch.arange(sum(widths)).split(widths)
        return torch.cat([(heads + part).flatten() for part in parts])


FAMILY = Family(
    model_type="qwen3_next",
    keys=Qwen3NextKeys,
    read=read,
    build=partial(
        build_decoder,
        make_attention=GatedAttention,
        make_recurrent=InTurnsDeltaNet,
        make_expert_mlp=GatedSharedExpertMLP,
    ),
    extra_layers=True,
)
