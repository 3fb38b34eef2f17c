"""The Triton kernels over quantized caches, in Triton's interpreter, in a process of their own as in test_triton.py."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec

import pytest
import torch

from kvllm.compression.mass import attention_mass, batched_attention_mass
from kvllm.compression.methods import keydiff
from kvllm.compression.paged_keys import PagedKeys
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.kvcache.ops.base import KVOperations
from kvllm.kvcache.ops.plain import TorchOperations
from tests.helpers import attention_cases
from tests.helpers.caches import head_dim_for, random_kept
from tests.helpers.processes import run_python
from tests.helpers.strict_interpreter import print_failures
from tests.helpers.tensors import randn
from tests.kernels.test_triton import dense_mass, run_observed

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton, which is not installed")

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
"""In 16 bits a key is rounded once more, to the dtype of its query."""


SHORT = ("fp8_e4m3", "int8", "int6_int4_hadamard")
"""One of each kind: a float, whole bytes, and codes of fewer bits. The others are long tests."""
DTYPES = [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in KV_FORMATS]


def run_checks(dtypes: Iterable[str]) -> None:
    every = itertools.product(CHECKS.items(), dtypes)
    print_failures({f"{name}-{dtype}": partial(function, dtype) for (name, function), dtype in every})


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest) -> dict[str, str]:
    dtypes = tuple(KV_FORMATS) if request.config.getoption("long") else SHORT
    return run_python(f"run_checks({dtypes})", __name__, TRITON_INTERPRET="1")


def attention_matches_dense(name: str) -> None:
    """Decodes and chunks side by side, a block that no sequence holds is NaN. Holes of single heads, a window, learned
    scores and a soft cap are as without quantization."""
    rows = [[64], list(range(40, 59)), [520]]
    for head_dim, group, block_size, dtype, layer in (
        (128, 4, 16, torch.float32, "plain"),
        (96, 3, 64, torch.float16, "all"),
    ):
        common = {"group": group, "block_size": block_size, "dtype": dtype, "kv_cache_dtype": name}
        case = attention_cases.make_case(rows, head_dim=head_dim, **common)
        case = attention_cases.with_options(case, attention_cases.OPTIONS[layer])
        attention_cases.assert_matches_dense(case, "triton", TOLERANCE[dtype])
    latents = KV_FORMATS[name].keys == KV_FORMATS[name].values and not KV_FORMATS[name].keys.rotated
    wide = {"head_dim": 576 if latents else 512, "group": 3, "dtype": torch.float16, "kv_cache_dtype": name}
    case = attention_cases.make_case(rows, shared=latents, **wide)
    attention_cases.assert_matches_dense(case, "triton", TOLERANCE[torch.float16])
    ragged = attention_cases.make_ragged_case(head_dim=16, group=1, kv_cache_dtype=name)
    attention_cases.assert_matches_dense(ragged, "triton", TOLERANCE[torch.float32])


def scores_that_methods_see(name: str) -> None:
    """Observed scores, and the attention mass, follow from keys as attention has them."""
    from kvllm.kernels.codes import as_kernels_read

    case = attention_cases.make_scored_case([(95, 16), (111, 16)], head_dim=32, kv_cache_dtype=name)
    expected = attention_cases.dense_scores(case)
    case.run("triton")
    torch.testing.assert_close(case.cache.scores.double(), expected, atol=1e-5, rtol=1e-5)
    case = attention_cases.make_case([[64], list(range(40, 59))], head_dim=96, group=3, kv_cache_dtype=name)
    mass = torch.zeros(1, 2, attention_cases.KV_HEADS, 100)
    run_observed(case, mass, [1, 0])
    for sequence, row in enumerate((1, 0)):
        expected = dense_mass(case, sequence)
        torch.testing.assert_close(mass[0, row, :, : expected.shape[1]].double(), expected, atol=2e-5, rtol=1e-5)
    tables = case.batch.block_tables[:, :2]
    keys = TorchOperations(case.cache).gather_keys([0], tables, 30)
    blocks, head_dim, rotated = as_kernels_read([case.cache.keys(0)]), keys.shape[-1], case.cache.shape.rotated
    paged = PagedKeys(blocks, tables, 30, head_dim, keys.dtype, rotated=rotated)
    queries = randn(2, 3 * keys.shape[1], 7, head_dim)
    torch.testing.assert_close(keydiff.scores(paged), keydiff.scores(keys), rtol=1e-5, atol=1e-6)
    expected = torch.stack([attention_mass(*each) for each in zip(queries, keys[:, :, :25], strict=True)])
    torch.testing.assert_close(batched_attention_mass(queries, paged, 25), expected, rtol=1e-4, atol=1e-6)


def pair_of_caches(name: str, head_dim: int, dtype: torch.dtype) -> tuple[KVOperations, KVOperations]:
    """Operations over caches that hold the same bytes: those of a GPU, and in plain torch."""
    from kvllm.kvcache.ops.gpu import GpuOperations

    caches = [PagedKVCache(CacheShape(1, 2, head_dim, 16, dtype, kv_format=KV_FORMATS[name]), 13) for _ in range(2)]
    caches[0].data.view(torch.uint8).random_(generator=torch.Generator().manual_seed(0))
    caches[1].data.view(torch.uint8).copy_(caches[0].data.view(torch.uint8))
    return GpuOperations(caches[0], compiled=False), TorchOperations(caches[1])


def assert_same_bytes(found: KVOperations, expected: KVOperations) -> None:
    assert torch.equal(found.cache.data.view(torch.uint8), expected.cache.data.view(torch.uint8))


def stored_codes_and_scales(name: str) -> None:
    """Bit for bit those of the formulas in torch, from views of a wider tensor, for vectors of every size."""
    for head_dim, dtype, largest in ((head_dim_for(name, 96), torch.float32, 20), (16, torch.float16, 3)):
        gpu, plain = pair_of_caches(name, head_dim, dtype)
        vectors = randn(24, 2, 2 * head_dim) * torch.logspace(-largest, largest, 24)[:, None, None]
        vectors[1], vectors[2], vectors[3, :, 5] = 0, -2.5, 6e4
        vectors[4] = torch.linspace(-1, 1, 2 * head_dim).pow(7)  # many of float8 are subnormal
        keys, values = vectors.to(dtype).split(head_dim, dim=2)[0].contiguous(), vectors.to(dtype).flatten(1)
        values = values[:, head_dim : 3 * head_dim].unflatten(1, (2, head_dim))
        slots = torch.randperm(13 * 16, generator=torch.Generator().manual_seed(1))[:24]
        slots[7] = -1
        for operations in (gpu, plain):
            operations.store(0, keys, values, slots)
        assert_same_bytes(gpu, plain)


def vectors_that_are_not_finite(name: str) -> None:
    """What is read of them is NaN; their neighbours stay."""
    gpu, plain = pair_of_caches(name, 32, torch.float32)
    vectors = randn(4, 2, 32)
    vectors[1, 1, 9], vectors[2, 0, 31], vectors[3, 1, 0] = math.nan, math.inf, -math.inf
    for operations in (gpu, plain):
        operations.store(0, vectors, vectors, torch.arange(4))
    broken = (torch.tensor([1, 0, 1]), torch.tensor([1, 2, 3]))
    assert gpu.gather_keys([0], torch.tensor([[0]]), 16)[0][broken].isnan().any(-1).all()
    for operations in (gpu, plain):
        for part in operations.cache.parts:
            part[0, :, 0, *broken] = 0
    assert_same_bytes(gpu, plain)


def moved_bytes(name: str) -> None:
    """Copies of blocks and compactions, in place and out of place, move codes with their scales."""
    pair = pair_of_caches(name, head_dim_for(name, 48), torch.float16)
    for operations in pair:
        operations.copy_blocks(torch.tensor([2, 2, 8]), torch.tensor([5, 0, 1]))
    assert_same_bytes(*pair)
    sources = torch.tensor([[11, 3, 7, 1, 8, 2], [0, 6, 99, 99, 99, 99]])
    for destinations in (sources[:, :5].contiguous(), torch.tensor([[10, 4, 9, 5, 12], [7, -1, -1, -1, -1]])):
        kept = random_kept(1, [96, 32], 2, [75, 16], ragged=True)
        for operations in pair:
            operations.compact(kept, sources, destinations)
        assert_same_bytes(*pair)


CHECKS: dict[str, Callable[[str], None]] = {
    function.__name__: function
    for function in (
        attention_matches_dense,
        scores_that_methods_see,
        stored_codes_and_scales,
        vectors_that_are_not_finite,
        moved_bytes,
    )
}


@pytest.mark.parametrize("kv_cache_dtype", DTYPES)
@pytest.mark.parametrize("check", CHECKS)
def test_in_the_interpreter(check: str, kv_cache_dtype: str, failures: dict[str, str]) -> None:
    assert f"{check}-{kv_cache_dtype}" not in failures, failures[f"{check}-{kv_cache_dtype}"]
