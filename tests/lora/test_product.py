"""The CPU's operator for adapters."""

from __future__ import annotations

import pytest
import torch

from kvllm._extension import operator

CLOSE = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, torch.bfloat16: {"rtol": 0.02, "atol": 0.3}}
ROWS = ((1, 5, 6), (0, 8), ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [96, 80, 77])
def test_products_of_groups_of_rows(dtype: torch.dtype, columns: int) -> None:
    """Rows of no group stay, and so do those of an adapter without rows."""
    torch.manual_seed(0)
    x, product = torch.randn(9, 64).to(dtype), torch.randn(9, columns).to(dtype)
    downs = [torch.randn(rank, 64).to(dtype) for rank in (6, 4, 2)]
    ups = [torch.randn(96, down.shape[0]).to(dtype) for down in downs]
    expected = product.float()
    for rows, down, up in zip(ROWS, downs, ups, strict=True):
        expected[list(rows)] += (x[list(rows)].float() @ down.float().T @ up.float().T)[:, :columns]
    packed = [[operator("pack_weight")(each) for each in matrices] for matrices in (downs, ups)]
    flat, starts = torch.tensor([row for rows in ROWS for row in rows]), torch.tensor([0, 3, 5, 5])
    operator("add_adapters")(product, x, flat, starts, *packed)
    torch.testing.assert_close(product.float(), expected, **CLOSE[dtype])


def test_rows_that_are_not_there() -> None:
    x, packed = torch.zeros(2, 64), operator("pack_weight")(torch.zeros(16, 64))
    up = operator("pack_weight")(torch.zeros(64, 16))
    with pytest.raises(RuntimeError, match="row 2 is not among the 2 rows"):
        operator("add_adapters")(torch.zeros(2, 64), x, torch.tensor([2]), torch.tensor([0, 1]), [packed], [up])
