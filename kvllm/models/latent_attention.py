"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): all heads share one latent vector a token.

The cache has one KV head, whatever the model's: its key is the latent and a rotated part. Its value is the same vector,
stored once; of what is attended, the latent's channels are read. So methods that weigh by the lengths of values see the
rotated part, too.
A head's own projections of the latent are part of its queries and of its output instead (the paper's "absorbed" form),
for prompts, too: they read the pairs that decoding reads, and compression methods see one head of keys.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec
import torch

from kvllm.errors import CheckpointError
from kvllm.models.config import ModelConfig, refuse
from kvllm.models.elementwise import rms_norm, rotary
from kvllm.models.glm4_moe import SigmoidExpertsKeys
from kvllm.models.latent import Latent
from kvllm.models.layers import RowLinear, Weight, row_part, whole
from kvllm.models.parts import SelfAttention
from kvllm.models.rope import TopKeys, yarn_strength
from kvllm.models.weights import LinearWeight, MatrixRows, Packing
from kvllm.parallel import Shard, split

EPS = 1e-6
"""Of the norms of latents, whatever the config says of the others."""


class LatentKeys(SigmoidExpertsKeys, kw_only=True):
    """The keys of families with latent attention, all of which have such experts. `head_dim` and `num_key_value_heads`
    become those of the cache.
    """

    PARTIAL = True
    INTERLEAVED = True
    SCALED = True

    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128
    rope_interleave: bool = True
    attention_bias: bool = False

    def __post_init__(self) -> None:
        self.head_dim, self.num_key_value_heads = self.kv_lora_rank + self.qk_rope_head_dim, 1

    def rope_keys(self) -> TopKeys:
        """With the part of a cached key that is rotated."""
        assert self.head_dim
        share = self.qk_rope_head_dim / self.head_dim
        given = {name: rope and {**rope, "partial_rotary_factor": share} for name, rope in self._ropes().items()}
        return msgspec.structs.replace(self, partial_rotary_factor=share, **given)

    def latent_fields(self) -> dict[str, Any]:
        """The fields of ModelConfig. Raises CheckpointError for sizes and options that are not computed."""
        sizes = (
            self.kv_lora_rank,
            self.qk_rope_head_dim,
            self.qk_nope_head_dim,
            self.v_head_dim,
            self.q_lora_rank or 1,
        )
        if min(sizes) < 1 or max(sizes) > 1 << 14:
            raise CheckpointError(
                f"the sizes of latent attention are {sizes}, but must be at least 1, at most {1 << 14}"
            )
        if self.attention_bias:
            refuse("attention_bias is true: projections to latents have a bias")
        if not self.rope_interleave:
            refuse("rope_interleave is false: RoPE turns channels of either half of a head together")
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        for rope in self._ropes().values():
            if rope and rope.get("mscale_all_dim") and rope.get("factor"):
                scale *= yarn_strength(rope["factor"], rope["mscale_all_dim"]) ** 2
                break
        latent = Latent(
            query_rank=self.q_lora_rank,
            rank=self.kv_lora_rank,
            plain=self.qk_nope_head_dim,
            rotated=self.qk_rope_head_dim,
            value=self.v_head_dim,
        )
        return {"latent": latent, "softmax_scale": scale}

    def _ropes(self) -> dict[str, dict[str, Any] | None]:
        return {"rope_parameters": self.rope_parameters, "rope_scaling": self.rope_scaling}


