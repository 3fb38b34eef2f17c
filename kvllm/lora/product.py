"""The products of adapters, added to those of the weights that they change.

The query tokens of a pass are grouped by adapter, so a matrix takes one pair of small products for each adapter of the
pass, however many sequences have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from kvllm._extension import operator

NO_ADAPTER = -1


def even(rank: int) -> int:
    """The rank as it is held: words have two numbers of bfloat16."""
    return rank + rank % 2


class AdapterRows:
    """Which query tokens of a pass have which adapter.

    numbers: int64 `[T]`, the number of each token's adapter, NO_ADAPTER for none.
    adapters: those of the pass, by number, in ascending order.
    """

    def __init__(self, numbers: np.ndarray, device: torch.device) -> None:
        self._numbers = numbers
        self._device = device
        self._grouped: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self.adapters = tuple(np.unique(numbers[numbers != NO_ADAPTER]).tolist())

    def grouped(self, adapters: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of some adapters, those of one after those of another: int64 `[n]`; and where in these each
        adapter begins, and the last one ends: int64 `[len(adapters) + 1]`, on the CPU."""
        found = self._grouped.get(adapters)
        if found is None:
            rows = [np.flatnonzero(self._numbers == number) for number in adapters]
            starts = np.cumsum([0, *map(len, rows)])
            found = torch.from_numpy(np.concatenate(rows)).to(self._device), torch.from_numpy(starts)
            self._grouped[adapters] = found
        return found

    def of(self, tokens: torch.Tensor) -> AdapterRows:
        """The same for some of the tokens: int64, on the CPU."""
        return AdapterRows(self._numbers[tokens.numpy()], self._device)


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to a matrix: the product of x and both matrices.

    down: `[r, in_features]`. up: `[out_features, r]`, with the factor of the adapter. Where a matrix has several
    projections, r is the sum of their ranks, and `up` is zero where one meets the outputs of another.
    is_packed: whether both are as the CPU's operators multiply them fastest.
    """

    down: torch.Tensor
    up: torch.Tensor
    is_packed: bool

    @staticmethod
    def of(
        out_features: int,
        parts: Sequence[tuple[int, torch.Tensor, torch.Tensor]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> LowRank:
        """parts: of each projection its first row in the matrix, `[r, in_features]` and `[rows, r]`."""
        down = torch.cat([down for _, down, _ in parts])
        down = F.pad(down, (0, 0, 0, even(len(down)) - len(down)))
        up = torch.zeros(out_features, len(down))
        column = 0
        for first, _, of_part in parts:
            up[first : first + of_part.shape[0], column : column + of_part.shape[1]] = of_part
            column += of_part.shape[1]
        down, up = down.to(device, dtype).contiguous(), up.to(device, dtype)
        is_packed = device.type == "cpu" and down.shape[1] * dtype.itemsize % 4 == 0
        if is_packed:
            down, up = operator("pack_weight")(down), operator("pack_weight")(up)
        return LowRank(down, up, is_packed)


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
        """Add the adapters' products of x `[T, in_features]` to that of the matrix `[T, out_features]`, or of its first
        rows, in place."""
        tokens = self.current.rows
        numbers = tuple(number for number in tokens.adapters if number in self.adapters) if tokens else ()
        if not tokens or not numbers:
            return
        adapters, (rows, starts) = [self.adapters[number] for number in numbers], tokens.grouped(numbers)
        if adapters[0].is_packed:
            downs, ups = [each.down for each in adapters], [each.up for each in adapters]
            operator("add_adapters")(product, x.contiguous(), rows, starts, downs, ups)
            return
        for adapter, of_adapter in zip(adapters, rows.split(starts.diff().tolist()), strict=True):
            added = F.linear(F.linear(x[of_adapter], adapter.down), adapter.up[: product.shape[1]])
            product.index_add_(0, of_adapter, added)
