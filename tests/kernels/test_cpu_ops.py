"""The compiled elementwise operators against Hugging Face's modules; test_instruction_sets has more of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvllm import _extension
from kvllm.errors import KvLLMError
from kvllm.models import elementwise
from tests.helpers.elementwise_checks import assert_gated_activations
from tests.helpers.tensors import assert_same_rounding, cos_sin_table, randn

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
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
def test_gated_activations(rows: int, width: int, dtype: torch.dtype) -> None:
    assert_gated_activations(rows, width, dtype)


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


@pytest.mark.parametrize("dtype", [torch.int32, torch.float16])
@pytest.mark.parametrize("first, count", [(0, 48), (5, 3), (14, 20), (16, 16)])
def test_rows_in_tiles(first: int, count: int, dtype: torch.dtype) -> None:
    """Other rows stay."""
    rows, tiles = torch.arange(count * 37).view(count, 37).to(dtype), torch.full((3, 37, 16), -1, dtype=dtype)
    expected = tiles.clone()
    for i, row in enumerate(rows):
        expected[(first + i) // 16, :, (first + i) % 16] = row
    _extension.operator("tile_rows")(rows, first, tiles)
    assert torch.equal(tiles, expected)
    with pytest.raises(RuntimeError, match="are not among the 48 rows"):
        _extension.operator("tile_rows")(rows, 49 - count, tiles)


def test_operators_refuse_bad_tensors() -> None:
    x, weight = randn(4, 8), randn(8)
    table, positions = cos_sin_table(4), torch.arange(4)
    calls: dict[str, Callable[[], object]] = {
        "x has dtype Half: float32 and bfloat16": lambda: elementwise.rms_norm(x.half(), weight.half(), EPS),
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


def test_missing_extension_says_how_to_build(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(_extension, "__file__", f"{tmp_path}/_extension.py")
    with pytest.raises(KvLLMError, match="pip install --no-build-isolation -e ."):
        _extension.load_extension.__wrapped__()
