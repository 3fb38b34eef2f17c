"""Ways to round KV pairs to few bits, and the attention of a model of transformers over pairs that are rounded so.

A scheme rounds vectors `[..., Hkv, T, head_dim]` and gives them back as float32, so it needs no format of a cache, and
none of its kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvllm.kvcache.formats import INT4, INT4_HADAMARD, INT6, INT8, VectorFormat
from kvllm.kvcache.quantize import codec
from kvllm.quantized_vectors import SCALE_BYTES

Rounding = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Vectors:
    """How keys, or values, are rounded. bits: of a channel, with a share of all that is stored beside the codes; a
    function of head_dim."""

    rounding: Rounding
    bits: Callable[[int], float]


@dataclass(frozen=True)
class Scheme:
    """residual: the last KV pairs, a token's own among them, which it attends as they are. They are copies, for a
    sequence and not for a token, so `share` does not count them."""

    keys: Vectors
    values: Vectors
    residual: int = 0

    def share(self, head_dim: int) -> float:
        """Of the bytes that a cache in bfloat16 takes."""
        return (self.keys.bits(head_dim) + self.values.bits(head_dim)) / 32


def of_format(vector_format: VectorFormat) -> Vectors:
    """As a cache of the engine stores it: docs/kv-cache-dtypes.md has the formulas."""
    chosen = codec(vector_format)
    return Vectors(
        lambda vectors: chosen.dequantize(*chosen.quantize(vectors)),
        lambda head_dim: 8 * vector_format.vector_bytes(head_dim) / head_dim,
    )


def in_groups(size: int) -> Vectors:
    """`int4` with a scale and a zero point for each group of so many channels."""
    whole = of_format(INT4)
    return Vectors(
        lambda vectors: whole.rounding(vectors.unflatten(-1, (-1, size))).flatten(-2), lambda _: whole.bits(size)
    )


def with_outliers(count: int) -> Vectors:
    """`int4`, but for the channels of each head whose mean magnitude is the largest: these are in `int8`, with a scale
    of their own."""
    few, many = of_format(INT8), of_format(INT4)

    def rounding(vectors: Tensor) -> Tensor:
        magnitudes = vectors.abs().mean(dim=-2, keepdim=True)
        outlying = torch.zeros_like(magnitudes).scatter_(-1, magnitudes.topk(count).indices, 1).bool()
        lowest = torch.where(outlying, torch.inf, vectors).amin(dim=-1, keepdim=True)
        others = many.rounding(torch.where(outlying, lowest, vectors))
        return torch.where(outlying, few.rounding(vectors * outlying), others)

    def bits(head_dim: int) -> float:
        return many.bits(head_dim) + 8 * (count / 2 + SCALE_BYTES) / head_dim

    return Vectors(rounding, bits)


def schemes_of(head_dim: int) -> dict[str, Scheme]:
    """All schemes that suit vectors of so many channels, by name."""
    int8, int4 = of_format(INT8), of_format(INT4)
    found = {
        "int8": Scheme(int8, int8),
        "int8_int4": Scheme(int8, int4),
        "int6_int4": Scheme(of_format(INT6), int4),
        "int4": Scheme(int4, int4),
        "int4, residual of 64": Scheme(int4, int4, residual=64),
        "int4, residual of 128": Scheme(int4, int4, residual=128),
    }
    for size in (32, 16):
        if head_dim % size == 0 and head_dim > size:
            found[f"int4 in groups of {size}"] = Scheme(in_groups(size), in_groups(size))
    for count in (2, 4):
        outliers = with_outliers(count)
        found[f"int4, {count} channels of keys in int8"] = Scheme(outliers, int4)
    if head_dim & (head_dim - 1) == 0:
        rotated = of_format(INT4_HADAMARD)
        found["int4, keys rotated"] = Scheme(rotated, int4)
        found["int4_hadamard"] = Scheme(rotated, rotated)
    return found


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scheme: Scheme | None = None,
    **rest: Any,
) -> tuple[Tensor, Tensor]:
    """Attention of a layer of transformers, as the model's own module writes it out, over rounded KV pairs.

    query: `[1, Hq, T, d]`; key, value: `[1, Hkv, T, d]`. attention_mask: what is added to the logits.
    """
    written_out = sys.modules[type(module).__module__].eager_attention_forward
    if scheme is None:
        return written_out(module, query, key, value, attention_mask, **rest)
    rounded_key, rounded_value = scheme.keys.rounding(key), scheme.values.rounding(value)
    if not scheme.residual:
        return written_out(module, query, rounded_key, rounded_value, attention_mask, **rest)
    tokens, group = torch.arange(query.shape[2]), query.shape[1] // key.shape[1]
    recent = (tokens[:, None] - tokens < scheme.residual).float()
    lost_key, lost_value = (
        (x - y).repeat_interleave(group, dim=1) for x, y in ((key, rounded_key), (value, rounded_value))
    )
    mask = attention_mask + query @ lost_key.mT * rest["scaling"] * recent
    output, weights = written_out(module, query, rounded_key, rounded_value, mask, **rest)
    return output + (weights * recent @ lost_value).transpose(1, 2), weights
