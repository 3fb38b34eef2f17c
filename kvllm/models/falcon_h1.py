"""Falcon-H1: attention and Mamba-2 heads beside each other in every layer, with many multipliers.

Mamba-2 (Dao and Gu, arXiv 2405.21060) is the gated delta rule without what this takes back of a state: with strengths
that vanish, and values divided by them, the rule's correction is lost in rounding. So the states, kernels and copies of
that rule serve here, too.
"""

from __future__ import annotations

import math
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F

from kvllm.attention.context import Attention
from kvllm.errors import CheckpointError, ConfigError
from kvllm.kvcache.recurrent import RecurrentStep
from kvllm.models.base import Family, build_decoder
from kvllm.models.config import ConfigKeys, ModelConfig, refuse
from kvllm.models.elementwise import silu_mul
from kvllm.models.gated_delta import EPS, convolve, gated_delta_rule
from kvllm.models.layers import RowLinear, Weight
from kvllm.models.mamba import Mamba
from kvllm.models.parts import DecoderLayer, GatedMLP, SelfAttention
from kvllm.models.recurrent import RecurrentLayers, delta_layers
from kvllm.models.weights import LinearWeight, MatrixRows, Packing
from kvllm.parallel import Shard, kv_heads, split

VANISHING = 2.0**-40
"""A strength. A power of two, so that values are divided by it exactly."""
SCALARS = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")


class FalconH1Keys(ConfigKeys, kw_only=True):
    LAYER_TYPES = ("hybrid",)

    num_key_value_heads: int | None = 8
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 8192
    attention_bias: bool = False
    projectors_bias: bool = False
    mamba_d_ssm: int | None = 1024
    mamba_n_heads: int = 128
    mamba_d_head: int | str | None = "auto"
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_norm_before_gate: bool = True
    mamba_rms_norm: bool = False
    time_step_limit: Any = None
    embedding_multiplier: float = 1.0
    lm_head_multiplier: float = 1.0
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    ssm_multipliers: tuple[float, float, float, float, float] | None = None
    mlp_multipliers: tuple[float, float] | None = None


def read(keys: FalconH1Keys) -> dict[str, Any]:
    for name in ("projectors_bias", "mamba_proj_bias"):
        if getattr(keys, name):
            refuse(f"{name} is true: projections of Mamba-2 heads have a bias")
    if keys.time_step_limit not in (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}]):
        refuse(f"time_step_limit is {keys.time_step_limit}: steps have bounds")
    head_dim = keys.head_dim or keys.hidden_size // keys.num_attention_heads
    return {
        "recurrent": _layers(keys),
        "mamba": _mamba(keys),
        "qkv_bias": keys.attention_bias,
        "output_bias": keys.attention_bias,
        "mlp_bias": bool(keys.mlp_bias),
        "embedding_scale": keys.embedding_multiplier,
        "softmax_scale": keys.key_multiplier * head_dim**-0.5,
        "logit_divisor": 1 / keys.lm_head_multiplier,
    }


def _layers(keys: FalconH1Keys) -> RecurrentLayers:
    width = keys.mamba_expand * keys.hidden_size if keys.mamba_d_ssm is None else keys.mamba_d_ssm
    heads, size = keys.mamba_n_heads, keys.mamba_d_head
    size = width // max(1, heads) if size in (None, "auto") else size
    if not isinstance(size, int) or heads * size != width or heads % max(1, keys.mamba_n_groups):
        raise CheckpointError(
            f"{heads} Mamba-2 heads of {size} numbers in {keys.mamba_n_groups} groups cannot share {width} channels"
        )
    every, of_groups = tuple(range(keys.num_hidden_layers)), (keys.mamba_n_groups, heads, keys.mamba_d_state, size)
    return delta_layers(every, keys.mamba_d_conv, *of_groups, what="Mamba-2 heads")


def _mamba(keys: FalconH1Keys) -> Mamba:
    of_inputs, of_mlp = keys.ssm_multipliers or (1.0,) * 5, keys.mlp_multipliers or (1.0,) * 2
    scalars = {f"{name}_multiplier": getattr(keys, f"{name}_multiplier") for name in SCALARS}
    for name, value in (*scalars.items(), *(("ssm_multipliers", each) for each in of_inputs)):
        if not 1e-6 <= value <= 1e6:
            raise CheckpointError(f"{name} is {value}, but must be at least 1e-6 and at most 1e6")
    parts = zip(("gate", "x", "b", "c", "step"), of_inputs, strict=True)
    return Mamba(
        conv_bias=keys.mamba_conv_bias,
        norm=("before" if keys.mamba_norm_before_gate else "after") if keys.mamba_rms_norm else None,
        **{name: each * keys.ssm_in_multiplier for name, each in parts},
        output=keys.ssm_out_multiplier,
        attention_input=keys.attention_in_multiplier,
        attention_output=keys.attention_out_multiplier,
        mlp_gate=of_mlp[0],
        mlp_down=of_mlp[1],
    )


