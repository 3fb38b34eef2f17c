"""Formats of quantized KV pairs, and the bytes that they take. This module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from kvllm.errors import ConfigError
from kvllm.quantized_vectors import SCALE_BYTES


@dataclass(frozen=True)
class VectorFormat:
    """A key or a value of one token and one head as codes of `bits` bits, with a scale of its own.

    quantize.py has the formula of each name. rotated: codes are those of the vector times a Hadamard matrix
    (`kvllm.kvcache.hadamard`), which exists for a power of two of channels.
    """

    name: str
    bits: int
    rotated: bool = False

    @property
    def channels(self) -> int:
        """A head_dim is a multiple of it, so that scales lie at multiples of 4 bytes in blocks of any size."""
        return max(8, 32 // gcd(32, self.bits))

    def code_bytes(self, head_dim: int) -> int:
        return head_dim * self.bits // 8

    def vector_bytes(self, head_dim: int) -> int:
        """Bytes of a vector with its scale."""
        return self.code_bytes(head_dim) + SCALE_BYTES


@dataclass(frozen=True)
class KVFormat:
    """The formats of keys and of values.

    name: the value of `kv_cache_dtype`.
    """

    name: str
    keys: VectorFormat
    values: VectorFormat

    def pair_bytes(self, head_dim: int) -> int:
        """Bytes of a key and a value, with their scales."""
        return self.keys.vector_bytes(head_dim) + self.values.vector_bytes(head_dim)


FP8_E4M3, INT8, INT6 = VectorFormat("fp8_e4m3", 8), VectorFormat("int8", 8), VectorFormat("int6", 6)
INT4 = VectorFormat("int4", 4)
INT6_HADAMARD = VectorFormat("int6_hadamard", 6, rotated=True)
INT4_HADAMARD = VectorFormat("int4_hadamard", 4, rotated=True)
KV_FORMATS = {
    each.name: each
    for each in (
        KVFormat("fp8_e4m3", FP8_E4M3, FP8_E4M3),
        KVFormat("int8", INT8, INT8),
        KVFormat("int6_int4", INT6, INT4),
        KVFormat("int6_int4_hadamard", INT6_HADAMARD, INT4_HADAMARD),
        KVFormat("int4", INT4, INT4),
        KVFormat("int4_hadamard", INT4_HADAMARD, INT4_HADAMARD),
    )
}
KV_CACHE_DTYPES = ("auto", "bfloat16", *KV_FORMATS)
"""The values of `kv_cache_dtype`. "auto" is the dtype of the activations."""


def kv_format_of(kv_cache_dtype: str, dtype: str, head_dim: int) -> KVFormat | None:
    """The format of a quantized cache; None for one that holds the dtype of the activations.

    Raises ConfigError if keys and values of the model cannot be stored so.
    """
    kv_format = KV_FORMATS.get(kv_cache_dtype)
    if kv_format is None and kv_cache_dtype not in ("auto", dtype):
        raise ConfigError(
            f"kv_cache_dtype={kv_cache_dtype!r} with activations of {dtype}: a cache that is not quantized has their "
            f"dtype. Give 'auto', one of {', '.join(KV_FORMATS)}, or dtype={kv_cache_dtype!r}"
        )
    require_head_dim("kv_cache_dtype", kv_cache_dtype, head_dim)
    return kv_format


def require_one_format(option: str, dtype: str) -> None:
    """Raise ConfigError if `dtype`, the value of `option`, is a format that differs for keys and values, of a model
    whose values are its keys."""
    kv_format = KV_FORMATS.get(dtype)
    if kv_format and kv_format.keys != kv_format.values:
        same = ", ".join(repr(each.name) for each in KV_FORMATS.values() if each.keys == each.values)
        raise ConfigError(
            f"{option}={dtype!r} stores keys and values in different formats, but with latent attention they are the "
            f"same vector: give 'auto' or one of {same}"
        )


def require_head_dim(option: str, dtype: str, head_dim: int) -> None:
    """Raise ConfigError if `dtype`, the value of `option`, is a format that vectors of `head_dim` channels cannot
    have."""
    kv_format = KV_FORMATS.get(dtype)
    if kv_format and head_dim % (channels := max(kv_format.keys.channels, kv_format.values.channels)):
        raise ConfigError(
            f"{option}={dtype!r} needs a head_dim that is a multiple of {channels}, the model has {head_dim}: give "
            "'auto'"
        )
    if kv_format and kv_format.keys.rotated and head_dim & (head_dim - 1):
        raise ConfigError(
            f"{option}={dtype!r} needs a head_dim that is a power of two, the model has {head_dim}: give "
            "'int6_int4' or 'auto'"
        )
