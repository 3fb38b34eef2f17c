"""Every attention backend of a device against dense attention in float64, with NaN in memory that is not written."""

from __future__ import annotations

import pytest
import torch

from kvllm.attention.registry import BACKENDS, make_backend
from kvllm.errors import ConfigError
from kvllm.kvcache.formats import KV_FORMATS
from tests.helpers import attention_cases
from tests.helpers.attention_cases import AttentionCase, dense_attention, make_case, make_ragged_case
from tests.helpers.devices import ALLOWED, CUDA, DEVICES, assert_near, poisoned
from tests.helpers.kernel_launches import LATENT

# head_dim, query heads of a KV head, block size, dtype: those that serve, then all that a kernel must do; latents.
SHAPES = (
    (128, 4, 256, torch.bfloat16),
    (128, 2, 16, torch.bfloat16),
    (128, 4, 16, torch.float32),
    (64, 8, 32, torch.bfloat16),
    (64, 1, 16, torch.float16),
    (96, 3, 64, torch.bfloat16),
    (256, 4, 256, torch.bfloat16),
    (128, 8, 128, torch.float16),
    (32, 5, 16, torch.float32),
    (512, 8, 64, torch.bfloat16),
    (576, 20, 64, torch.bfloat16),
    (576, 64, 16, torch.bfloat16),
    (576, 16, 16, torch.float32),
)
UNEVEN = [[40_000], *[[index] for index in range(0, 600, 37)]]
"""A sequence of more segments than a kernel cuts one into, among short ones."""


def assert_backend(name: str, case: AttentionCase, device: str, allowed: float) -> None:
    expected, case = dense_attention(case), case.to(device)
    ragged = case.batch.packed_len is not None
    try:
        backend = make_backend(name, case.cache, case.queries.shape[1], case.scale, ragged=ragged)
    except ConfigError as error:
        pytest.skip(str(error))
    with poisoned():
        found = backend.run(0, case.queries, backend.plan(case.batch))
    assert_near(found, expected, allowed)


@DEVICES
@pytest.mark.parametrize("head_dim, group, block_size, dtype", SHAPES)
@pytest.mark.parametrize("name", BACKENDS)
def test_decodes_and_chunks(
    name: str, head_dim: int, group: int, block_size: int, dtype: torch.dtype, device: str
) -> None:
    options = {"head_dim": head_dim, "group": group, "block_size": block_size, "dtype": dtype}
    options["shared"] = head_dim == LATENT
    for rows in (attention_cases.MIXED, [[600], [0], [1023]]):
        assert_backend(name, make_case(rows, **options), device, ALLOWED[dtype])


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("head_dim, group, block_size, dtype", SHAPES)
@pytest.mark.parametrize("name", BACKENDS)
def test_decodes_of_very_different_lengths(
    name: str, head_dim: int, group: int, block_size: int, dtype: torch.dtype, device: str
) -> None:
    options = {"head_dim": head_dim, "group": group, "block_size": block_size, "dtype": dtype}
    case = make_case(UNEVEN, shared=head_dim == LATENT, **options)
    assert_backend(name, case, device, ALLOWED[dtype])


@DEVICES
@pytest.mark.parametrize("head_dim, group, block_size, dtype", SHAPES)
@pytest.mark.parametrize("name", BACKENDS)
def test_heads_of_different_lengths(
    name: str, head_dim: int, group: int, block_size: int, dtype: torch.dtype, device: str
) -> None:
    options = {"head_dim": head_dim, "group": group, "block_size": block_size, "dtype": dtype}
    case = make_ragged_case(shared=head_dim == LATENT, **options)
    assert_backend(name, case, device, ALLOWED[dtype])


@DEVICES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kv_cache_dtype", KV_FORMATS)
def test_quantized_caches(kv_cache_dtype: str, dtype: torch.dtype, device: str) -> None:
    """A key is rounded once more, to its query's dtype."""
    options = {"head_dim": 128, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    name = "triton" if device == "cuda" else "cpu"
    for case in (make_case(attention_cases.MIXED, **options), make_ragged_case(**options)):
        assert_backend(name, case, device, 2 * ALLOWED[dtype])


@DEVICES
@pytest.mark.parametrize("kv_cache_dtype", ["auto", *KV_FORMATS])
def test_observed_scores(kv_cache_dtype: str, device: str) -> None:
    """What a decode adds to them."""
    scored = [(0, 0), (95, 16), (111, 16), (700, 640), (1500, 512)]
    options = {"head_dim": 128, "kv_cache_dtype": kv_cache_dtype}
    case = attention_cases.make_scored_case(scored, **options)
    expected, moved = attention_cases.dense_scores(case), case.to(device)
    assert case.cache.scores is not None and moved.cache.scores is not None
    before = case.cache.scores.double()
    moved.run("triton" if device == "cuda" else "cpu")
    assert_near(moved.cache.scores.cpu().double() - before, expected - before, 2 * ALLOWED[torch.float32])
