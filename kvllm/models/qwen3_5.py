"""Qwen3.5: three layers of Gated DeltaNet for each one of attention, whose output is gated. Text alone."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from msgspec import structs

from kvllm.attention.context import Attention
from kvllm.models.base import Family, build_decoder
from kvllm.models.config import ConfigKeys, ModelConfig
from kvllm.models.elementwise import rms_norm
from kvllm.models.gated_delta import convolve, gated_delta_rule
from kvllm.models.layers import QKVLinear, RowLinear, Weight, whole
from kvllm.models.parts import SelfAttention
from kvllm.models.recurrent import delta_layers
from kvllm.models.rope import TopKeys
from kvllm.models.weights import LinearWeight, MatrixRows, Packing
from kvllm.parallel import Shard, split

LINEAR, FULL = "linear_attention", "full_attention"


class Qwen35Keys(ConfigKeys, kw_only=True):
    PARTIAL = True
    DEFAULT_PARTIAL = 0.25
    LAYER_TYPES = (LINEAR,)

    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    attention_bias: bool = False
    full_attention_interval: int = 4
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32

    def rope_keys(self) -> TopKeys:
        """Without those for the rows and columns of images: a text has one position a token."""
        of_images = ("mrope_section", "mrope_interleaved")
        given = {key: value for key, value in (self.rope_parameters or {}).items() if key not in of_images}
        return structs.replace(self, rope_parameters=given or None)


def read(keys: Qwen35Keys) -> dict[str, Any]:
    every = range(keys.num_hidden_layers)
    kinds = keys.layer_types or [LINEAR if (i + 1) % keys.full_attention_interval else FULL for i in every]
    linear = tuple(i for i in every if kinds[i] == LINEAR)
    recurrent = delta_layers(
        linear,
        keys.linear_conv_kernel_dim,
        keys.linear_num_key_heads,
        keys.linear_num_value_heads,
        keys.linear_key_head_dim,
        keys.linear_value_head_dim,
    )
    return {
        "num_layers": keys.num_hidden_layers - len(linear),
        "recurrent": recurrent if linear else None,
        "qk_norm": True,
        "norm_offset": 1.0,
        "qkv_bias": keys.attention_bias,
        "output_bias": keys.attention_bias,
        "mtp_prefix": "mtp",
    }


class GatedQKVLinear(QKVLinear):
    """The projections to gates, queries, keys and values as one product. The checkpoint has the queries and the gates
    of each head in one tensor, in turns."""

    def __init__(self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, shard, dtype, device)
        rows = self.sizes[0] + sum(self.sizes)
        self.weight = LinearWeight(rows, config.hidden_size, dtype, device)
        self.bias = torch.empty(rows, dtype=dtype, device=device) if config.qkv_bias else None

    def weights(self, prefix: str) -> dict[str, Weight]:
        queries, (total, first) = self._rows("q"), self.heads["q"]
        head = queries // self.head_dim * self.head_dim  # before it, each head of queries has one of gates
        gates = torch.arange(len(queries)) + first * self.head_dim
        gates = gates + gates // self.head_dim * self.head_dim + self.head_dim
        found = self._weights(f"{prefix}.q_proj", 2 * total * self.head_dim, 0, torch.cat((gates, queries + head)))
        row = 2 * len(queries)
        for name in "kv":
            rows = self._rows(name)
            found |= self._weights(f"{prefix}.{name}_proj", self.heads[name][0] * self.head_dim, row, rows)
            row += len(rows)
        return found


class GatedAttention(SelfAttention):
    """Attention, whose output is multiplied by `sigmoid(gate(x))`."""

    def __init__(
        self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device, cos_sin: torch.Tensor
    ) -> None:
        super().__init__(config, shard, dtype, device, cos_sin)
        self.qkv = GatedQKVLinear(config, shard, dtype, device)

    def attend(self, x: torch.Tensor, positions: torch.Tensor, attention: Attention, index: int) -> torch.Tensor:
        size = self.qkv.sizes[0]
        gates, qkv = self.qkv.forward(x).split([size, sum(self.qkv.sizes)], 1)
        queries, keys, values = self.rotated(qkv.contiguous(), positions)
        attention.store(index, keys, values)
        attended = attention.run(index, queries, None)
        return attended * gates.sigmoid().view_as(attended)


class GatedDeltaNet:
    """A convolution over the last tokens, then the gated delta rule; the output is normalized and gated.

    One product gives queries, keys, values and gates of the rank's heads, another decays and strengths.
    """

    name = "linear_attn"

    def __init__(self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device) -> None:
        assert config.recurrent is not None
        self.sizes = sizes = config.recurrent
        self.eps = config.rms_norm_eps
        self.shard = shard
        self.key_heads = split(sizes.key_heads, shard, "key heads of linear attention")
        self.heads = sizes.value_heads // shard.world_size
        self.widths = [self.key_heads * sizes.key_dim] * 2 + [self.heads * sizes.value_dim] * 2
        width = sizes.value_heads * sizes.value_dim
        self.inputs = LinearWeight(sum(self.widths), config.hidden_size, dtype, device)
        self.controls = LinearWeight(2 * self.heads, config.hidden_size, dtype, device)
        self.taps = torch.empty(sizes.taps, sum(self.widths[:3]), dtype=dtype, device=device)
        self.log_rates, self.bias = (torch.empty(self.heads, device=device) for _ in range(2))
        self.norm = torch.empty(sizes.value_dim, dtype=dtype, device=device)
        self.out = RowLinear(width, config.hidden_size, shard, dtype, device)

    @cached_property
    def _rates(self) -> torch.Tensor:
        """float32 `[heads]`, below 0. Asked for when all weights are written."""
        return -self.log_rates.exp()

    def weights(self, prefix: str) -> dict[str, Weight]:
        own, sizes = self.shard.rank * self.heads, self.sizes
        return {
            **self.projections(prefix),
            f"{prefix}.conv1d.weight": Weight(
                (sizes.channels, 1, sizes.taps), self.taps.T.unsqueeze(1), order=self.mixed()
            ),
            f"{prefix}.A_log": Weight((sizes.value_heads,), self.log_rates, 0, own),
            f"{prefix}.dt_bias": Weight((sizes.value_heads,), self.bias, 0, own),
            f"{prefix}.norm.weight": whole(self.norm),
            **self.out.weights(f"{prefix}.out_proj"),
        }

    def projections(self, prefix: str) -> dict[str, Weight]:
        """The tensors of both products."""
        hidden, mixed, gates = self.inputs.in_features, sum(self.widths[:3]), self.widths[3]
        heads, own = self.sizes.value_heads, self.shard.rank * self.heads
        first, width = self.shard.rank * gates, heads * self.sizes.value_dim
        return {
            f"{prefix}.in_proj_qkv.weight": Weight(
                (self.sizes.channels, hidden), MatrixRows(self.inputs, 0, mixed), order=self.mixed(), quantized=True
            ),
            f"{prefix}.in_proj_z.weight": Weight(
                (width, hidden), MatrixRows(self.inputs, mixed, gates), 0, first, quantized=True
            ),
            f"{prefix}.in_proj_a.weight": Weight((heads, hidden), MatrixRows(self.controls, 0, self.heads), 0, own),
            f"{prefix}.in_proj_b.weight": Weight(
                (heads, hidden), MatrixRows(self.controls, self.heads, self.heads), 0, own
            ),
        }

    def mixed(self) -> torch.Tensor:
        """The channels that this rank has of queries, keys and values, which follow each other in the checkpoint."""
        sizes, rank = self.sizes, self.shard.rank
        keys, values = sizes.key_heads * sizes.key_dim, self.widths[2]
        own = torch.arange(self.widths[0]) + rank * self.widths[0]
        return torch.cat((own, own + keys, torch.arange(values) + 2 * keys + rank * values))

    def allocate(self, packing: Packing) -> None:
        self.inputs.allocate(packing)
        self.controls.allocate(packing.unquantized)
        self.out.allocate(packing)

    def attend(self, x: torch.Tensor, positions: torch.Tensor, attention: Attention, index: int) -> torch.Tensor:
        """`[T, heads * value_dim]`."""
        step, sizes = attention.recurrent, self.sizes
        assert step is not None
        projected = self.inputs.multiply(x)
        mixed = convolve(projected[:, : sum(self.widths[:3])], self.taps, step, index)
        decays, strengths = self.controls.multiply(x).float().chunk(2, 1)
        decays = self._rates * F.softplus(decays + self.bias)
        out = gated_delta_rule(mixed, decays, strengths.sigmoid(), self.key_heads, step, index)
        out = out.view(-1, sizes.value_dim)
        gates = projected[:, -self.widths[3] :].reshape(-1, sizes.value_dim)
        normalized = rms_norm(out, self.norm, self.eps).float() * F.silu(gates.float())
        return normalized.to(x.dtype).view(len(x), -1)

    def finish(self, attended: torch.Tensor) -> torch.Tensor:
        return self.out.forward(attended)


FAMILY = Family(
    model_type="qwen3_5_text",
    keys=Qwen35Keys,
    read=read,
    build=partial(build_decoder, make_attention=GatedAttention, make_recurrent=GatedDeltaNet),
    extra_layers=True,
)
