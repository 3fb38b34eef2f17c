"""Checks of products with weights of integers in groups, for every instruction set."""

from __future__ import annotations

import torch

from kvllm.files.groups import OFFSETS, GroupForm, Groups
from kvllm.models.weights import LinearWeight, Packing
from tests.helpers.product_checks import ROUNDING

FORMS = tuple(
    GroupForm(bits, group, minimums) for bits in (4, 6, 8) for group in (32, 16) for minimums in (False, True)
)


def random_groups(rows: int, columns: int, form: GroupForm) -> Groups:
    """All integers that a form holds, the largest and smallest ones often; scales of either sign."""
    low = -128 if form.bits == 8 else -form.offset
    high = 127 if form.bits == 8 else low + (15 if form.bits == 4 else 63)
    values = torch.randint(2 * low - high, 2 * high - low + 1, (rows, columns)).clamp(low, high)
    scales = 0.01 * torch.randn(rows, columns // form.group)
    minimums = torch.rand_like(scales) if form.minimums else None
    return Groups(values.to(torch.int8), scales, minimums)


def exact(groups: Groups) -> torch.Tensor:
    """The matrix, float64, with scales and minimums of half precision."""
    weights = groups.values.double().unflatten(1, (groups.scales.shape[1], -1))
    weights = weights * groups.scales.half().double().unsqueeze(2)
    if groups.minimums is not None:
        weights = weights - groups.minimums.half().double().unsqueeze(2)
    return weights.flatten(1)


def packed(groups: Groups, form: GroupForm, dtype: torch.dtype) -> LinearWeight:
    rows, columns = groups.values.shape
    weight = LinearWeight(rows, columns, dtype, torch.device("cpu"))
    weight.form = form
    weight.allocate(Packing())
    weight.write_groups(0, groups)
    return weight


def rounded(x: torch.Tensor, group: int) -> torch.Tensor:
    """Channels as 255 steps of their group."""
    parts = x.float().unflatten(1, (-1, group))
    largest = parts.abs().amax(2, keepdim=True).clamp(min=1e-30)
    factor = torch.full_like(largest, 127) / largest  # torch would multiply a number with the reciprocal
    return ((parts * factor).round().double() * (largest / 127).double()).flatten(1)


def assert_product(found: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor, group: int) -> None:
    """A product is that of the rounded channels, but for the rounding of float32 and of the result."""
    channels = rounded(x, group)
    expected = channels @ matrix.T + bias.double()
    allowed = 2.0**-20 * (channels.abs() @ matrix.abs().T + bias.double().abs())
    allowed += ROUNDING[x.dtype] * (expected.abs() + allowed)
    error = (found.double() - expected).abs()
    assert (error <= allowed).all(), f"{(error / allowed).max():.3f} of the error that rounding explains"


def assert_shapes(dtype: torch.dtype, form: GroupForm) -> None:
    """Rows that do not fill a tile, parts of two tiles and of one, and blocks of 512 channels and what is left."""
    for rows, columns in ((72, 32), (70, 256), (7, 96), (33, 1152), (130, 608), (20, 512)):
        groups = random_groups(rows, columns, form)
        bias, x = torch.randn(rows).to(dtype), torch.randn(100, columns).to(dtype)
        weight, matrix = packed(groups, form, dtype), exact(groups)
        together = weight.multiply(x, bias)
        assert_product(together, x, matrix, bias, form.group)
        for count in (1, 2, 3, 4, 5, 7, 8, 9, 13, 49):
            assert torch.equal(weight.multiply(x[5 : 5 + count], bias), together[5 : 5 + count])
        part = weight.part(0, rows - 3)
        assert torch.equal(part.multiply(x), weight.multiply(x)[:, : rows - 3])
        indices = torch.tensor([rows - 1, 0, rows // 2, 0])
        torch.testing.assert_close(weight.rows(indices), matrix[indices].to(dtype))


def assert_largest_sums(dtype: torch.dtype, form: GroupForm) -> None:
    """All weights and channels as large as can be, of either sign."""
    low = -128 if form.bits == 8 else -form.offset
    high = 127 if form.bits == 8 else low + (15 if form.bits == 4 else 63)
    signs = torch.tensor([1.0, -1.0]).repeat(2, 512)
    signs[1, ::2] = 1
    x = torch.cat((signs, -signs)).to(dtype)
    for values in (signs * high, signs * low, torch.full_like(signs, high), torch.full_like(signs, low)):
        scales = torch.ones(2, 1024 // form.group)
        groups = Groups(values.clamp(low, high).to(torch.int8), scales, 3 * scales if form.minimums else None)
        found = packed(groups, form, dtype).multiply(x)
        torch.testing.assert_close(found, (x.double() @ exact(groups).T).to(dtype), rtol=1e-5, atol=1e-3)


def assert_extreme_rows(dtype: torch.dtype, form: GroupForm) -> None:
    """Zeros, channels much larger and smaller than others, and rows that are not finite, alone."""
    groups, x = random_groups(40, 640, form), torch.randn(8, 640).to(dtype)
    x[0] = 0
    x[1, 77] = 1e4
    x[2] *= 1e30
    x[3, :64] = 0
    x[5, 70] = float("inf")
    x[7, 639] = float("nan")
    bias = torch.randn(40).to(dtype)
    found = packed(groups, form, dtype).multiply(x, bias)
    assert torch.equal(found[0], bias)
    finite = torch.tensor([0, 1, 2, 3, 4, 6])
    assert_product(found[finite], x[finite], exact(groups), bias, form.group)
    assert not found[[5, 7]].isfinite().any()


CHECKS = (assert_shapes, assert_largest_sums, assert_extreme_rows)


def assert_all(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert OFFSETS == {4: 8, 6: 32, 8: 0}
    for form in FORMS:
        for check in CHECKS:
            check(dtype, form)
