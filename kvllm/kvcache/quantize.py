"""Quantization of keys and values, in plain torch.

A vector x is `[..., head_dim]`. It becomes codes, uint8 `[..., code_bytes]`, and a word of 32 bits, int32 `[..., 1]`,
that holds its scale s. All arithmetic is in float32, whatever the dtype of the vector; ties round to even. With
m = max(max |x|, 1e-8):

- `int8`: s = m / 127, codes clip(round(x / s), -127, 127); `int6`: the same with 31, plus 32.
- `fp8_e4m3`: s = m / 448, codes are x / s as the nearest float8.
- `int4`: z = min x, s = (max x - min x) / 15 or 1 if that is 0, both in bfloat16; codes clip(round((x - z) / s), 0,
  15), read as code * s + z. Two share a byte, the even channel in the low bits.

Of codes of 6 bits, the low 4 of all come first, then the high 2, four to a byte. With a Hadamard matrix, x is rotated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvllm.kvcache.formats import VectorFormat
from kvllm.kvcache.hadamard import hadamard
from kvllm.quantized_vectors import EXCESS_6, SMALLEST_MAGNITUDE


@dataclass(frozen=True)
class Codec:
    """The two directions of a format.

    storage: the dtype of keys, or values, of this format in a cache. It tells the format to operators and kernels, and
        is as large as an element of it; what the bytes mean is the format's business.
    norms: the lengths of vectors, float32 `[...]`.
    """

    storage: torch.dtype
    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    dequantize: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    norms: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def codec(vector_format: VectorFormat) -> Codec:
    return CODECS[vector_format.name]


def _magnitude(vectors: torch.Tensor) -> torch.Tensor:
    return vectors.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_MAGNITUDE)


def _symmetric(vectors: torch.Tensor, largest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes up to `largest` on both sides of 0, and their scale."""
    vectors = vectors.float()
    scale = _magnitude(vectors) / largest
    codes = (vectors / scale).round().clamp(-largest, largest)
    return codes.to(torch.int8).view(torch.uint8), scale.view(torch.int32)


def _quantize_int8(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _symmetric(vectors, 127)


def _dequantize_int8(codes: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.int8).float() * words.view(torch.float32)


def _quantize_int6(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    integers, words = _symmetric(vectors, 31)
    codes = integers + EXCESS_6
    high = (codes >> 4 & 3).unflatten(-1, (-1, 4)) << _high_bits(codes.device)
    return torch.cat((_two_in_a_byte(codes & 15), high.sum(-1, dtype=torch.uint8)), dim=-1), words


def _dequantize_int6(codes: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    high_bytes = codes.shape[-1] // 3
    low, high = codes.split([2 * high_bytes, high_bytes], dim=-1)
    high = (high[..., None] >> _high_bits(codes.device) & 3).flatten(-2)
    integers = (_channels_of_bytes(low) | high << 4).to(torch.int8) - EXCESS_6
    return integers.float() * words.view(torch.float32)


def _high_bits(device: torch.device) -> torch.Tensor:
    """Where the high bits of four codes begin in the byte that they share."""
    return torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=device)


def _two_in_a_byte(codes: torch.Tensor) -> torch.Tensor:
    return codes[..., ::2] | codes[..., 1::2] << 4


def _channels_of_bytes(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _quantize_fp8(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    vectors = vectors.float()
    scale = _magnitude(vectors) / 448
    codes = (vectors / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scale.view(torch.int32)


def _dequantize_fp8(codes: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn).float() * words.view(torch.float32)


def _quantize_int4(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    vectors = vectors.float()
    low, high = vectors.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / 15).bfloat16()
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero = low.bfloat16()
    codes = ((vectors - zero.float()) / scale.float()).round().clamp(0, 15).to(torch.uint8)
    return _two_in_a_byte(codes), torch.cat((scale, zero), dim=-1).view(torch.int32)


def _dequantize_int4(codes: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    scale, zero = words.contiguous().view(torch.bfloat16).float().split(1, dim=-1)
    return _channels_of_bytes(codes) * scale + zero


def _norms_int4(codes: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """By sums of the codes and of their squares: they need not come into the order of channels."""
    scale, zero = words.contiguous().view(torch.bfloat16).float().unbind(-1)
    halves = (codes & 15).float(), (codes >> 4).float()
    squares = sum(torch.linalg.vector_norm(half, dim=-1).square() for half in halves)
    total = sum(half.sum(-1) for half in halves)
    return (scale.square() * squares + 2 * scale * zero * total + 2 * codes.shape[-1] * zero.square()).clamp(0).sqrt()


def _plain(
    storage: torch.dtype,
    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    dequantize: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Codec:
    return Codec(storage, quantize, dequantize, lambda *vectors: torch.linalg.vector_norm(dequantize(*vectors), dim=-1))


def _rotated(storage: torch.dtype, plain: Codec) -> Codec:
    """The codec of vectors times a Hadamard matrix."""

    def dequantize(codes: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return hadamard(plain.dequantize(codes, words))

    return Codec(storage, lambda vectors: plain.quantize(hadamard(vectors)), dequantize, plain.norms)


INT6 = _plain(torch.float8_e5m2, _quantize_int6, _dequantize_int6)
INT4 = Codec(torch.uint8, _quantize_int4, _dequantize_int4, _norms_int4)
CODECS = {
    "fp8_e4m3": _plain(torch.float8_e4m3fn, _quantize_fp8, _dequantize_fp8),
    "int8": _plain(torch.int8, _quantize_int8, _dequantize_int8),
    "int6": INT6,
    "int4": INT4,
    "int6_hadamard": _rotated(torch.float8_e5m2fnuz, INT6),
    "int4_hadamard": _rotated(torch.float4_e2m1fn_x2, INT4),
}
