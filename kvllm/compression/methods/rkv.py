"""R-KV (Cai et al., arXiv 2505.24133): keep what the last queries attend to and what is not said again later."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from kvllm._extension import operator
from kvllm.compression.mass import PLAIN_SOFTMAX, Softmax, queries_per_tile
from kvllm.compression.methods.token2chunk import choose
from kvllm.compression.precision import no_tf32
from kvllm.compression.region import check_queries, everything, keeps_everything


def select(
    queries: Tensor,
    keys: Tensor,
    *,
    retain: int,
    buffer: int,
    mix: float = 0.1,
    kernel: int = 7,
    threshold: float = 0.5,
    strict_public: bool = True,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Tensor:
    """Choose the KV pairs of a region to keep, as `registry.Method` says, by the region's last queries.

    Args:
        mix: weight of the importance (lambda).
        kernel: see `importance`.
        threshold: see `redundancy`.
        strict_public: see `redundancy`.
    """
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    found = scores(queries, keys, buffer, mix, kernel, threshold, strict_public, softmax)
    return choose(found, retain=retain, buffer=buffer)


def scores(
    queries: Tensor,
    keys: Tensor,
    buffer: int,
    mix: float = 0.1,
    kernel: int = 7,
    threshold: float = 0.5,
    strict_public: bool = True,
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Tensor:
    """`mix * importance - (1 - mix) * redundancy` of each compressible KV pair. Arguments as for `select`.

    Returns:
        float32 `[S, Hkv, C - buffer]`, bit-identical for a sequence whatever the others in the batch are.
    """
    check_queries(queries, keys)
    num_scored = keys.shape[2] - buffer
    found = []
    for seq_queries, seq_keys in zip(queries, keys, strict=True):
        important = importance(seq_queries, seq_keys[:, :num_scored], kernel, softmax)
        redundant = redundancy(seq_keys, threshold, strict_public)[:, :num_scored]
        found.append(mix * important - (1 - mix) * redundant)
    return torch.stack(found)


@torch.no_grad()
@no_tf32()
def importance(queries: Tensor, keys: Tensor, kernel: int = 7, softmax: Softmax = PLAIN_SOFTMAX) -> Tensor:
    """Mean attention of one sequence's query tokens to the scored keys and to these only, max-pooled over neighbours.

    The query heads of a KV head join before the softmax: the largest of their logits counts, and of their learned
    scores. No causal mask.

    Args:
        queries: `[Hq, query tokens, d]` and
        keys: `[Hkv, n, d]`, bfloat16 or float32; computed in float32 throughout.
        kernel: positions that a maximum is taken over, odd.

    Returns:
        float32 `[Hkv, n]`.
    """
    if kernel % 2 == 0:
        raise ValueError(f"kernel={kernel} must be odd, to be centred on a position")
    num_kv_heads, num_scored, head_dim = keys.shape
    num_tokens, group = queries.shape[1], queries.shape[0] // num_kv_heads
    by_token = queries.float().contiguous().view(num_kv_heads, group, num_tokens, head_dim).transpose(1, 2)
    scaled_keys = (keys.float() * softmax.scale_of(head_dim)).contiguous()
    mass = torch.zeros(num_kv_heads, num_scored, device=keys.device)
    for tile in by_token.split(max(1, queries_per_tile(keys) // group), dim=1):
        logits = softmax.bounded(torch.bmm(tile.flatten(1, 2), scaled_keys.mT))
        of_group = logits.view(num_kv_heads, -1, group, num_scored).amax(dim=2)
        if softmax.sinks is not None:
            largest = softmax.sinks.view(num_kv_heads, 1, group).amax(dim=2, keepdim=True)
            of_group = torch.cat((of_group, largest.expand(-1, of_group.shape[1], -1)), dim=-1)
        mass += torch.softmax(of_group, dim=-1)[..., :num_scored].sum(dim=1)
    return max_pool1d(mass / num_tokens, kernel, stride=1, padding=kernel // 2)


def redundancy(keys: Tensor, threshold: float = 0.5, strict_public: bool = True) -> Tensor:
    """How much the keys of one sequence resemble others: softmax over the mean cosine similarity.

    Args: as for `resemblance`.

    Returns:
        float32 `[Hkv, C]`. Its values are close to 1 / C and to each other.
    """
    return torch.softmax(resemblance(keys, threshold, strict_public) / keys.shape[1], dim=-1)


@torch.no_grad()
@no_tf32()
def resemblance(keys: Tensor, threshold: float, strict_public: bool) -> Tensor:
    """The sum of the cosine similarities of each key to the others of one sequence.

    The last one of the keys that key i resembles by more than `threshold` does not count as redundant for it.

    Args:
        keys: `[Hkv, C, d]`, bfloat16 or float32; computed in float32 throughout.
        threshold: cosine similarity of near duplicates.
        strict_public: as in the public code, key 0 is not redundant for a key that has no near duplicate.

    Returns:
        float32 `[Hkv, C]`.
    """
    if keys.is_cpu and keys.dtype in (torch.float32, torch.bfloat16):
        return operator("key_resemblance")(keys.contiguous(), threshold, strict_public)
    num_kv_heads, length, _ = keys.shape
    keys = keys.float().contiguous()
    unit = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
    index = torch.arange(length, device=keys.device, dtype=torch.int32)
    total = torch.zeros(num_kv_heads, length, device=keys.device)
    tile_size = queries_per_tile(keys)
    for tile, tile_index in zip(unit.split(tile_size, dim=1), index.split(tile_size), strict=True):
        similarity = torch.bmm(tile, unit.mT).masked_fill_(index == tile_index[:, None], 0.0)
        near = similarity > threshold
        last_near = (near * index).amax(dim=-1, keepdim=True).long()
        spared = near.any(dim=-1, keepdim=True) | strict_public
        similarity.scatter_(-1, last_near, similarity.gather(-1, last_near).masked_fill_(spared, 0.0))
        total += similarity.sum(dim=1)
    return total
