"""Elementwise operators against Hugging Face's modules, and data movement in the paged cache, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvllm import _extension
from kvllm.attention.base import AttentionBackend
from kvllm.attention.registry import make_backend
from kvllm.errors import KvLLMError
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.models import elementwise
from tests.helpers.caches import literal_compaction, random_kept
from tests.helpers.elementwise_checks import (
    assert_bfloat16_rounds_to_even,
    assert_bits_of_a_row_do_not_depend_on_the_others,
    assert_rotary_in_bfloat16,
    assert_silu_mul_is_swiglu,
    assert_silu_of_extreme_gates,
)
from tests.helpers.tensors import assert_same_rounding, cos_sin_table, randn

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
BACKENDS = pytest.mark.parametrize("name", ["cpu", "reference"])
EPS = 1e-6


@DTYPES
@pytest.mark.parametrize("rows, width", [(1, 512), (7, 24), (3, 1027), (300, 640)])
def test_rms_norm_is_that_of_transformers(rows: int, width: int, dtype: torch.dtype) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    module = Qwen3RMSNorm(width, eps=EPS)
    module.weight.data = randn(width, dtype=dtype, seed=1)
    x, residual = randn(rows, width, dtype=dtype, seed=2), randn(rows, width, dtype=dtype, seed=3)
    with torch.no_grad():
        assert_same_rounding(elementwise.rms_norm(x, module.weight.data, EPS), module(x))
        expected_sum = residual + x
        normalized = elementwise.add_rms_norm(residual, x, module.weight.data, EPS)
        assert torch.equal(residual, expected_sum)
        assert_same_rounding(normalized, module(expected_sum))


@DTYPES
@pytest.mark.parametrize("rows, width", [(1, 1536), (5, 9), (90, 1000)])
def test_silu_mul_is_swiglu(rows: int, width: int, dtype: torch.dtype) -> None:
    assert_silu_mul_is_swiglu(rows, width, dtype)


def test_silu_of_extreme_gates() -> None:
    assert_silu_of_extreme_gates()


@pytest.mark.parametrize("kv_heads", [0, 2])
@pytest.mark.parametrize("normalize", [False, True])
def test_rotary_in_bfloat16(kv_heads: int, normalize: bool) -> None:
    assert_rotary_in_bfloat16(kv_heads, normalize)


def test_bits_of_a_row_do_not_depend_on_the_others() -> None:
    assert_bits_of_a_row_do_not_depend_on_the_others()


def test_bfloat16_rounds_to_even() -> None:
    assert_bfloat16_rounds_to_even()


@pytest.mark.parametrize("head_dim", [4, 16, 48, 64, 128])
@pytest.mark.parametrize("normalize", [False, True])
def test_rotary_is_that_of_transformers(head_dim: int, normalize: bool) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    query_heads, kv_heads, rows = 6, 2, 40
    qkv = randn(rows, (query_heads + 2 * kv_heads) * head_dim)
    positions = torch.randint(100, (rows,), generator=torch.Generator().manual_seed(1))
    table = cos_sin_table(head_dim)
    heads = qkv.clone().unflatten(1, (-1, head_dim))
    weights: list[torch.Tensor | None] = [None, None]
    if normalize:
        weights = [randn(head_dim, seed=2), randn(head_dim, seed=3)]
        for part, weight in ((slice(0, query_heads), weights[0]), (slice(query_heads, -kv_heads), weights[1])):
            norm = Qwen3RMSNorm(head_dim, eps=EPS)
            norm.weight.data = weight
            heads[:, part] = norm(heads[:, part]).detach()
    cos, sin = (half.repeat(1, 2)[None] for half in table[positions].chunk(2, dim=-1))
    q, k = heads[None, :, :query_heads].transpose(1, 2), heads[None, :, query_heads:-kv_heads].transpose(1, 2)
    q, k = (x.transpose(1, 2)[0] for x in apply_rotary_pos_emb(q, k, cos, sin))
    expected = torch.cat((q, k, heads[:, -kv_heads:]), dim=1).flatten(1)

    for rotate in (elementwise.rotary, elementwise.torch_rotary):
        actual = qkv.clone()
        rotate(actual, positions, table, query_heads, kv_heads, head_dim, *weights, EPS)
        torch.testing.assert_close(actual, expected, rtol=3e-6, atol=2e-6)


def test_operators_refuse_bad_tensors() -> None:
    x, weight = randn(4, 8), randn(8)
    table, positions = cos_sin_table(4), torch.arange(4)
    calls: dict[str, Callable[[], object]] = {
        "x has dtype Half: float32 and bfloat16": lambda: elementwise.rms_norm(x.half(), weight, EPS),
        "weight has dtype BFloat16, not Float": lambda: elementwise.rms_norm(x, weight.bfloat16(), EPS),
        "dimension 0 of weight is 7, not 8": lambda: elementwise.rms_norm(x, weight[:7], EPS),
        "x is not contiguous": lambda: elementwise.rms_norm(randn(8, 4).T, weight, EPS),
        "dimension 0 of residual is 3": lambda: elementwise.add_rms_norm(x[:3], x, weight, EPS),
        "odd number of columns": lambda: elementwise.silu_mul(randn(2, 7)),
        "position 100 is not among the 100 rows": lambda: elementwise.rotary(x, positions + 97, table, 2, 0, 4),
        "do not hold 2 \\+ 1 heads": lambda: elementwise.rotary(x, positions, table, 2, 1, 4),
        "it must be even": lambda: elementwise.rotary(x, positions, table[:, :3].contiguous(), 2, 0, 3),
    }
    for message, call in calls.items():
        with pytest.raises(RuntimeError, match=message):
            call()


def make_cache(
    num_layers: int = 2,
    num_kv_heads: int = 3,
    block_size: int = 4,
    num_blocks: int = 9,
    dtype: torch.dtype = torch.float32,
) -> PagedKVCache:
    cache = PagedKVCache(CacheShape(num_layers, num_kv_heads, 6, block_size, dtype), num_blocks)
    cache.data.copy_(torch.arange(cache.data.numel()).reshape(cache.data.shape) % 251)
    return cache


def cpu_or_reference(name: str, cache: PagedKVCache) -> AttentionBackend:
    return make_backend(name, cache, cache.shape.num_kv_heads, 1.0)


@BACKENDS
@DTYPES
def test_store(name: str, dtype: torch.dtype) -> None:
    cache = make_cache(dtype=dtype)
    expected = cache.data.clone()
    slots = torch.tensor([7, -1, 0, 35, 20])
    qkv = randn(5, 100, dtype=dtype)
    keys, values = qkv[:, 10:28].unflatten(1, (3, 6)), qkv[:, 40:58].unflatten(1, (3, 6))
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[1, 0, slot // 4, :, slot % 4] = keys[row]
            expected[1, 1, slot // 4, :, slot % 4] = values[row]
    cpu_or_reference(name, cache).store(1, keys, values, slots)
    assert torch.equal(cache.data, expected)


@BACKENDS
@DTYPES
def test_copy_blocks(name: str, dtype: torch.dtype) -> None:
    cache = make_cache(dtype=dtype)
    expected = cache.data.clone()
    for source, destination in ((2, 5), (2, 0), (8, 1)):
        expected[:, :, destination] = cache.data[:, :, source]
    cpu_or_reference(name, cache).copy_blocks(torch.tensor([2, 2, 8]), torch.tensor([5, 0, 1]))
    assert torch.equal(cache.data, expected)


@BACKENDS
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_compact(name: str, in_place: bool, ragged: bool) -> None:
    cache = make_cache(num_blocks=12)
    sources = torch.tensor([[11, 3, 7], [0, 6, 99]])  # the second region has two blocks
    destinations = sources[:, :2] if in_place else torch.tensor([[5, 2], [9, -1]])
    kept = random_kept(2, [12, 8], 3, [7, 4], ragged=ragged)
    expected = literal_compaction(cache.data, kept, sources, destinations)
    cpu_or_reference(name, cache).compact(kept, sources, destinations.contiguous())
    assert torch.equal(cache.data, expected)


def test_compact_takes_sequences_in_order() -> None:
    """Two sequences share their blocks: one moves its survivors out, then the other compacts in place."""
    sources, destinations = torch.tensor([[0, 1, 2], [0, 1, 2]]), torch.tensor([[5], [0]])
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for seed in range(20):
            caches = [PagedKVCache(CacheShape(3, 2, 32, 16, torch.float32), 12) for _ in range(2)]
            caches[0].data.copy_(randn(*caches[0].data.shape, seed=seed))
            caches[1].data.copy_(caches[0].data)
            generator = torch.Generator().manual_seed(seed)
            chosen = torch.rand(3, 2, 2, 48, generator=generator).argsort(-1)[..., :16].sort(-1).values
            for name, cache in zip(("cpu", "reference"), caches, strict=True):
                make_backend(name, cache, 2, 1.0).compact(chosen, sources, destinations)
            assert torch.equal(caches[0].data, caches[1].data)
    finally:
        torch.set_num_threads(threads)


@BACKENDS
@pytest.mark.parametrize("fixture", ["paged_compaction", "paged_compaction_256"])
def test_compact_golden(name: str, fixture: str, load_vectors: Callable) -> None:
    arrays, meta = load_vectors(fixture)
    for i, case in enumerate(meta["cases"]):
        block_size, start, window = case["B"], case["start"], case["window_blocks"]
        data = torch.stack([torch.from_numpy(arrays[f"c{i}_{kind}_cache"]) for kind in "kv"], dim=1).transpose(3, 4)
        shape = CacheShape(case["L"], case["Hkv"], case["d"], block_size, torch.float32)
        cache = PagedKVCache(shape, case["num_blocks"])
        cache.data.copy_(data)

        # The paper's mode: the tail behind the window survives whole, so it is kept as well.
        table = torch.from_numpy(arrays[f"c{i}_block_table"])
        kept_window = torch.from_numpy(arrays[f"c{i}_kept"]).unsqueeze(1)
        tail = torch.arange(window * block_size, case["C"] - start).expand(*kept_window.shape[:3], -1)
        kept = torch.cat((kept_window, tail), dim=-1)
        sources = table[None, start // block_size :].contiguous()
        after = torch.from_numpy(arrays[f"c{i}_block_table_after"])
        destinations = after[None, start // block_size :].contiguous()
        cpu_or_reference(name, cache).compact(kept, sources, destinations)

        entries = torch.arange(case["C_after"])
        for plane, kind in enumerate("kv"):
            logical = cache.data[:, plane, after[entries // block_size], :, entries % block_size]
            expected = torch.from_numpy(arrays[f"c{i}_{kind}_after_logical"])
            assert torch.equal(logical.permute(1, 2, 0, 3), expected)


def test_cache_operators_refuse_bad_ids() -> None:
    cache = make_cache(num_layers=1, num_kv_heads=1)
    backend = cpu_or_reference("cpu", cache)
    before = cache.data.clone()
    rows = randn(1, 1, 6)
    sources, destinations = torch.tensor([[0, 1]]), torch.tensor([[2, 3]])

    def compact(kept: list[int], sources: torch.Tensor = sources, destinations: torch.Tensor = destinations) -> None:
        backend.compact(torch.tensor(kept).view(1, 1, 1, -1), sources, destinations)

    calls: dict[str, Callable[[], object]] = {
        "slot 36 is not in the cache of 9 blocks of 4": lambda: backend.store(0, rows, rows, torch.tensor([36])),
        "dimension 1 of keys is 2, not 1": lambda: backend.store(0, randn(1, 2, 6), rows, torch.tensor([0])),
        "slots has dtype Int, not Long": lambda: backend.store(0, rows, rows, torch.tensor([0]).int()),
        "block 9 of sources": lambda: backend.copy_blocks(torch.tensor([9]), torch.tensor([0])),
        "block -1 of destinations": lambda: backend.copy_blocks(torch.tensor([0]), torch.tensor([-1])),
        "not strictly ascending: 3 follows 3": lambda: compact([0, 3, 3]),
        "not strictly ascending: 1 follows 2": lambda: compact([2, 1]),
        "-1 before 4": lambda: compact([2, -1, 4]),
        "reaches offset 8 of a region of 2 blocks of 4": lambda: compact([8]),
        "5 kept entries do not fit 1 blocks of 4": lambda: compact([0, 1, 2, 3, 4], destinations=destinations[:, :1]),
        "block 12 of sources": lambda: compact([0, 4], sources=torch.tensor([[0, 12]])),
        "block -3 of destinations": lambda: compact([0], destinations=torch.tensor([[-3]])),
    }
    for message, call in calls.items():
        with pytest.raises(RuntimeError, match=message):
            call()
    assert torch.equal(cache.data, before)


def test_missing_extension_says_how_to_build(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(_extension, "__file__", f"{tmp_path}/_extension.py")
    with pytest.raises(KvLLMError, match="pip install --no-build-isolation -e ."):
        _extension.load_extension.__wrapped__()
