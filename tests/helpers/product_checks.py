"""Checks of products with weights of 8 and 4 bits, for every instruction set."""

from __future__ import annotations

import torch

from kvllm.models.quantize import group_size
from kvllm.models.weights import LinearWeight, Packing

BLOCK = 256
"""Channels of a row, from the beginning of a group on, that are rounded together."""
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}
"""Of the result."""


def pack(matrix: torch.Tensor, bits: int) -> LinearWeight:
    return LinearWeight.pack(matrix, Packing(bits))


def dequantized(matrix: torch.Tensor, bits: int) -> torch.Tensor:
    """Weight by weight: every group becomes whole numbers times its scale."""
    group = group_size(matrix.shape[1], bits)
    rows = []
    for row in matrix.float():
        parts = []
        for part in row.split(group):
            largest = max(part.tolist(), key=abs)
            scale = torch.tensor(abs(largest) / 127 if bits == 8 else largest / -8)
            low, high = (-128, 127) if bits == 8 else (-8, 7)
            parts.append((part / scale).round().clamp(low, high) * scale if largest else part)
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def blocks(x: torch.Tensor, group: int) -> list[torch.Tensor]:
    return [block for part in x.split(group, 1) for block in part.split(BLOCK, 1)]


def assert_product(found: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor, bits: int) -> None:
    """A product differs from that of the dequantized matrix by the rounding of x to 65,535 steps, that of the sums of
    blocks, and that of the result.
    """
    weights, group = dequantized(matrix, bits).double(), group_size(matrix.shape[1], bits)
    assert group is not None
    exact = x.double() @ weights.T + bias.double()
    largest = torch.stack([block.abs().amax(1) for block in blocks(x.double(), group)], 1)
    weight_sums = torch.stack([block.abs().sum(1) for block in blocks(weights, group)], 1)
    allowed = largest @ weight_sums.T * (1.0001 / 65534)
    allowed += 2.0**-22 * (x.double().abs() @ weights.abs().T + bias.double().abs())
    allowed += ROUNDING[x.dtype] * (exact.abs() + allowed)
    error = (found.double() - exact).abs()
    assert (error <= allowed).all(), f"{(error / allowed).max():.3f} of the error that rounding explains"


def assert_shapes(dtype: torch.dtype, bits: int) -> None:
    """Rows that do not fill a tile; groups of 32, 40, 64, 128 and all channels; blocks of 256 and what is left."""
    for rows, columns in ((72, 40), (70, 256), (7, 96), (33, 1152), (50, 616), (20, 4), (130, 64)):
        if group_size(columns, bits) is None:
            continue
        matrix, bias, x = (torch.randn(shape).to(dtype) for shape in ((rows, columns), (rows,), (100, columns)))
        matrix[3] = 0
        weight = pack(matrix, bits)
        together = weight.multiply(x, bias)
        assert_product(together, x, matrix, bias, bits)
        for count in (1, 2, 3, 4, 6, 7, 13, 49):
            assert torch.equal(weight.multiply(x[5 : 5 + count], bias), together[5 : 5 + count])
        part = weight.part(0, rows - 3)
        assert torch.equal(part.multiply(x), weight.multiply(x)[:, : rows - 3])


def assert_extreme_channels(dtype: torch.dtype, bits: int) -> None:
    """Zeros, channels 10,000 times the others, huge and tiny ones."""
    matrix, bias, x = (torch.randn(shape).to(dtype) for shape in ((40, 640), (40,), (6, 640)))
    x[0] = 0
    x[1, 77] = 1e4
    x[2, ::3] *= 1e4
    x[3] *= 1e30
    x[4] *= 1e-33
    x[5, :256] = 0
    found = pack(matrix, bits).multiply(x, bias)
    assert torch.equal(found[0], bias)
    assert_product(found, x, matrix, bias, bits)
    without_bias = pack(matrix, bits).multiply(x[4:5]).double()
    assert (without_bias - x[4:5].double() @ dequantized(matrix, bits).double().T).abs().max() < 1e-33 * 640


def assert_largest_sums(dtype: torch.dtype, bits: int) -> None:
    """All weights and channels as large as can be: the sums of integers reach their limits, of either sign."""
    signs = torch.ones(2, 4096)
    signs[1, ::2] = -1
    for columns in (4096, 256, 512, 264):
        matrix = signs[:, :columns].repeat(8, 1).to(dtype)
        weight = pack(matrix, bits)
        found = weight.multiply(3 * matrix).double()
        exact = 3 * matrix.double() @ dequantized(matrix, bits).double().T
        torch.testing.assert_close(found, exact, rtol=2.0**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-2)


def assert_not_finite_rows(dtype: torch.dtype, bits: int) -> None:
    """A channel that is not finite makes all of its row so, and nothing else."""
    x = torch.randn(9, 700).to(dtype)[:, :696].contiguous()
    broken = x.clone()
    for row, column, value in ((1, 0, "nan"), (3, 300, "inf"), (4, 695, "-inf"), (7, 255, "-nan")):
        broken[row, column] = float(value)
    matrix = torch.randn(50, 696).to(dtype)
    matrix[5] = 0
    weight = pack(matrix, bits)
    found = weight.multiply(broken)
    rows = torch.tensor([1, 3, 4, 7])
    assert not found[rows].isfinite().any()
    others = torch.tensor([0, 2, 5, 6, 8])
    assert torch.equal(found[others], weight.multiply(x)[others])


CHECKS = (assert_shapes, assert_extreme_channels, assert_largest_sums, assert_not_finite_rows)
