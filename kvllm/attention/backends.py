"""The attention backends by name."""

from __future__ import annotations

from kvllm.attention.backend import AttentionBackend
from kvllm.attention.cache import PagedKVCache
from kvllm.attention.cpu import CpuBackend
from kvllm.attention.reference import ReferenceBackend
from kvllm.errors import ConfigError

BACKENDS: dict[str, type[AttentionBackend]] = {
    "cpu": CpuBackend,
    "reference": ReferenceBackend,
}


def make_backend(name: str, cache: PagedKVCache, num_query_heads: int, scale: float) -> AttentionBackend:
    """The backend `name` over `cache`; "auto" takes the fastest one for the cache's device.

    Raises ConfigError for a name that is not in BACKENDS.
    """
    if name == "auto":
        name = "cpu" if cache.data.is_cpu else "reference"
    if name not in BACKENDS:
        raise ConfigError(f"unknown attention backend {name!r}: use 'auto' or one of {', '.join(sorted(BACKENDS))}")
    return BACKENDS[name](cache, num_query_heads, scale)
