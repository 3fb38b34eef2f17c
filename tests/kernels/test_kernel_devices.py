"""The kernels between attention and the matrix products, of compression and of sampling, on every device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvllm import SamplingParams
from kvllm.compression import mass
from kvllm.compression.methods import kara, token2chunk
from kvllm.models import elementwise
from kvllm.models.quantized_matrix import IntegerGroups, QuantizedMatrix
from kvllm.worker import draws
from tests.helpers.devices import ALLOWED, DEVICES, assert_near, poisoned
from tests.helpers.literal_kara import dense_scores, window_tensors
from tests.helpers.tensors import cos_sin_table, randn

CASES = pytest.mark.parametrize(
    "device, dtype",
    [
        ("cpu", torch.float32),
        ("cpu", torch.bfloat16),
        *[pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in ALLOWED],
    ],
)
EPS = 1e-6


def normalized(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


@CASES
@pytest.mark.parametrize("rows, width", [(1, 4096), (300, 1024), (7, 1027)])
def test_norms_and_gated_activation(rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    """The norm alone, and with the addition before it, whose sum must be the rounded one."""
    x, residual, weight = (
        randn(*size, dtype=dtype, seed=len(size)).to(device) for size in [(rows, width)] * 2 + [(width,)]
    )
    residual = residual.roll(1, 1)
    added, gate_up = residual + x, 4 * randn(rows, 2 * width, dtype=dtype).to(device)
    gate, up = gate_up.double().chunk(2, dim=-1)
    with poisoned():
        assert_near(elementwise.rms_norm(x, weight, EPS), normalized(x, weight), ALLOWED[dtype])
        assert_near(elementwise.add_rms_norm(residual, x, weight, EPS), normalized(added, weight), ALLOWED[dtype])
        assert_near(elementwise.silu_mul(gate_up), gate * gate.sigmoid() * up, ALLOWED[dtype])
    assert torch.equal(residual, added)


@CASES
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_rotation(head_dim: int, norm: bool, dtype: torch.dtype, device: str) -> None:
    """6 query heads, 2 KV heads, and values after them that must stay."""
    qkv = randn(40, 10 * head_dim, dtype=dtype).to(device)
    weights = [randn(head_dim, dtype=dtype, seed=seed).to(device) if norm else None for seed in (1, 2)]
    positions, table = torch.arange(40, device=device) * 2, cos_sin_table(head_dim).to(device)
    cos, sin = table.double()[positions].unsqueeze(1).chunk(2, dim=-1)
    *turned, values = qkv.unflatten(1, (10, head_dim)).split((6, 2, 2), dim=1)
    expected = []
    for heads, weight in zip(turned, weights, strict=True):
        low, high = (heads.double() if weight is None else normalized(heads, weight)).chunk(2, dim=-1)
        expected.append(torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1))
    before = values.clone()
    elementwise.rotary(qkv, positions, table, 6, 2, head_dim, *weights, EPS)
    assert torch.equal(values, before)
    assert_near(qkv, torch.cat([*expected, before.double()], dim=1).flatten(1), ALLOWED[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits, group, shifted", [(4, 128, True), (4, 32, True), (4, 32, False), (8, 16, False)])
def test_products_of_integers(bits: int, group: int, shifted: bool, dtype: torch.dtype) -> None:
    """Of an MLP of 8 B parameters, and of eight experts, for each number of rows that has another variant."""
    shape, experts = (8 * 512, 4096), 8
    matrix = QuantizedMatrix.of(shape, IntegerGroups(bits, group, shifted), torch.device("cuda"))
    integers = randn(*shape).mul(3).round().clamp(-8, 7).to(torch.int8) + matrix.excess
    scales, shifts = (randn(shape[0], shape[1] // group, seed=seed) / 8 for seed in (1, 2))
    matrix.write(0, integers, scales, shifts if shifted else None)
    weight = matrix.rows(torch.arange(shape[0], device="cuda")).to(dtype).double()
    for num_rows in (1, 40, 300):
        x = randn(num_rows, shape[1], dtype=dtype, seed=3).cuda()
        ends = torch.tensor([num_rows * (i + 1) // experts for i in range(experts)], device="cuda")
        own = torch.searchsorted(ends, torch.arange(num_rows, device="cuda"), right=True)
        with poisoned():
            found, of_experts = matrix.multiply(x, None), matrix.multiply(x, None, 500, (experts, 512, ends))
        assert_near(found, x.double() @ weight.T, ALLOWED[dtype])
        every = x.double() @ weight.unflatten(0, (experts, 512))[:, :500].mT
        assert_near(of_experts, every[own, torch.arange(num_rows)], ALLOWED[dtype])


@DEVICES
@pytest.mark.parametrize(
    "heads, kv_heads, window, head_dim, dtype",
    [
        (32, 8, 768, 128, torch.bfloat16),
        (32, 8, 768, 128, torch.float32),
        (16, 8, 90, 64, torch.bfloat16),
        (6, 2, 501, 96, torch.float16),
    ],
)
def test_scores_of_a_window(
    heads: int, kv_heads: int, window: int, head_dim: int, dtype: torch.dtype, device: str
) -> None:
    """By every query, and by those of the buffer. Query tokens lie as in a pass: each with all of its heads."""
    queries, keys = window_tensors(0, 2, heads, kv_heads, window, head_dim, dtype)
    buffer = window // 8
    for num_queries in (window, buffer):
        chosen = queries[:, :, -num_queries:]
        rows = chosen.transpose(1, 2).contiguous().to(device).transpose(1, 2)
        with poisoned():
            found = kara.scores(rows, keys.to(device), buffer)
        assert_near(
            found, dense_scores(chosen, keys, buffer), 1e-4 if device == "cuda" or dtype != torch.bfloat16 else 1e-2
        )


@DEVICES
@pytest.mark.parametrize("squared", [False, True])
def test_attention_mass(squared: bool, device: str) -> None:
    queries, keys = window_tensors(2, 1, 4, 2, 200, 64)
    logits = queries.double() @ keys.double().repeat_interleave(2, dim=1).mT / 8
    probabilities = logits.masked_fill(torch.ones(200, 200).triu(1).bool(), -torch.inf).softmax(-1)
    expected = probabilities.pow(2 if squared else 1).view(1, 2, -1, 200).sum(2)
    index = torch.arange(200, device=device)
    found = mass.batched_attention_mass(queries.to(device), keys.to(device), 200, index, squared=squared)
    assert_near(found, expected, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("levels", [3, 1 << 20])
def test_token2chunk_chooses_as_on_the_cpu(levels: int) -> None:
    """Few levels of scores: almost everything ties."""
    of_keys = torch.randint(levels, (6, 736), generator=torch.Generator().manual_seed(0)).float()
    for total, budget, longest in ((225, 32, 8), (225, 0, 8), (700, 64, 3)):
        found = token2chunk.expand(of_keys.cuda(), total, budget, longest)
        assert torch.equal(found.cpu(), token2chunk.expand(of_keys, total, budget, longest))


OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7},
    {"temperature": 0.6, "top_p": 0.95},
    {"top_k": 50},
    {"top_k": 200, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0},
)
WIDE = (128, 128256)


def wide_logits(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*WIDE, generator=torch.Generator().manual_seed(0)).mul_(3).to(dtype)


@DEVICES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_most_likely_tokens(dtype: torch.dtype, device: str) -> None:
    """The first one of ties; none of a row that makes no sense."""
    logits = wide_logits(dtype).round()
    for row, value in enumerate((math.nan, math.inf)):
        logits[row, 7] = value
    logits[2] = -math.inf
    found = draws.most_likely(logits.to(device)).tolist()
    assert found[3:] == logits[3:].float().argmax(-1).tolist() and found[:3] == [draws.NO_TOKEN] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_draws_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    """Of every second row, the last one first, with the same random numbers. Probabilities may differ in their last
    bits, so a rare draw may, too."""
    logits, rows = wide_logits(dtype), list(range(WIDE[0]))[::-2]
    params = [SamplingParams(**OPTIONS[row % len(OPTIONS)]) for row in rows]
    uniforms = torch.rand(len(rows), generator=torch.Generator().manual_seed(1), dtype=torch.float64).tolist()
    expected = draws.choose(logits[rows].float(), list(range(len(rows))), params, uniforms).tolist()
    with poisoned():
        found = draws.choose(logits.cuda(), rows, params, uniforms).tolist()
    assert sum(a != b for a, b in zip(found, expected, strict=True)) <= 0.02 * len(rows)
