"""Quantizers for the types that the package `gguf` reads and does not write, by the simplest formula."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

CODES = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))


def quantize(matrix: np.ndarray, type: Type) -> np.ndarray:
    """Rows of floats as rows of bytes, of any type."""
    if type not in QUANTIZERS:
        return gguf.quantize(matrix, type)
    size = gguf.GGML_QUANT_SIZES[type][0]
    assert matrix.shape[-1] % size == 0, f"{type.name} needs a multiple of {size} columns"
    blocks = QUANTIZERS[type](matrix.reshape(-1, size).astype(np.float32))
    return np.concatenate(blocks, 1).reshape(*matrix.shape[:-1], -1)


FALLBACKS = {
    Type.Q2_K: Type.IQ4_NL,
    Type.Q3_K: Type.IQ4_NL,
    Type.Q4_K: Type.Q5_0,
    Type.Q5_K: Type.Q5_1,
    Type.Q6_K: Type.Q8_0,
    Type.IQ4_XS: Type.IQ4_NL,
}


def fitting(type: Type, columns: int) -> Type:
    """The type that llama.cpp gives a matrix of so many columns that was to have `type`."""
    if columns % gguf.GGML_QUANT_SIZES[type][0] == 0:
        return type
    return fitting(FALLBACKS[type], columns) if type in FALLBACKS else Type.F32


def _packed(values: np.ndarray, bits: int, span: int) -> np.ndarray:
    """Bytes of which every `span` hold the first `bits` of as many weights, then the next ones of as many more."""
    parts = values.astype(np.uint8).reshape(len(values), -1, 8 // bits, span)
    shifted = (parts & ((1 << bits) - 1)) << np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
    return np.bitwise_or.reduce(shifted, 2).reshape(len(values), -1)


def _halves(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of half precision, and what they mean, both `[n, ...]`."""
    rounded = numbers.astype(np.float16)
    return rounded.view(np.uint8).reshape(len(numbers), -1), rounded.astype(np.float32)


def _divided(numbers: np.ndarray, by: np.ndarray) -> np.ndarray:
    return np.divide(numbers, by, out=np.zeros(np.broadcast_shapes(numbers.shape, by.shape), np.float32), where=by != 0)


def _with_minimums(x: np.ndarray, group: int, bits: int, scale_bits: int) -> tuple[np.ndarray, ...]:
    """Integers, scales and minimums as integers, and the bytes of both factors, as in Q2_K, Q4_K and Q5_K."""
    groups, most = x.reshape(len(x), -1, group), (1 << scale_bits) - 1
    minimums = -np.minimum(groups.min(2), 0)
    scales = (groups.max(2).clip(0) + minimums) / ((1 << bits) - 1)
    scale_bytes, scale = _halves(scales.max(1, keepdims=True) / most)
    minimum_bytes, minimum = _halves(minimums.max(1, keepdims=True) / most)
    of_scales, of_minimums = (_divided(*pair).round().clip(0, most) for pair in ((scales, scale), (minimums, minimum)))
    shifted = groups + (minimum * of_minimums)[..., None]
    values = _divided(shifted, (scale * of_scales)[..., None]).round().clip(0, (1 << bits) - 1)
    return values.reshape(x.shape), of_scales.astype(int), of_minimums.astype(int), scale_bytes, minimum_bytes


def _symmetric(x: np.ndarray, group: int, lowest: int, scale_bits: int) -> tuple[np.ndarray, ...]:
    """Groups over the scales that they get, these as integers with a sign, and the bytes of their factor."""
    groups, most = x.reshape(len(x), -1, group), (1 << (scale_bits - 1)) - 1
    scales = np.take_along_axis(groups, np.abs(groups).argmax(2)[..., None], 2)[..., 0] / lowest
    factor_bytes, factor = _halves(np.abs(scales).max(1, keepdims=True) / most)
    of_scales = _divided(scales, factor).round().clip(-most, most)
    return _divided(groups, (factor * of_scales)[..., None]).reshape(x.shape), of_scales.astype(int), factor_bytes


def _k_scales(scales: np.ndarray, minimums: np.ndarray) -> np.ndarray:
    first, last = slice(0, 4), slice(4, 8)
    return np.concatenate(
        (
            scales[:, first] | scales[:, last] >> 4 << 6,
            minimums[:, first] | minimums[:, last] >> 4 << 6,
            scales[:, last] & 15 | (minimums[:, last] & 15) << 4,
        ),
        1,
    ).astype(np.uint8)


def _q2_k(x: np.ndarray) -> tuple[np.ndarray, ...]:
    values, scales, minimums, scale_bytes, minimum_bytes = _with_minimums(x, 16, 2, 4)
    return (scales | minimums << 4).astype(np.uint8), _packed(values, 2, 32), scale_bytes, minimum_bytes


def _q3_k(x: np.ndarray) -> tuple[np.ndarray, ...]:
    ratios, scales, factor = _symmetric(x, 16, -4, 6)
    values, scales = ratios.round().clip(-4, 3) + 4, scales + 32
    low = _packed(scales, 4, 8)
    return _packed(values.astype(np.uint8) >> 2, 1, 32), _packed(values, 2, 32), low, _packed(scales >> 4, 2, 4), factor


def _q4_k(x: np.ndarray) -> tuple[np.ndarray, ...]:
    values, scales, minimums, *factors = _with_minimums(x, 32, 4, 6)
    return *factors, _k_scales(scales, minimums), _packed(values, 4, 32)


def _q5_k(x: np.ndarray) -> tuple[np.ndarray, ...]:
    values, scales, minimums, *factors = _with_minimums(x, 32, 5, 6)
    high = _packed(values.astype(np.uint8) >> 4, 1, 32)
    return *factors, _k_scales(scales, minimums), high, _packed(values, 4, 32)


def _q6_k(x: np.ndarray) -> tuple[np.ndarray, ...]:
    ratios, scales, factor = _symmetric(x, 16, -32, 8)
    values = (ratios.round().clip(-32, 31) + 32).astype(np.uint8)
    return _packed(values, 4, 64), _packed(values >> 4, 2, 32), scales.astype(np.int8).view(np.uint8), factor


def _nearest_codes(ratios: np.ndarray) -> np.ndarray:
    return np.searchsorted((CODES[1:] + CODES[:-1]) / 2, ratios)


def _iq4_nl(x: np.ndarray) -> tuple[np.ndarray, ...]:
    largest = np.take_along_axis(x, np.abs(x).argmax(1, keepdims=True), 1)
    factor_bytes, factor = _halves(largest / -127)
    return factor_bytes, _packed(_nearest_codes(_divided(x, factor)), 4, 16)


def _iq4_xs(x: np.ndarray) -> tuple[np.ndarray, ...]:
    ratios, scales, factor = _symmetric(x, 32, -127, 6)
    scales = scales + 32
    high = np.bitwise_or.reduce((scales >> 4) << np.arange(0, 16, 2), 1, keepdims=True).astype(np.uint16)
    return factor, high.view(np.uint8), _packed(scales, 4, 1), _packed(_nearest_codes(ratios), 4, 16)


QUANTIZERS: dict[Type, Callable[[np.ndarray], tuple[np.ndarray, ...]]] = {
    Type.Q2_K: _q2_k,
    Type.Q3_K: _q3_k,
    Type.Q4_K: _q4_k,
    Type.Q5_K: _q5_k,
    Type.Q6_K: _q6_k,
    Type.IQ4_NL: _iq4_nl,
    Type.IQ4_XS: _iq4_xs,
}
