"""Attention over quantized KV pairs against a literal dense attention over what they are worth, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvllm.attention.base import AttentionBatch
from kvllm.attention.registry import make_backend
from kvllm.errors import ConfigError
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.kvcache.ops.registry import make_operations
from tests.helpers.attention_cases import (
    EDGES,
    MIXED,
    assert_bits_of_a_row_do_not_depend_on_the_batch,
    assert_later_entries_stay_hidden,
    assert_matches_dense,
    assert_scores,
    make_case,
    make_ragged_case,
)
from tests.helpers.caches import head_dim_for
from tests.helpers.tensors import randn

FORMATS = pytest.mark.parametrize("name", list(KV_FORMATS))


@FORMATS
@pytest.mark.parametrize("block_size, head_dim, group", [(1, 8, 1), (3, 48, 3), (16, 128, 2)])
def test_reference_matches_dense(name: str, block_size: int, head_dim: int, group: int) -> None:
    sizes = {"block_size": block_size, "head_dim": head_dim_for(name, head_dim), "group": group}
    assert_matches_dense(make_case(MIXED[:5], kv_cache_dtype=name, **sizes), "reference", tolerance=1e-5)


@FORMATS
def test_reference_leaves_holes_out(name: str) -> None:
    assert_matches_dense(make_ragged_case(head_dim=16, kv_cache_dtype=name), "reference", tolerance=1e-5)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""The CPU rounds queries to 16 bits; outputs in bfloat16 are rounded, too."""


GROUPS = (1, 2, 3, 4, 8)
SHAPES = ((1, 32), (3, 64), (16, 96), (16, 128), (256, 64), (256, 192))


def groups_and_shapes() -> list[Any]:
    """By default two groups of query heads with each shape, in turn."""
    return [
        pytest.param(group, *shape, marks=() if (i + j) % len(GROUPS) in (0, 2) else pytest.mark.long)
        for i, group in enumerate(GROUPS)
        for j, shape in enumerate(SHAPES)
    ]


@FORMATS
@DTYPES
@pytest.mark.parametrize(("group", "block_size", "head_dim"), groups_and_shapes())
def test_cpu_matches_dense(name: str, block_size: int, head_dim: int, group: int, dtype: torch.dtype) -> None:
    case = make_case(MIXED, block_size=block_size, head_dim=head_dim, group=group, dtype=dtype, kv_cache_dtype=name)
    assert_matches_dense(case, "cpu", tolerance=TOLERANCE[dtype])


@FORMATS
@DTYPES
def test_cpu_matches_dense_at_edges_and_leaves_holes_out(name: str, dtype: torch.dtype) -> None:
    assert_matches_dense(make_case(EDGES, group=3, dtype=dtype, kv_cache_dtype=name), "cpu", TOLERANCE[dtype])
    for block_size in (1, 16, 256):
        case = make_ragged_case(block_size=block_size, head_dim=32, dtype=dtype, kv_cache_dtype=name)
        assert_matches_dense(case, "cpu", TOLERANCE[dtype])


@FORMATS
@DTYPES
def test_bits_of_a_row_do_not_depend_on_the_batch(name: str, dtype: torch.dtype) -> None:
    for group in (1, 3, 4):
        assert_bits_of_a_row_do_not_depend_on_the_batch(group, dtype, kv_cache_dtype=name)


@FORMATS
@DTYPES
def test_later_pairs_stay_hidden(name: str, dtype: torch.dtype) -> None:
    assert_later_entries_stay_hidden(dtype, kv_cache_dtype=name)


@FORMATS
def test_bits_do_not_depend_on_the_number_of_threads(name: str) -> None:
    decode = make_case([[1500]], kv_cache_dtype=name)
    long_prefill = make_case([list(range(300)), [900]], kv_cache_dtype=name)
    outputs = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        outputs.append(torch.cat((decode.run(), long_prefill.run())))
    assert all(torch.equal(output, outputs[0]) for output in outputs[1:])


@FORMATS
def test_scores_of_windows(name: str) -> None:
    assert_scores("cpu", tolerance=1e-4, kv_cache_dtype=name)


@FORMATS
def test_backends_that_cannot_read_a_format_say_so(name: str) -> None:
    cache = PagedKVCache(CacheShape(1, 2, 64, 256, torch.bfloat16, kv_format=KV_FORMATS[name]), 2)
    assert make_backend("reference", cache, 4, 1.0).name == "reference"
    for backend in ("flash_attn", "xformers"):
        with pytest.raises(ConfigError, match=f"'{backend}' does not read a KV cache of {name}: use .*'reference'"):
            make_backend(backend, cache, 4, 1.0)


@pytest.mark.parametrize("name, head_dim", [("fp8_e4m3", 80), ("int8", 48), ("int4", 288), ("int6_int4_hadamard", 512)])
def test_the_reference_serves_only_who_asks_for_it(name: str, head_dim: int) -> None:
    cache = PagedKVCache(CacheShape(1, 2, head_dim, 256, torch.bfloat16, kv_format=KV_FORMATS[name]), 2)
    with pytest.raises(ConfigError, match=f"kv_cache_dtype='{name}': no attention backend for cpu reads it"):
        make_backend("auto", cache, 4, 1.0)
    with pytest.raises(ConfigError, match=f"'cpu' (does not read|reads) a KV cache of {name}.*: use 'reference'"):
        make_backend("cpu", cache, 4, 1.0)


@FORMATS
def test_the_cpu_serves_what_it_reads(name: str) -> None:
    cache = PagedKVCache(CacheShape(1, 2, 64, 256, torch.bfloat16, kv_format=KV_FORMATS[name]), 2)
    assert make_backend("auto", cache, 4, 1.0).name == "cpu"


def test_a_rotation_spreads_a_channel_that_exceeds_the_others() -> None:
    """Attention over what is stored, against that over what was."""
    errors = {}
    for name in ("int6_int4", "int6_int4_hadamard"):
        cache = PagedKVCache(CacheShape(1, 2, 128, 16, torch.float32, kv_format=KV_FORMATS[name]), 4)
        keys, values, queries = (randn(64, 2, 128, seed=seed) for seed in range(3))
        for vectors in (keys, values):
            vectors[..., 40] *= 30
        make_operations(cache).store(0, keys, values, torch.arange(64))
        starts, index = torch.tensor([0, 64], dtype=torch.int32), torch.arange(64, dtype=torch.int32)
        backend = make_backend("cpu", cache, 2, 128**-0.5)
        batch = AttentionBatch(starts, index, torch.arange(4, dtype=torch.int32)[None])
        found = backend.run(0, queries, backend.plan(batch)).double()
        scores = torch.einsum("thd,shd->hts", queries.double(), keys.double()) * 128**-0.5
        weights = scores.masked_fill(torch.ones(64, 64, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        errors[name] = (found - torch.einsum("hts,shd->thd", weights, values.double())).norm()
    assert errors["int6_int4_hadamard"] < errors["int6_int4"] / 2