class Mamba2:
    """Mamba-2 heads: a convolution of x, b and c, the states, and a gate.

    One product gives c, b and x, which the convolution sees, then gates, and the heads' steps.
    """

    def __init__(self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device) -> None:
        assert config.recurrent is not None and config.mamba is not None
        self.sizes, self.mamba, self.shard, self.eps = config.recurrent, config.mamba, shard, config.rms_norm_eps
        self.groups = kv_heads(self.sizes.key_heads, shard)
        self.heads = split(self.sizes.value_heads, shard, "Mamba-2 heads")
        if self.mamba.norm and self.groups.replicas > 1:
            raise ConfigError(
                f"tensor_parallel_size {shard.world_size} is more than the model's {self.sizes.key_heads} groups of "
                "Mamba-2 heads, which are normalized together: lower it"
            )
        keys, values = self.groups.count * self.sizes.key_dim, self.heads * self.sizes.value_dim
        self.widths = [keys, keys, values, values, self.heads]
        self.mixed = sum(self.widths[:3])
        width = self.sizes.value_heads * self.sizes.value_dim
        self.inputs = LinearWeight(sum(self.widths), config.hidden_size, dtype, device)
        self.taps = torch.empty(self.sizes.taps, self.mixed, dtype=dtype, device=device)
        self.conv_bias = torch.empty(self.mixed, dtype=dtype, device=device) if self.mamba.conv_bias else None
        self.log_rates, self.bias, self.skip = (torch.empty(self.heads, device=device) for _ in range(3))
        self.norm = torch.empty(values, device=device) if self.mamba.norm else None
        self.out = RowLinear(width, config.hidden_size, shard, dtype, device)

    @cached_property
    def _factors(self) -> torch.Tensor:
        """float32, of every row of `inputs`."""
        of_parts = (self.mamba.c, self.mamba.b, self.mamba.x, self.mamba.gate, self.mamba.step)
        parts = [torch.full((width,), each) for width, each in zip(self.widths, of_parts, strict=True)]
        return torch.cat(parts).to(self.skip.device)

    @cached_property
    def _rates(self) -> torch.Tensor:
        """float32 `[heads]`, below 0. Asked for when all weights are written."""
        return -self.log_rates.exp()

    def weights(self, prefix: str) -> dict[str, Weight]:
        hidden, rows = self.inputs.in_features, self._rows()
        channels, width = self.sizes.channels, self.sizes.value_heads * self.sizes.value_dim
        mixed = torch.cat(rows[:3]) - width  # without gates, which come first
        first = self.shard.rank * self.heads
        found = {
            f"{prefix}.in_proj.weight": Weight(
                (width + channels + self.sizes.value_heads, hidden),
                MatrixRows(self.inputs, 0, self.inputs.out_features),
                order=torch.cat(rows),
                quantized=True,
            ),
            f"{prefix}.conv1d.weight": Weight((channels, 1, self.sizes.taps), self.taps.T.unsqueeze(1), order=mixed),
            **self.out.weights(f"{prefix}.out_proj"),
        }
        for name, vector in (("A_log", self.log_rates), ("dt_bias", self.bias), ("D", self.skip)):
            found[f"{prefix}.{name}"] = Weight((self.sizes.value_heads,), vector, 0, first)
        if self.conv_bias is not None:
            found[f"{prefix}.conv1d.bias"] = Weight((channels,), self.conv_bias, order=mixed)
        if self.norm is not None:
            found[f"{prefix}.norm.weight"] = Weight((width,), self.norm, 0, self.shard.rank * len(self.norm))
        return found

    def _rows(self) -> list[torch.Tensor]:
        """Of this rank's parts, in the order of `widths`, the rows of a checkpoint: gates, x, b, c and steps."""
        width, of_groups = self.sizes.value_heads * self.sizes.value_dim, self.sizes.key_heads * self.sizes.key_dim
        keys, values, rank = self.groups.first * self.sizes.key_dim, self.shard.rank * self.widths[2], self.shard.rank
        b = 2 * width + keys
        firsts = (b + of_groups, b, width + values, values, 2 * width + 2 * of_groups + rank * self.heads)
        return [torch.arange(first, first + count) for first, count in zip(firsts, self.widths, strict=True)]

    def allocate(self, packing: Packing) -> None:
        self.inputs.allocate(packing)
        self.out.allocate(packing)

    def attend(self, x: torch.Tensor, attention: Attention, index: int) -> torch.Tensor:
        """`[T, hidden_size]` -> `[T, channels of this rank's heads]`."""
        assert attention.recurrent is not None
        projected = (self.inputs.multiply(x) * self._factors).to(x.dtype)
        mixed, gates, steps = projected.split([self.mixed, *self.widths[3:]], 1)
        mixed = convolve(mixed, self.taps, attention.recurrent, index, silu=self.conv_bias is None)
        if self.conv_bias is not None:
            mixed = F.silu(mixed + self.conv_bias)
        out = self.scan(mixed.float(), F.softplus(steps.float() + self.bias), attention.recurrent, index)
        return self._gated(out.flatten(1), gates.float()).to(x.dtype)

    def scan(self, mixed: torch.Tensor, steps: torch.Tensor, step: RecurrentStep, index: int) -> torch.Tensor:
        """`S <- exp(step A) S + step b x^T; c S + D x`, with a state S of each head: `[T, heads, value_dim]`."""
        c, b, x = mixed.split(self.widths[:3], 1)
        x = x.unflatten(1, (self.heads, -1))
        strengths = torch.full_like(steps, VANISHING)
        values = x * (steps * self._lengths(b) / VANISHING).unsqueeze(2)
        mixed = torch.cat((c, b, values.flatten(1)), 1)
        read = gated_delta_rule(mixed, steps * self._rates, strengths, self.groups.count, step, index)
        scale = self._lengths(c) * math.sqrt(self.sizes.key_dim)
        return read * scale.unsqueeze(2) + x * self.skip.unsqueeze(1)

    def _lengths(self, vectors: torch.Tensor) -> torch.Tensor:
        """`[T, groups * key_dim]` -> `[T, heads]`: what the rule divides the vector of a head's group by."""
        squares = vectors.unflatten(1, (self.groups.count, -1)).square().sum(2)
        return (squares + EPS).sqrt().repeat_interleave(self.heads // self.groups.count, 1)

    def _gated(self, out: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        gates = F.silu(gates)
        if self.norm is None:
            return out * gates
        out = out * gates if self.mamba.norm == "after" else out
        groups = out.unflatten(1, (self.groups.count, -1))
        out = F.rms_norm(groups, groups.shape[2:], eps=self.eps).flatten(1) * self.norm
        return out * gates if self.mamba.norm == "before" else out


class ParallelMixer(SelfAttention):
    """The sum of attention and Mamba-2 heads."""

    def __init__(
        self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device, cos_sin: torch.Tensor
    ) -> None:
        super().__init__(config, shard, dtype, device, cos_sin)
        self.mamba2 = Mamba2(config, shard, dtype, device)
        self.multipliers = self.mamba2.mamba

    def weights(self, prefix: str) -> dict[str, Weight]:
        return super().weights(prefix) | self.mamba2.weights(f"{prefix.removesuffix(self.name)}mamba")

    def allocate(self, packing: Packing) -> None:
        super().allocate(packing)
        self.mamba2.allocate(packing)

    def attend(self, x: torch.Tensor, positions: torch.Tensor, attention: Attention, index: int) -> torch.Tensor:
        """`[T, query_heads * head_dim + channels of Mamba-2 heads]`."""
        attended = super().attend(x * self.multipliers.attention_input, positions, attention, index)
        return torch.cat((attended.flatten(1), self.mamba2.attend(x, attention, index)), 1)

    def finish(self, attended: torch.Tensor) -> torch.Tensor:
        heads, states = attended.split([self.num_query_heads * self.head_dim, self.mamba2.widths[2]], 1)
        found = self.o.forward(heads) * self.multipliers.attention_output
        return found.add_(self.mamba2.out.forward(states), alpha=self.multipliers.output)


class FalconH1MLP(GatedMLP):
    """A gated MLP with multipliers of the gate and the result."""

    def __init__(self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, shard, dtype, device, name="feed_forward")
        assert config.mamba is not None
        self.multipliers = config.mamba.mlp_gate, config.mamba.mlp_down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up.forward(x)
        gate_up[:, : self.gate_up.size] *= self.multipliers[0]
        return self.down.forward(silu_mul(gate_up)) * self.multipliers[1]


class FalconH1Layer(DecoderLayer):
    def norms(self) -> dict[str, torch.Tensor | None]:
        return {"input_layernorm": self.input_norm, "pre_ff_layernorm": self.post_attention_norm}


build = partial(
    build_decoder,
    make_attention=ParallelMixer,
    make_mlp=FalconH1MLP,
    make_layer=FalconH1Layer,
    final_norm_name="final_layernorm",
)

FAMILY = Family(model_type="falcon_h1", keys=FalconH1Keys, read=read, build=build)
