"""The parts of a decoder layer: attention without the attention itself, the MLP, and the layer of both.

Every part has `weights`, the tensors of the checkpoint that it holds, and `allocate`, which makes room for them.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kvllm.attention.context import Attention
from kvllm.models.config import ModelConfig
from kvllm.models.elementwise import add_rms_norm, gelu_mul, rms_norm, rotary, silu_mul
from kvllm.models.layers import MergedColumnLinear, QKVLinear, RowLinear, Weight, whole
from kvllm.models.weights import Packing
from kvllm.parallel import Shard


def norm_weight(config: ModelConfig, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Room for the weight of an RMSNorm `[size]`. With an offset, 16 bits would lose what lies beside the 1."""
    return torch.empty(
        size, dtype=torch.float32 if config.float32_norms or config.norm_offset else dtype, device=device
    )


class TokenMixer(Protocol):
    """The part of a layer in which tokens see those before them.

    name: its name in a checkpoint's layers.
    """

    name: str

    def weights(self, prefix: str) -> dict[str, Weight]:
        """As of an MLP."""
        ...

    def allocate(self, packing: Packing) -> None:
        """As of an MLP."""
        ...

    def attend(self, x: torch.Tensor, positions: torch.Tensor, attention: Attention, index: int) -> torch.Tensor:
        """`[T, hidden_size]` -> the input of `finish`, with a row for each token.

        index: of the layer among those with a mixer of this kind.
        """
        ...

    def finish(self, attended: torch.Tensor) -> torch.Tensor:
        """What `attend` returns, or some rows of it -> `[T, hidden_size]`, summed over the ranks."""
        ...


