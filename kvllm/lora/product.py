"""The products of adapters, added to those of the weights that they change.

The query tokens of a pass are grouped by adapter, so a matrix takes one pair of small products for each adapter of the
pass, however many sequences have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

NO_ADAPTER = -1


class AdapterRows:
    """Which query tokens of a pass have which adapter.

    numbers: int64 `[T]`, the number of each token's adapter, NO_ADAPTER for none.
    """

    def __init__(self, numbers: np.ndarray, device: torch.device) -> None:
        self._numbers = numbers
        self._device = device

    @cached_property
    def groups(self) -> list[tuple[int, slice | torch.Tensor]]:
        """The adapters of the pass, each with its tokens: a slice where they follow each other."""
        found: list[tuple[int, slice | torch.Tensor]] = []
        for number in np.unique(self._numbers[self._numbers != NO_ADAPTER]).tolist():
            rows = np.flatnonzero(self._numbers == number)
            begin, end = int(rows[0]), int(rows[-1]) + 1
            follow = end - begin == len(rows)
            found.append((number, slice(begin, end) if follow else torch.from_numpy(rows).to(self._device)))
        return found

    def of(self, tokens: torch.Tensor) -> AdapterRows:
        """The same for some of the tokens: int64, on the CPU."""
        return AdapterRows(self._numbers[tokens.numpy()], self._device)


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to a matrix: `x @ down @ up`.

    down: `[in_features, r]`. up: `[r, out_features]`, with the factor of the adapter. Where a matrix has several
    projections, r is the sum of their ranks, and `up` is zero where one meets the outputs of another.
    """

    down: torch.Tensor
    up: torch.Tensor

    @staticmethod
    def of(
        out_features: int,
        parts: Sequence[tuple[int, torch.Tensor, torch.Tensor]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> LowRank:
        """parts: of each projection its first row in the matrix, `[r, in_features]` and `[rows, r]`."""
        down = torch.cat([down for _, down, _ in parts]).T
        up = torch.zeros(down.shape[1], out_features)
        row = 0
        for first, _, of_part in parts:
            up[row : row + of_part.shape[1], first : first + of_part.shape[0]] = of_part.T
            row += of_part.shape[1]
        return LowRank(down.to(device, dtype).contiguous(), up.to(device, dtype))

    def multiply(self, x: torch.Tensor, out_features: int) -> torch.Tensor:
        """`[n, in_features]` -> the first columns of the product `[n, out_features]`, in the adapter's dtype."""
        return x.to(self.down.dtype) @ self.down @ self.up[:, :out_features]


class PassAdapters:
    """The adapters of the pass that is computed, which all matrices of a model look at. rows: None for none."""

    rows: AdapterRows | None = None

    def narrow(self, tokens: torch.Tensor) -> None:
        """Only these tokens are computed from now on."""
        if self.rows is not None:
            self.rows = self.rows.of(tokens)


class AdaptedMatrix:
    """The adapters of one matrix, by number. current: those of the pass."""

    def __init__(self, current: PassAdapters) -> None:
        self.current = current
        self.adapters: dict[int, LowRank] = {}

    def add(self, x: torch.Tensor, product: torch.Tensor) -> None:
        """Add the adapters' products of `x` `[T, in_features]` to that of the matrix `[T, out_features]`, or of its
        first rows, in place."""
        if self.current.rows is None:
            return
        for number, rows in self.current.rows.groups:
            if adapter := self.adapters.get(number):
                added = adapter.multiply(x[rows], product.shape[1]).to(product.dtype)
                if isinstance(rows, slice):
                    product[rows] += added
                else:
                    product.index_add_(0, rows, added)
