"""Attention over quantized KV pairs against a literal dense attention over what they are worth, in float64."""

from __future__ import annotations

import pytest
import torch

from kvllm.attention.registry import make_backend
from kvllm.errors import ConfigError
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS
from tests.helpers.attention_cases import MIXED, assert_matches_dense, make_case, make_ragged_case

FORMATS = pytest.mark.parametrize("name", list(KV_FORMATS))


@FORMATS
@pytest.mark.parametrize("block_size, head_dim, group", [(1, 8, 1), (3, 48, 3), (16, 128, 2)])
def test_reference_matches_dense(name: str, block_size: int, head_dim: int, group: int) -> None:
    case = make_case(MIXED[:5], block_size=block_size, head_dim=head_dim, group=group, kv_cache_dtype=name)
    assert_matches_dense(case, "reference", tolerance=1e-5)


@FORMATS
def test_reference_leaves_holes_out(name: str) -> None:
    assert_matches_dense(make_ragged_case(head_dim=16, kv_cache_dtype=name), "reference", tolerance=1e-5)


@FORMATS
def test_backends_that_cannot_read_a_format_say_so(name: str) -> None:
    cache = PagedKVCache(CacheShape(1, 2, 64, 256, torch.bfloat16, kv_format=KV_FORMATS[name]), 2)
    assert make_backend("reference", cache, 4, 1.0).name == "reference"
    for backend in ("triton", "flash_attn", "xformers"):
        with pytest.raises(ConfigError, match=f"'{backend}' does not read a KV cache of {name}: use .*'reference'"):
            make_backend(backend, cache, 4, 1.0)


@pytest.mark.parametrize("name", ["fp8_e4m3", "int8", "int4"])
def test_the_reference_serves_only_who_asks_for_it(name: str) -> None:
    cache = PagedKVCache(CacheShape(1, 2, 64, 256, torch.bfloat16, kv_format=KV_FORMATS[name]), 2)
    with pytest.raises(ConfigError, match=f"kv_cache_dtype='{name}': no attention backend for cpu reads it"):
        make_backend("auto", cache, 4, 1.0)
