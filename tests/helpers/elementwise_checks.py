"""Promises of the element-wise operators that hold with every instruction set."""

from __future__ import annotations

import numpy as np
import torch

from kvllm.models import elementwise
from kvllm.worker.draws import most_likely
from tests.helpers.tensors import assert_same_rounding, cos_sin_table, randn

EPS = 1e-6


def assert_gated_activations(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = (4 * randn(rows, 2 * width, dtype=dtype)).clamp(min=-6)
    gate, up = gate_up.split(width, dim=1)
    assert_same_rounding(elementwise.silu_mul(gate_up), torch.nn.functional.silu(gate) * up)
    gelu = torch.nn.functional.gelu(gate.double(), approximate="tanh").to(dtype)  # torch subtracts near numbers
    assert_same_rounding(elementwise.gelu_mul(gate_up), gelu * up)


def assert_norms_with_weights_of_float32() -> None:
    """A result of bfloat16 is rounded once, after the weight."""
    x, residual, weight = randn(20, 143).bfloat16(), randn(20, 143, seed=1).bfloat16(), randn(143, seed=2)
    for rows, found in (
        (x, elementwise.rms_norm(x, weight, EPS)),
        (residual + x, elementwise.add_rms_norm(residual, x, weight, EPS)),
    ):
        expected = elementwise.torch_rms_norm(rows.float(), weight, EPS).bfloat16()
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-6)
        assert (found == expected).float().mean() > 0.999
    assert torch.equal(residual, rows)


def assert_activations_of_extreme_gates() -> None:
    gate = torch.tensor([-1e30, -1e4, -90.0, -88.0, -20.0, -0.0, 20.0, 90.0, 1e30, torch.inf, torch.nan])
    gate_up = torch.cat((gate, torch.ones_like(gate)))[None]
    expected = torch.nn.functional.silu(gate)
    torch.testing.assert_close(elementwise.silu_mul(gate_up)[0, 3:], expected[3:], equal_nan=True)
    assert (elementwise.silu_mul(gate_up)[0, :3] <= 0).all()
    assert (elementwise.silu_mul(gate_up)[0, 1:3] > -1e-33).all()
    expected = torch.nn.functional.gelu(gate, approximate="tanh")
    torch.testing.assert_close(elementwise.gelu_mul(gate_up)[0, 1:], expected[1:], equal_nan=True)


def assert_rotary_in_bfloat16(kv_heads: int, weights_dtype: torch.dtype | None) -> None:
    """weights_dtype: of the norms of heads, which are bfloat16 after them; None: there are no norms."""
    head_dim, rows = 48, 150
    qkv = randn(rows, 8 * head_dim, dtype=torch.bfloat16)
    weights = [randn(head_dim, dtype=weights_dtype, seed=s) if weights_dtype else None for s in (2, 3)]
    positions = torch.arange(rows) % 100
    actual, expected = qkv.clone(), qkv.clone()
    elementwise.rotary(actual, positions, cos_sin_table(head_dim), 6, kv_heads, head_dim, *weights)
    if weights_dtype == torch.float32:
        heads = expected[:, : (6 + kv_heads) * head_dim].unflatten(1, (-1, head_dim))
        for part, weight in ((heads[:, :6], weights[0]), (heads[:, 6:], weights[1])):
            part.copy_(elementwise.torch_rms_norm(part.float(), weight, EPS))
        weights = [None, None]
    elementwise.torch_rotary(expected, positions, cos_sin_table(head_dim), 6, kv_heads, head_dim, *weights)
    assert_same_rounding(actual, expected)
    untouched = (6 + kv_heads) * head_dim
    assert torch.equal(actual[:, untouched:], qkv[:, untouched:])


def assert_bits_of_a_row_do_not_depend_on_the_others() -> None:
    x, weight = randn(130, 700, dtype=torch.bfloat16), randn(700, dtype=torch.bfloat16, seed=1)
    alone = torch.cat([elementwise.rms_norm(row[None], weight, EPS) for row in x])
    assert torch.equal(elementwise.rms_norm(x, weight, EPS), alone)
    assert torch.equal(elementwise.silu_mul(x), torch.cat([elementwise.silu_mul(row[None]) for row in x]))


def assert_bfloat16_rounds_to_even() -> None:
    x = torch.tensor([[1.0, 1.0, 3.0, -1.0]]).bfloat16()
    residual = torch.tensor([[2.0**-8, 3 * 2.0**-8, 2.0**-7, -(2.0**-8)]]).bfloat16()
    expected = residual + x
    elementwise.add_rms_norm(residual, x, torch.ones(4).bfloat16(), EPS)
    assert residual.tolist() == expected.tolist() == [[1.0, 1.015625, 3.0, -1.0]]


def assert_most_likely_is_argmax(dtype: torch.dtype) -> None:
    """NumPy's: the first of equal numbers, and none where the largest is no finite number."""
    for width in (1, 7, 256, 300, 1027, 3 * 32768 + 515):
        logits = (4 * randn(6, width + 1, dtype=dtype)).round()[:, 1:]  # many ties; the first number is not aligned
        logits[1] = -torch.inf
        logits[2, : width // 2] = -torch.inf
        logits[3, width // 3] = torch.nan
        logits[4, width - 1] = torch.inf
        logits[5, width // 2 :] = 99.0
        rows = logits.float().numpy()
        expected = np.where(np.isfinite(rows.max(-1)), rows.argmax(-1), -1)
        assert most_likely(logits).tolist() == expected.tolist()
        assert most_likely(logits[5:]).tolist() == [width // 2]
