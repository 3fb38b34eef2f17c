"""Weights that stay as a file has them: integers in groups, against the numbers that they mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvllm.files.groups import GroupForm, Groups
from kvllm.models.quantized_matrix import IntegerGroups, QuantizedMatrix
from kvllm.models.weights import LinearWeight, Packing
from tests.helpers.group_checks import CHECKS, FORMS, exact, packed, random_groups
from tests.helpers.paged_model import CPU


def all_rows(weight: LinearWeight) -> torch.Tensor:
    return weight.rows(torch.arange(weight.out_features))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products(check: Callable[[torch.dtype, GroupForm], None], dtype: torch.dtype, form: GroupForm) -> None:
    torch.manual_seed(0)
    check(dtype, form)


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_written_in_any_parts(form: GroupForm) -> None:
    """Parts begin and end within a tile, as the queries, keys and values of small heads do."""
    groups = random_groups(101, 64, form)
    weight = LinearWeight(101, 64, torch.float32, CPU)
    weight.form = form
    weight.allocate(Packing())
    for first, last in ((90, 101), (0, 5), (5, 7), (7, 64), (64, 90)):
        weight.write_groups(first, groups.rows(torch.arange(first, last)))
    expected = packed(groups, form, torch.float32)
    assert torch.equal(all_rows(weight), all_rows(expected))
    x = torch.randn(3, 64)
    assert torch.equal(weight.multiply(x), expected.multiply(x)) and weight.multiply(x).abs().min() > 0


@pytest.mark.parametrize("own", FORMS)
@pytest.mark.parametrize("other", FORMS)
def test_a_form_that_two_share_holds_the_same_weights(own: GroupForm, other: GroupForm) -> None:
    groups = random_groups(20, 64, own)
    groups = replace(groups, scales=groups.scales.half().float())  # so that times 8 and 32 they are halves, too
    shared = own.joined(other)
    assert shared == other.joined(own) == shared.joined(own)
    found = all_rows(packed(groups, shared, torch.float32))
    torch.testing.assert_close(found, exact(groups).float(), rtol=1e-6, atol=1e-7)
    integers = IntegerGroups(shared.bits, shared.group, shared.minimums, torch.float16)
    of_gpu = QuantizedMatrix.of((20, 64), integers, CPU)
    of_gpu.write_groups(0, groups, shared)
    torch.testing.assert_close(of_gpu.rows(torch.arange(20)), exact(groups).float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("form", "bits"),
    [
        (GroupForm(4), 4.5),
        (GroupForm(4, minimums=True), 5),
        (GroupForm(4, 16), 5),
        (GroupForm(6, 16), 7),
        (GroupForm(6, minimums=True), 7),
        (GroupForm(8), 8.5),
    ],
)
def test_memory(form: GroupForm, bits: float) -> None:
    weight = packed(random_groups(64, 256, form), form, torch.bfloat16)
    assert weight.packed is not None and weight.scales is not None and weight.tensor.numel() == 0
    assert weight.packed.nbytes + weight.scales.nbytes == 64 * 256 * bits / 8


def test_columns_of_groups() -> None:
    groups = random_groups(5, 96, GroupForm(4, minimums=True))
    part = groups.columns(32, 64)
    assert isinstance(part, Groups)
    assert torch.equal(exact(part), exact(groups)[:, 32:])