def normalized(x: torch.Tensor, norm: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`[T, hidden_size]`: its RMSNorm, or `x` itself where there is no norm."""
    return x if norm is None else rms_norm(x, norm, eps)


class SelfAttention:
    """The work around attention in a layer: the projections, the norms of heads, if any, and the rotation.

    num_query_heads, num_kv_heads: of this rank.
    cos_sin: float32 `[max_model_len, head_dim]`, from `rotary_table`; the layers of a model share it.
    sinks: float32 `[query_heads]`, those of this rank: learned scores of the softmax, where a family has them.

    OUTPUT, NORMS: names of the output's projection, and of the norms of queries and keys, in a checkpoint.
    """

    name = "self_attn"
    OUTPUT = "o_proj"
    NORMS = ("q_norm", "k_norm")
    sinks: torch.Tensor | None = None

    def __init__(
        self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device, cos_sin: torch.Tensor
    ) -> None:
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        self.cos_sin = cos_sin
        self.qkv = QKVLinear(config, shard, dtype, device, fused=config.fused_projections)
        self.num_query_heads, self.num_kv_heads = self.qkv.num_query_heads, self.qkv.num_kv_heads
        self.norm_offset = config.norm_offset
        self.q_norm = norm_weight(config, config.head_dim, dtype, device) if config.qk_norm else None
        self.k_norm = norm_weight(config, config.head_dim, dtype, device) if config.qk_norm else None
        width = config.num_query_heads * config.head_dim
        self.o = RowLinear(width, config.hidden_size, shard, dtype, device, bias=config.output_bias)

    def weights(self, prefix: str) -> dict[str, Weight]:
        found = {**self.qkv.weights(prefix), **self.o.weights(f"{prefix}.{self.OUTPUT}")}
        for name, norm in zip(self.NORMS, (self.q_norm, self.k_norm), strict=True):
            if norm is not None:
                found[f"{prefix}.{name}.weight"] = whole(norm, self.norm_offset, self.qkv.order)
        return found

    def allocate(self, packing: Packing) -> None:
        self.qkv.allocate(packing)
        self.o.allocate(packing)

    def attend(self, x: torch.Tensor, positions: torch.Tensor, attention: Attention, index: int) -> torch.Tensor:
        """`[T, hidden_size]` -> `[T, query_heads, head_dim]`."""
        queries, keys, values = self.project(x, positions)
        attention.store(index, keys, values)
        return attention.run(index, queries, self.sinks)

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`[T, hidden_size]` -> rotated queries `[T, query_heads, head_dim]`; rotated keys, and values,
        `[T, kv_heads, head_dim]`."""
        return self.rotated(self.qkv.forward(x), positions)

    def rotated(self, qkv: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`[T, (query_heads + 2 * kv_heads) * head_dim]`, changed in place -> as `project`."""
        self._rotate(qkv, positions, self.num_kv_heads)
        queries, keys, values = qkv.split(self.qkv.sizes, 1)
        heads = (-1, self.head_dim)
        return queries.unflatten(1, heads), keys.unflatten(1, heads), values.unflatten(1, heads)

    def project_queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The queries of `project` alone."""
        queries = self.qkv.forward_queries(x)
        self._rotate(queries, positions, 0)
        return queries.unflatten(1, (-1, self.head_dim))

    def finish(self, attended: torch.Tensor) -> torch.Tensor:
        """Attention's result `[T, query_heads, head_dim]` -> `[T, hidden_size]`."""
        return self.o.forward(attended.flatten(1))

    def _rotate(self, heads: torch.Tensor, positions: torch.Tensor, num_kv_heads: int) -> None:
        rotary(
            heads,
            positions,
            self.cos_sin,
            self.num_query_heads,
            num_kv_heads,
            self.head_dim,
            self.q_norm,
            self.k_norm,
            self.eps,
        )


class MLP(Protocol):
    """The part of a layer that computes each token by itself.

    name: its name in a checkpoint's layers.
    """

    name: str

    def weights(self, prefix: str) -> dict[str, Weight]:
        """The tensors of the checkpoint by name; each name begins with `prefix`, such as `model.layers.0.mlp`."""
        ...

    def allocate(self, packing: Packing) -> None:
        """Make room for the matrices, before they are written."""
        ...

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, hidden_size]` -> `[T, hidden_size]`, summed over the ranks."""
        ...


class GatedMLP:
    """`down(silu(gate(x)) * up(x))`, or that with GELU.

    inner: its size, if not `config.intermediate_size`. name, names, down: of the part and of its projections in a
        checkpoint. fused: the name of one tensor of gate and up projection, if there is one.
    """

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
        *,
        inner: int | None = None,
        name: str = "mlp",
        names: tuple[str, str] = ("gate_proj", "up_proj"),
        fused: str | None = None,
        down: str = "down_proj",
        gelu: bool = False,
    ) -> None:
        self.name = name
        self.gelu = gelu
        self._down = down
        hidden, inner, bias = config.hidden_size, inner or config.intermediate_size, config.mlp_bias
        fused = fused or ("gate_up_proj" if config.fused_projections else None)
        self.gate_up = MergedColumnLinear(hidden, inner, names, shard, dtype, device, bias=bias, fused=fused)
        self.down = RowLinear(inner, hidden, shard, dtype, device, bias=bias)

    def weights(self, prefix: str) -> dict[str, Weight]:
        return {**self.gate_up.weights(prefix), **self.down.weights(f"{prefix}.{self._down}")}

    def allocate(self, packing: Packing) -> None:
        self.gate_up.allocate(packing)
        self.down.allocate(packing)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, hidden_size]` -> `[T, hidden_size]`."""
        gate_up = self.gate_up.forward(x)
        return self.down.forward(gelu_mul(gate_up) if self.gelu else silu_mul(gate_up))


class DecoderLayer:
    """One layer: attention, then the MLP, each after a norm and added to the residual.

    attention_output_norm, mlp_output_norm: `[hidden_size]`, norms of what is added, or None.
    """

    attention_output_norm: torch.Tensor | None = None
    mlp_output_norm: torch.Tensor | None = None

    def __init__(
        self, config: ModelConfig, attention: TokenMixer, mlp: MLP, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.eps = config.residual_eps
        self.norm_offset = config.norm_offset
        self.input_norm: torch.Tensor | None = norm_weight(config, config.hidden_size, dtype, device)
        self.attention = attention
        self.post_attention_norm = norm_weight(config, config.hidden_size, dtype, device)
        self.mlp = mlp

    def norms(self) -> dict[str, torch.Tensor | None]:
        """The weights of the layer's own norms, by name."""
        return {"input_layernorm": self.input_norm, "post_attention_layernorm": self.post_attention_norm}

    def weights(self, prefix: str) -> dict[str, Weight]:
        return {
            **{
                f"{prefix}.{name}.weight": whole(norm, self.norm_offset)
                for name, norm in self.norms().items()
                if norm is not None
            },
            **self.attention.weights(f"{prefix}.{self.attention.name}"),
            **self.mlp.weights(f"{prefix}.{self.mlp.name}"),
        }

    def allocate(self, packing: Packing) -> None:
        self.attention.allocate(packing)
        self.mlp.allocate(packing)

    def normalized(self, residual: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        """What the model's first layer reads: the residual `[T, hidden_size]`, or its norm."""
        return normalized(residual, norm, self.eps)

    def finish(self, attended: torch.Tensor, residual: torch.Tensor, next_norm: torch.Tensor | None) -> torch.Tensor:
        """All that follows attention.

        attended: `[T, query_heads, head_dim]`. residual: `[T, hidden_size]`, updated in place. next_norm:
        `[hidden_size]`, the norm that follows the layer, because a residual addition and a norm are one operation.
            None: the next layer has none, and reads the residual.
        Returns the normalized input of the next layer `[T, hidden_size]`.
        """
        x = normalized(self.attention.finish(attended), self.attention_output_norm, self.eps)
        x = add_rms_norm(residual, x, self.post_attention_norm, self.eps)
        x = normalized(self.mlp.forward(x), self.mlp_output_norm, self.eps)
        assert next_norm is not None
        return add_rms_norm(residual, x, next_norm, self.eps)
