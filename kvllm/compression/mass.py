"""Attention that keys receive, summed over queries: the score of Kara, SnapKV and H2O."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from kvllm._extension import operator
from kvllm.compression.paged_keys import Keys, PagedKeys
from kvllm.compression.precision import no_tf32
from kvllm.kvcache.hadamard import hadamard

# Attention probabilities of one KV head that are alive at a time. On a CPU the tiles of all heads should stay in
# the cache, on a GPU there should be few of them. It must not depend on the number of heads or sequences: they
# would change the order of summation.
_CPU_TILE_BYTES = 1 << 18
_GPU_TILE_BYTES = 1 << 24


@dataclass(frozen=True)
class Softmax:
    """The softmax of a layer's attention, which scores go through as well.

    scale: what products are multiplied by; None: `d ** -0.5`. soft_cap: scores are bounded by it, see LayerAttention.
    sinks: float32 `[Hq]`, a learned score of each query head, which takes part and belongs to no key.
    """

    scale: float | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None

    def scale_of(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale

    def bounded(self, scores: Tensor) -> Tensor:
        return scores if self.soft_cap is None else self.soft_cap * (scores / self.soft_cap).tanh()


PLAIN_SOFTMAX = Softmax()


def queries_per_tile(keys: Tensor) -> int:
    """Queries of one KV head whose float32 logits over `keys [Hkv, n, d]` fit one tile, at least 1."""
    tile_bytes = _CPU_TILE_BYTES if keys.device.type == "cpu" else _GPU_TILE_BYTES
    return max(1, tile_bytes // (4 * keys.shape[1]))


@torch.no_grad()
def batched_attention_mass(
    queries: Tensor,
    keys: Keys,
    num_keys: int,
    last_kv_index: Tensor | None = None,
    *,
    squared: bool = False,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Tensor:
    """Softmax attention of every query to the first `num_keys` keys, summed as `attention_mass` does.

    Args:
        queries: `[S, Hq, query tokens, d]`, rotated, bfloat16 or float32.
        keys: `[S, Hkv, W, d]`, rotated; or PagedKeys of one layer.
        last_kv_index: int64 `[query tokens]`, the index of each token among the keys, up to which it attends; None: to
            all.
        squared: sum the squares of the probabilities.
        softmax: of the layer.

    Returns:
        float32 `[S, Hkv, num_keys]`, bit-identical for a sequence whatever the others in the batch are.
    """
    scale = softmax.scale_of(keys.shape[3])
    if isinstance(keys, PagedKeys) or (keys.is_cuda and queries.dtype == keys.dtype and find_spec("triton")):
        from kvllm.kernels.scores import window_scores  # cannot be imported without triton

        paged = isinstance(keys, PagedKeys)
        if paged and keys.rotated:
            queries = hadamard(queries).to(queries.dtype)
        return window_scores(
            queries,
            keys.blocks[0] if paged else keys.contiguous(),
            num_keys,
            scale,
            last_kv_index,
            tables=keys.tables if paged else None,
            squared=squared,
            soft_cap=softmax.soft_cap,
            sinks=softmax.sinks,
        )
    if keys.is_cpu and queries.dtype == keys.dtype in (torch.float32, torch.bfloat16) and keys.shape[3] % 2 == 0:
        return operator("attention_mass")(
            queries, keys.contiguous(), num_keys, scale, last_kv_index, squared, softmax.soft_cap or 0.0, softmax.sinks
        )
    # One sequence at a time: a batched product may choose its order of summation by the size of the batch.
    sequences = zip(queries, keys[:, :, :num_keys], strict=True)
    return torch.stack(
        [attention_mass(*sequence, last_kv_index, squared=squared, softmax=softmax) for sequence in sequences]
    )


@torch.no_grad()
@no_tf32()
def attention_mass(
    queries: Tensor,
    keys: Tensor,
    last_kv_index: Tensor | None = None,
    evicted_mask: Tensor | None = None,
    *,
    squared: bool = False,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Tensor:
    """Softmax attention of one sequence, summed over the query tokens and over the query heads of each KV
    head.

    H2O adds this to the mass of the cached KV pairs, for the tokens of a prompt or for one decoded token. Query tokens
    may come in any chunks; only the order of summation differs.

    Args:
        queries: `[Hq, T, d]`, rotated, bfloat16 or float32; query head h reads KV head `h // (Hq // Hkv)`.
        keys: `[Hkv, C, d]`, rotated.
        last_kv_index: int64 `[T]`, the index of each query token among the keys; it attends to the keys up to that.
            None: every token attends to all keys.
        evicted_mask: bool `[Hkv, C]`, keys that no query attends to.
        squared: sum the squares of the probabilities.
        softmax: of the layer.

    Returns:
        float32 `[Hkv, C]`; each row sums to `T * Hq / Hkv`, or less if squared or with sinks.
    """
    num_kv_heads, num_keys, head_dim = keys.shape
    num_tokens = queries.shape[1]
    if last_kv_index is not None and last_kv_index.shape != (num_tokens,):
        raise ValueError(
            f"last_kv_index {tuple(last_kv_index.shape)} must have an index for each of {num_tokens} query tokens"
        )
    head_queries = queries.float().contiguous().view(num_kv_heads, -1, head_dim)
    scaled_keys = (keys.float() * softmax.scale_of(head_dim)).contiguous()
    key_index = torch.arange(num_keys, device=keys.device)
    if last_kv_index is not None:
        last_kv_index = last_kv_index.repeat(head_queries.shape[1] // num_tokens)
    tile = queries_per_tile(keys)
    mass = torch.zeros(num_kv_heads, num_keys, device=keys.device)
    for start in range(0, head_queries.shape[1], tile):
        logits = softmax.bounded(torch.bmm(head_queries[:, start : start + tile], scaled_keys.mT))
        if last_kv_index is not None:
            logits.masked_fill_(key_index > last_kv_index[start : start + tile, None], -torch.inf)
        if evicted_mask is not None:
            logits.masked_fill_(evicted_mask[:, None], -torch.inf)
        if softmax.sinks is None:
            probabilities = torch.softmax(logits, dim=-1, out=logits)
        else:
            of_rows = softmax.sinks.view(num_kv_heads, -1, 1).repeat_interleave(num_tokens, dim=1)
            with_sinks = torch.cat((logits, of_rows[:, start : start + tile]), dim=-1)
            probabilities = with_sinks.softmax(dim=-1)[..., :num_keys]
        mass += (probabilities.square_() if squared else probabilities).sum(dim=1)
    return mass