class LatentAttention(SelfAttention):
    """`attend` over latents. One product gives the latents of queries, or these themselves, and of keys and values.

    The channels of a cached key are in `channel_order`, of the rotated ones and then the latent.
    """

    def __init__(
        self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device, cos_sin: torch.Tensor
    ) -> None:
        assert config.latent is not None
        self.sizes = sizes = config.latent
        self.head_dim, self.cos_sin, self.shard = config.head_dim, cos_sin, shard
        self.total_heads = config.num_query_heads
        self.num_query_heads, self.num_kv_heads = split(self.total_heads, shard, "query heads"), 1
        self.query_size = self.num_query_heads * (sizes.plain + sizes.rotated)
        self.widths = (sizes.query_rank or self.query_size, sizes.rank, sizes.rotated)
        self.inputs = LinearWeight(sum(self.widths), config.hidden_size, dtype, device)
        self.queries = LinearWeight(self.query_size, sizes.query_rank, dtype, device) if sizes.query_rank else None
        self.query_norm = torch.empty(sizes.query_rank or 0, dtype=dtype, device=device)
        self.norm = torch.empty(sizes.rank, dtype=dtype, device=device)
        rows = self.num_query_heads * (sizes.plain + sizes.value)
        self.heads = torch.empty(rows, sizes.rank, dtype=dtype, device=device)
        self.o = RowLinear(self.total_heads * sizes.value, config.hidden_size, shard, dtype, device)

    def weights(self, prefix: str) -> dict[str, Weight]:
        total = self.total_heads * (self.sizes.plain + self.sizes.rotated)
        first, *others = self.widths
        found = {
            f"{prefix}.kv_a_proj_with_mqa.weight": _rows(self.inputs, first, sum(others)),
            f"{prefix}.kv_a_layernorm.weight": whole(self.norm),
            f"{prefix}.kv_b_proj.weight": self._heads_weight(),
            **self.o.weights(f"{prefix}.o_proj"),
        }
        if self.queries is None:
            return found | {f"{prefix}.q_proj.weight": row_part(total, MatrixRows(self.inputs, 0, first), self.shard)}
        part = MatrixRows(self.queries, 0, self.query_size)
        return found | {
            f"{prefix}.q_a_proj.weight": _rows(self.inputs, 0, first),
            f"{prefix}.q_a_layernorm.weight": whole(self.query_norm),
            f"{prefix}.q_b_proj.weight": row_part(total, part, self.shard),
        }

    def _heads_weight(self) -> Weight:
        rows = self.heads.shape[0]
        return Weight(
            (rows * self.shard.world_size, self.sizes.rank), self.heads, 0, self.shard.rank * rows, quantized=True
        )

    def allocate(self, packing: Packing) -> None:
        self.inputs.allocate(packing)
        if self.queries is not None:
            self.queries.allocate(packing)
        self.o.allocate(packing)

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`[T, hidden_size]` -> queries `[T, query_heads, head_dim]`, and one head of keys: the values, too."""
        of_queries, latent, turning = self.inputs.multiply(x, None).split(self.widths, 1)
        latent = rms_norm(latent.contiguous(), self.norm, EPS)
        keys = _joined(turning, latent).unsqueeze(1)
        queries, keys = self._rotated(torch.cat((self._absorbed(of_queries), keys), 1), positions).split(
            (self.num_query_heads, 1), 1
        )
        return queries, keys, keys

    def project_queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        of_queries = self.inputs.part(0, self.widths[0]).multiply(x, None)
        return self._rotated(self._absorbed(of_queries), positions)

    def finish(self, attended: torch.Tensor) -> torch.Tensor:
        """`[T, query_heads, head_dim]`, of which the rotated channels are left out -> `[T, hidden_size]`."""
        halves = attended.unflatten(-1, (2, -1))
        latents = halves[..., self.sizes.rotated // 2 :].flatten(-2).transpose(0, 1)
        return self.o.forward(torch.bmm(latents, self._to_values).transpose(0, 1).flatten(1))

    @cached_property
    def _to_latents(self) -> torch.Tensor:
        """What queries are multiplied with, `[query_heads, plain, rank]`. Asked for when all weights are written."""
        return self.heads.unflatten(0, (self.num_query_heads, -1))[:, : self.sizes.plain]

    @cached_property
    def _to_values(self) -> torch.Tensor:
        """`[query_heads, rank, value]`."""
        return self.heads.unflatten(0, (self.num_query_heads, -1))[:, self.sizes.plain :].transpose(1, 2)

    def _absorbed(self, of_queries: torch.Tensor) -> torch.Tensor:
        """The part of the first product that is for queries -> `[T, query_heads, head_dim]`, before RoPE."""
        if self.queries is not None:
            of_queries = self.queries.multiply(rms_norm(of_queries.contiguous(), self.query_norm, EPS), None)
        plain, turning = of_queries.unflatten(1, (self.num_query_heads, -1)).split(
            (self.sizes.plain, self.sizes.rotated), 2
        )
        return _joined(turning, torch.bmm(plain.transpose(0, 1), self._to_latents).transpose(0, 1))

    def _rotated(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`[T, heads, head_dim]`, rotated."""
        flat = heads.flatten(1)
        rotary(flat, positions, self.cos_sin, heads.shape[1], 0, self.head_dim, None, None, EPS)
        return flat.view_as(heads)


def _joined(turning: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
    """`[..., rotated]` and `[..., rank]` -> `[..., head_dim]`, in the cache's order of channels."""
    first, second = latent.chunk(2, -1)
    return torch.cat((turning[..., ::2], first, turning[..., 1::2], second), -1)


def _rows(matrix: LinearWeight, first: int, count: int) -> Weight:
    """Rows of a product that every rank holds completely."""
    return Weight((count, matrix.in_features), MatrixRows(matrix, first, count), quantized=True)
