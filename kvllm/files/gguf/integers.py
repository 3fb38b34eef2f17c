"""The integers, scales and minimums in the blocks of GGUF's types."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from kvllm.files.groups import GroupForm

Decoded = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""Of blocks `[n, bytes]`: values int8 `[n, weights]`, scales and minimums float32 `[n, groups]`."""

CODES = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int8)
"""What the four bits of IQ4_NL and IQ4_XS stand for."""
FP4_CODES = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.int8)
"""What those of MXFP4 do, in halves."""


def decode(raw: np.ndarray, type: Type) -> Decoded:
    """Rows of whole blocks, uint8 `[rows, bytes]`, of a type in FORMS."""
    blocks = raw.reshape(-1, GGML_QUANT_SIZES[type][1])
    values, scales, minimums = DECODERS[type.name](blocks)
    rows = len(raw)
    return (
        values.reshape(rows, -1).astype(np.int8, copy=False),
        scales.reshape(rows, -1),
        None if minimums is None else minimums.reshape(rows, -1),
    )


def _floats(halves: np.ndarray) -> np.ndarray:
    """uint8 `[n, 2]` -> `[n, 1]`."""
    return np.ascontiguousarray(halves).view(np.float16).astype(np.float32)


def _bits(packed: np.ndarray, bits: int, span: int) -> np.ndarray:
    """The integers in bytes `[n, m]`, of which every `span` hold the first `bits` of as many weights, then the next
    ones of as many more: uint8 `[n, 8 / bits * m]`."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
    spans = packed.reshape(len(packed), -1, 1, span) >> shifts
    return (spans & np.uint8((1 << bits) - 1)).reshape(len(packed), -1)


def _q8_0(blocks: np.ndarray) -> Decoded:
    return blocks[:, 2:].view(np.int8), _floats(blocks[:, :2]), None


def _q4_0(blocks: np.ndarray) -> Decoded:
    return _bits(blocks[:, 2:], 4, 16).view(np.int8) - np.int8(8), _floats(blocks[:, :2]), None


def _q4_1(blocks: np.ndarray) -> Decoded:
    return _bits(blocks[:, 4:], 4, 16), _floats(blocks[:, :2]), -_floats(blocks[:, 2:4])


def _five_bits(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    return _bits(low, 4, 16) | np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: np.ndarray) -> Decoded:
    values = _five_bits(blocks[:, 2:6], blocks[:, 6:]).view(np.int8) - np.int8(16)
    return values, _floats(blocks[:, :2]), None


def _q5_1(blocks: np.ndarray) -> Decoded:
    return _five_bits(blocks[:, 4:8], blocks[:, 8:]), _floats(blocks[:, :2]), -_floats(blocks[:, 2:4])


def _q2_k(blocks: np.ndarray) -> Decoded:
    scales, values = blocks[:, :16], _bits(blocks[:, 16:80], 2, 32)
    return values, _floats(blocks[:, 80:82]) * (scales & 15), _floats(blocks[:, 82:84]) * (scales >> 4)


def _q3_k(blocks: np.ndarray) -> Decoded:
    low, high = _bits(blocks[:, 32:96], 2, 32), _bits(blocks[:, :32], 1, 32)
    scales = _bits(blocks[:, 96:104], 4, 8) | _bits(blocks[:, 104:108], 2, 4) << np.uint8(4)
    values = (low | high << np.uint8(2)).view(np.int8) - np.int8(4)
    return values, _floats(blocks[:, 108:110]) * (scales.astype(np.float32) - 32), None


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Those of Q4_K and Q5_K: two numbers of 16 bits, and for each of 8 groups a factor of 6 bits to both."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((first & 63, third & 15 | first >> 2 & 48), 1)
    minimums = np.concatenate((second & 63, third >> 4 | second >> 2 & 48), 1)
    return _floats(blocks[:, :2]) * scales, _floats(blocks[:, 2:4]) * minimums


def _q4_k(blocks: np.ndarray) -> Decoded:
    return _bits(blocks[:, 16:], 4, 32), *_k_scales(blocks)


def _q5_k(blocks: np.ndarray) -> Decoded:
    values = _bits(blocks[:, 48:], 4, 32) | _bits(blocks[:, 16:48], 1, 32) << np.uint8(4)
    return values, *_k_scales(blocks)


def _q6_k(blocks: np.ndarray) -> Decoded:
    values = _bits(blocks[:, :128], 4, 64) | _bits(blocks[:, 128:192], 2, 32) << np.uint8(4)
    return values.view(np.int8) - np.int8(32), _floats(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8), None


def _iq4_nl(blocks: np.ndarray) -> Decoded:
    return CODES[_bits(blocks[:, 2:], 4, 16)], _floats(blocks[:, :2]), None


def _iq4_xs(blocks: np.ndarray) -> Decoded:
    shifts = np.arange(0, 16, 2, dtype=np.uint16)
    high = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> shifts & 3
    scales = _bits(blocks[:, 4:8], 4, 1) | high.astype(np.uint8) << np.uint8(4)
    return CODES[_bits(blocks[:, 8:], 4, 16)], _floats(blocks[:, :2]) * (scales.astype(np.float32) - 32), None


def _mxfp4(blocks: np.ndarray) -> Decoded:
    scales = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return FP4_CODES[_bits(blocks[:, 1:], 4, 16)], scales, None


DECODERS: dict[str, Callable[[np.ndarray], Decoded]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
FORMS = {
    "Q8_0": GroupForm(8),
    "Q4_0": GroupForm(4),
    "Q4_1": GroupForm(4, minimums=True),
    "Q5_0": GroupForm(6),
    "Q5_1": GroupForm(6, minimums=True),
    "Q2_K": GroupForm(4, 16, minimums=True),
    "Q3_K": GroupForm(4, 16),
    "Q4_K": GroupForm(4, minimums=True),
    "Q5_K": GroupForm(6, minimums=True),
    "Q6_K": GroupForm(6, 16),
    "IQ4_NL": GroupForm(8),
    "IQ4_XS": GroupForm(8),
    "MXFP4": GroupForm(6),
}
"""The smallest form that holds a type."""
