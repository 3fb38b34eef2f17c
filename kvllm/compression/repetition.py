"""Attention of a text that is repeated after itself: to the KV pairs that are cached, and to the repetition so far."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvllm.compression.mass import PLAIN_SOFTMAX, Softmax, queries_per_tile
from kvllm.compression.precision import no_tf32


def attention_received(queries: Tensor, keys: Tensor, repeated: Tensor, softmax: Softmax = PLAIN_SOFTMAX) -> Tensor:
    """The highest probability that any repeated token, in any query head of a KV head, gives each cached key.

    Args:
        queries: `[Hq, T, d]`, rotated, of the repeated tokens; query head h reads KV head `h // (Hq // Hkv)`.
        keys: `[Hkv, C, d]`, rotated: those that are cached.
        repeated: `[Hkv, T, d]`, rotated: those of the repeated tokens, of which each sees all up to its own.
        softmax: of the layer. Both kinds of keys take part in it.

    Returns:
        float32 `[Hkv, C]`.
    """
    received = torch.zeros(keys.shape[:2], device=keys.device)
    for _, tile in probabilities(queries, keys, repeated, softmax):
        torch.maximum(received, tile[:, :, :, : keys.shape[1]].amax(dim=(1, 2)), out=received)
    return received


@torch.no_grad()
def attention(
    queries: Tensor,
    cached: tuple[Tensor, Tensor],
    repeated: tuple[Tensor, Tensor],
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Tensor:
    """The result of attention for repeated tokens: float32 `[Hq, T, d]`.

    cached: keys and values `[Hkv, C, d]`. repeated: those of the repeated tokens, `[Hkv, T, d]`.
    """
    values = torch.cat((cached[1], repeated[1]), dim=1).float()
    found = queries.new_empty(queries.shape, dtype=torch.float32).unflatten(0, (len(values), -1))
    for begin, tile in probabilities(queries, cached[0], repeated[0], softmax):
        with no_tf32():
            rows = torch.bmm(tile.flatten(1, 2), values).unflatten(1, tile.shape[1:3])
        found[:, :, begin : begin + tile.shape[2]] = rows
    return found.flatten(0, 1)


@torch.no_grad()
def probabilities(
    queries: Tensor, keys: Tensor, repeated: Tensor, softmax: Softmax = PLAIN_SOFTMAX
) -> Iterator[tuple[int, Tensor]]:
    """Attention probabilities, some repeated tokens after others: the first token of each tile, and float32 `[Hkv,
    Hq / Hkv, tokens, C + T]`. Arguments as for `attention_received`."""
    num_cached, num_tokens = keys.shape[1], queries.shape[1]
    of_heads = queries.float().unflatten(0, (len(keys), -1))
    scaled = torch.cat((keys, repeated), dim=1).float() * softmax.scale_of(keys.shape[2])
    index = torch.arange(num_cached + num_tokens, device=keys.device)
    size = max(1, queries_per_tile(scaled) // of_heads.shape[1])
    for begin in range(0, num_tokens, size):
        rows = of_heads[:, :, begin : begin + size]
        with no_tf32():
            logits = torch.bmm(rows.flatten(1, 2), scaled.mT).unflatten(1, rows.shape[1:3])
        logits = softmax.bounded(logits)
        own = num_cached + begin + torch.arange(rows.shape[2], device=keys.device)
        logits.masked_fill_(index > own[:, None], -torch.inf)
        if softmax.sinks is not None:
            sinks = softmax.sinks.view(len(keys), -1, 1, 1).expand(*logits.shape[:3], 1)
            logits = torch.cat((logits, sinks), dim=-1)
        yield begin, logits.softmax(dim=-1)[..., : num_cached + num_tokens]
