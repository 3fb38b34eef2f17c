"""KV caches of an engine by names: a kv_cache_dtype, or one with a residual, as in `int4+32`."""

from __future__ import annotations

from typing import NamedTuple

from kvllm.config import require
from kvllm.kvcache.formats import KV_CACHE_DTYPES


class KVCacheOptions(NamedTuple):
    """Keywords of `LLM`."""

    kv_cache_dtype: str
    kv_residual_tokens: int = 0


def kv_cache_options(name: str) -> KVCacheOptions:
    dtype, _, tokens = name.partition("+")
    return KVCacheOptions(dtype, int(tokens or 0))


def check_kv_cache(option: str, name: str) -> None:
    """Raises ConfigError unless `name` is a KV cache. option: of the command line, for the message."""
    dtype, plus, tokens = name.partition("+")
    allowed = f"one of {', '.join(KV_CACHE_DTYPES)}, or one of few bits with recent tokens as they are, as in int4+32"
    require(dtype in KV_CACHE_DTYPES and (not plus or tokens.isdecimal()), option, name, allowed)
