"""LFM2: gated short convolutions in most layers, attention with norms of heads in the others."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import torch

from kvllm.attention.context import Attention
from kvllm.models.base import Family, build_decoder
from kvllm.models.config import ConfigKeys, ModelConfig, check_size, refuse
from kvllm.models.gated_delta import convolve
from kvllm.models.layers import MergedColumnLinear, RowLinear, Weight
from kvllm.models.parts import DecoderLayer, GatedMLP, SelfAttention
from kvllm.models.recurrent import RecurrentLayers
from kvllm.models.weights import Packing
from kvllm.parallel import Shard

CONVOLUTION = "conv"


class Lfm2BaseKeys(ConfigKeys, kw_only=True):
    """The keys of LFM2 with and without experts."""

    LAYER_TYPES = (CONVOLUTION,)
    THETA = 1e6

    num_key_value_heads: int | None = 8
    rms_norm_eps: float = msgspec.field(name="norm_eps", default=1e-5)
    tie_word_embeddings: bool = True
    tie_embedding: bool | None = None
    conv_L_cache: int = 3
    conv_bias: bool = False


class Lfm2Keys(Lfm2BaseKeys, kw_only=True):
    intermediate_size: int = 12288
    block_ff_dim: int | None = None
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: float | None = 1.0
    block_multiple_of: int = 256
    full_attn_idxs: list[int] | None = None


def read_layers(keys: Lfm2BaseKeys, layer_types: list[str] | None) -> dict[str, Any]:
    """The fields that LFM2 has with and without experts. layer_types: None: all layers have attention."""
    if keys.conv_bias:
        refuse("conv_bias is true: convolutions have a bias")
    kinds = layer_types or []
    indices = tuple(i for i, kind in enumerate(kinds) if kind == CONVOLUTION)
    layers = RecurrentLayers(indices=indices, taps=keys.conv_L_cache, channels=keys.hidden_size)
    return {
        "num_layers": keys.num_hidden_layers - len(indices),
        "recurrent": layers if indices else None,
        "qk_norm": True,
        "tie_word_embeddings": keys.tie_word_embeddings if keys.tie_embedding is None else keys.tie_embedding,
    }


def _intermediate_size(keys: Lfm2Keys) -> int:
    """That of the MLP: two thirds of what the config says, and then a multiple of a size, where it is adjusted."""
    size, factor = (
        keys.intermediate_size if keys.block_ff_dim is None else keys.block_ff_dim,
        keys.block_ffn_dim_multiplier,
    )
    check_size("intermediate_size", size)
    if keys.block_auto_adjust_ff_dim:
        size = 2 * size // 3
    if keys.block_auto_adjust_ff_dim and factor is not None:
        if not 0 < factor <= 100 or keys.block_multiple_of < 1:
            refuse(f"block_ffn_dim_multiplier is {factor} and block_multiple_of {keys.block_multiple_of}")
        size = -(-int(factor * size) // keys.block_multiple_of) * keys.block_multiple_of
    check_size("intermediate_size", size)
    return size


def read(keys: Lfm2Keys) -> dict[str, Any]:
    kinds = keys.layer_types
    if kinds is None and keys.full_attn_idxs is not None:
        attends = set(keys.full_attn_idxs)
        kinds = ["full_attention" if i in attends else CONVOLUTION for i in range(keys.num_hidden_layers)]
    return {**read_layers(keys, kinds), "intermediate_size": _intermediate_size(keys)}


class Lfm2Attention(SelfAttention):
    OUTPUT = "out_proj"
    NORMS = ("q_layernorm", "k_layernorm")


class ShortConvolution:
    """`out(c * convolution(b * x))`, with b, c and x projections of the input. Ranks share out the channels."""

    name = CONVOLUTION

    def __init__(self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device) -> None:
        assert config.recurrent is not None
        self.shard = shard
        hidden, channels, taps = config.hidden_size, config.recurrent.channels, config.recurrent.taps
        self.shape = (channels, 1, taps)
        self.inputs = MergedColumnLinear(hidden, channels, ("b", "c", "x"), shard, dtype, device, fused="in_proj")
        self.taps = torch.empty(taps, self.inputs.size, dtype=dtype, device=device)
        self.out = RowLinear(channels, hidden, shard, dtype, device)

    def weights(self, prefix: str) -> dict[str, Weight]:
        first = self.shard.rank * self.inputs.size
        return {
            **self.inputs.weights(prefix),
            f"{prefix}.conv.weight": Weight(self.shape, self.taps.T.unsqueeze(1), 0, first),
            **self.out.weights(f"{prefix}.out_proj"),
        }

    def allocate(self, packing: Packing) -> None:
        self.inputs.allocate(packing)
        self.out.allocate(packing)

    def attend(self, x: torch.Tensor, positions: torch.Tensor, attention: Attention, index: int) -> torch.Tensor:
        """`[T, channels]`, those of this rank."""
        assert attention.recurrent is not None
        before, after, x = self.inputs.forward(x).chunk(3, 1)
        return after * convolve(before * x, self.taps, attention.recurrent, index, silu=False)

    def finish(self, attended: torch.Tensor) -> torch.Tensor:
        return self.out.forward(attended)


class Lfm2Layer(DecoderLayer):
    def norms(self) -> dict[str, torch.Tensor | None]:
        return {"operator_norm": self.input_norm, "ffn_norm": self.post_attention_norm}


build = partial(
    build_decoder,
    make_attention=Lfm2Attention,
    make_recurrent=ShortConvolution,
    make_mlp=partial(GatedMLP, name="feed_forward", names=("w1", "w3"), down="w2"),
    make_layer=Lfm2Layer,
    final_norm_name="embedding_norm",
)

FAMILY = Family(model_type="lfm2", keys=Lfm2Keys, read=read, build=build)
