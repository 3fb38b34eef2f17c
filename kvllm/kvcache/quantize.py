"""Quantization of keys and values, in plain torch: docs/kv-cache-dtypes.md has the formulas.

A vector is `[..., head_dim]`. It becomes codes, uint8 `[..., code_bytes]`, and a word of 32 bits, int32 `[..., 1]`,
that holds its scale. All arithmetic is in float32, whatever the dtype of the vector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvllm.kvcache.formats import VectorFormat
from kvllm.kvcache.hadamard import hadamard
from kvllm.quantized_vectors import SMALLEST_MAGNITUDE


@dataclass(frozen=True)
class Codec:
    """The two directions of a format.

    storage: the dtype of keys, or values, of this format in a cache. It tells the format to operators and kernels, and
        is as large as an element of it; what the bytes mean is the format's business.
    """

    storage: torch.dtype
    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    dequantize: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def codec(vector_format: VectorFormat) -> Codec:
    return CODECS[vector_format.name]


def _magnitude(vectors: torch.Tensor) -> torch.Tensor:
    return vectors.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_MAGNITUDE)


def _quantize_int8(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    vectors = vectors.float()
    scale = _magnitude(vectors) / 127
    codes = (vectors / scale).round().clamp(-127, 127)
    return codes.to(torch.int8).view(torch.uint8), scale.view(torch.int32)


def _dequantize_int8(codes: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.int8).float() * words.view(torch.float32)


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
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return packed, torch.cat((scale, zero), dim=-1).view(torch.int32)


def _dequantize_int4(codes: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    channels = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    scale, zero = words.contiguous().view(torch.bfloat16).float().split(1, dim=-1)
    return channels * scale + zero


def _quantize_int4_hadamard(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _quantize_int4(hadamard(vectors))


def _dequantize_int4_hadamard(codes: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return hadamard(_dequantize_int4(codes, words))


CODECS = {
    "fp8_e4m3": Codec(torch.float8_e4m3fn, _quantize_fp8, _dequantize_fp8),
    "int8": Codec(torch.int8, _quantize_int8, _dequantize_int8),
    "int4": Codec(torch.uint8, _quantize_int4, _dequantize_int4),
    "int4_hadamard": Codec(torch.float4_e2m1fn_x2, _quantize_int4_hadamard, _dequantize_int4_hadamard),
}
