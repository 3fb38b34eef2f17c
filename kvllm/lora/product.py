"""The products of adapters, added to those of the weights that they change.

The query tokens of a pass are grouped by adapter, so a matrix takes one pair of small products for each adapter of the
pass, however many sequences have it. On a GPU both are launched for all adapters at once, whichever the tokens have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from kvllm._extension import operator

NO_ADAPTER = np.iinfo(np.int32).max
"""A number that is sorted after those of all adapters."""


def even(rank: int) -> int:
    """The rank as it is held: words have two numbers of bfloat16."""
    return rank + rank % 2


class AdapterRows:
    """Which query tokens of a pass have which adapter.

    numbers: int64 `[T]`, the number of each token's adapter, NO_ADAPTER for none. most: all numbers are below.
    """

    def __init__(self, numbers: torch.Tensor, most: int) -> None:
        self.numbers = numbers
        self.most = most
        self._grouped: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    @cached_property
    def adapters(self) -> tuple[int, ...]:
        """Those of the pass, by number, in ascending order. Of tokens on the CPU."""
        numbers = np.unique(self.numbers.numpy()).tolist()
        return tuple(numbers[:-1] if numbers[-1:] == [NO_ADAPTER] else numbers)

    def grouped(self, adapters: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of some adapters, those of one after those of another: int64 `[n]`; and where in these each
        adapter begins, and the last one ends: int64 `[len(adapters) + 1]`. Of tokens on the CPU."""
        found = self._grouped.get(adapters)
        if found is None:
            rows = [np.flatnonzero(self.numbers.numpy() == number) for number in adapters]
            starts = np.cumsum([0, *map(len, rows)])
            found = self._grouped[adapters] = torch.from_numpy(np.concatenate(rows)), torch.from_numpy(starts)
        return found

    @cached_property
    def sorted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All tokens, sorted by adapter: int64 `[T]`; and where those of each adapter end: int64 `[most]`."""
        numbers, order = self.numbers.sort(stable=True)
        every = torch.arange(self.most, device=numbers.device)
        return order, torch.searchsorted(numbers, every, right=True)

    def of(self, tokens: torch.Tensor) -> AdapterRows:
        """The same for some of the tokens: int64."""
        return AdapterRows(self.numbers[tokens], self.most)


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to a matrix: the product of x and both matrices.

    down: `[r, in_features]`. up: `[out_features, r]`, with the factor of the adapter. Where a matrix has several
    projections, r is the sum of their ranks, and `up` is zero where one meets the outputs of another.
    """

    down: torch.Tensor
    up: torch.Tensor

    @staticmethod
    def of(out_features: int, parts: Sequence[tuple[int, torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> LowRank:
        """parts: of each projection its first row in the matrix, `[r, in_features]` and `[rows, r]`."""
        down = torch.cat([down for _, down, _ in parts])
        down = F.pad(down, (0, 0, 0, even(len(down)) - len(down)))
        up = torch.zeros(out_features, len(down))
        column = 0
        for first, _, of_part in parts:
            up[first : first + of_part.shape[0], column : column + of_part.shape[1]] = of_part
            column += of_part.shape[1]
        return LowRank(down.to(dtype).contiguous(), up.to(dtype))


class PassAdapters:
    """The adapters of the pass that is computed, which all matrices of a model look at. rows: None for none."""

    rows: AdapterRows | None = None

    def narrow(self, tokens: torch.Tensor) -> None:
        """Only these tokens are computed from now on."""
        if self.rows is not None:
            self.rows = self.rows.of(tokens)


class AdaptedMatrix(Protocol):
    """The adapters of one matrix, by number. current: those of the pass."""

    current: PassAdapters

    def put(self, number: int, adapter: LowRank) -> None:
        """Hold what an adapter adds, of a number that is free."""
        ...

    def drop(self, number: int) -> None:
        """Forget what an adapter adds, if it adds anything."""
        ...

    def add(self, x: torch.Tensor, product: torch.Tensor) -> None:
        """Add the adapters' products of x `[T, in_features]` to that of the matrix `[T, out_features]`, or of its first
        rows, in place."""
        ...


class PackedAdapters:
    """An AdaptedMatrix of a CPU, each adapter as its operators multiply it fastest."""

    def __init__(self, current: PassAdapters) -> None:
        self.current = current
        self.adapters: dict[int, LowRank] = {}

    def put(self, number: int, adapter: LowRank) -> None:
        pack = operator("pack_weight")
        self.adapters[number] = LowRank(pack(adapter.down), pack(adapter.up))

    def drop(self, number: int) -> None:
        self.adapters.pop(number, None)

    def add(self, x: torch.Tensor, product: torch.Tensor) -> None:
        tokens = self.current.rows
        numbers = tuple(number for number in tokens.adapters if number in self.adapters) if tokens else ()
        if not tokens or not numbers:
            return
        adapters, (rows, starts) = [self.adapters[number] for number in numbers], tokens.grouped(numbers)
        downs, ups = [each.down for each in adapters], [each.up for each in adapters]
        operator("add_adapters")(product, x.contiguous(), rows, starts, downs, ups)


class StackedAdapters:
    """An AdaptedMatrix in memory that stays where it is: so graphs may hold what adds them.

    down: `[most, rank, in_features]`. up: `[most, out_features, rank]`. ranks: int32 `[most]`; of an adapter with less
    than the highest, the rest is zeros.
    """

    def __init__(
        self,
        current: PassAdapters,
        most: int,
        rank: int,
        size: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """size: out and in features."""
        self.current = current
        self.down = torch.zeros(most, rank, size[1], dtype=dtype, device=device)
        self.up = torch.zeros(most, size[0], rank, dtype=dtype, device=device)
        self.ranks = torch.zeros(most, dtype=torch.int32, device=device)

    def put(self, number: int, adapter: LowRank) -> None:
        rank = len(adapter.down)
        for stack, matrix in ((self.down[number, :rank], adapter.down), (self.up[number, :, :rank], adapter.up)):
            # Nobody waits for a copy of pinned memory.
            stack.copy_(matrix.pin_memory() if stack.is_cuda else matrix, non_blocking=True)
        self.ranks[number] = rank

    def drop(self, number: int) -> None:
        for each in (self.down, self.up, self.ranks):
            each[number] = 0

    def add(self, x: torch.Tensor, product: torch.Tensor) -> None:
        if self.current.rows is None:
            return
        if x.is_cuda and find_spec("triton"):
            from kvllm.kernels.low_rank import add_low_rank

            add_low_rank(product, x.contiguous(), self.down, self.up, self.ranks, *self.current.rows.sorted)
        else:
            add_plainly(product, x, self.down, self.up, self.current.rows.numbers)


def add_plainly(
    product: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, numbers: torch.Tensor
) -> None:
    """As `kvllm.kernels.low_rank.add_low_rank`, of which this defines the result. numbers: of AdapterRows."""
    for number, (of_down, of_up) in enumerate(zip(down, up, strict=True)):
        added = F.linear(F.linear(x, of_down), of_up[: product.shape[1]])
        product += added * (numbers == number)[:, None]
