"""A matrix of integers on a GPU, as `kvllm.kernels.integer_linear` reads it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from kvllm.files.groups import GroupForm, Groups
from kvllm.models.quantized_tensors import Integers

HALF = 64
"""As in `kvllm.kernels.integer_linear`, which cannot be imported without triton."""
NUMBERS_OF_ROWS = 1, 17, 65
"""For each of which there is another variant of the kernel: all variants, but for those of experts."""


@dataclass(frozen=True)
class IntegerGroups:
    """What integers a matrix has. bits: 4, or up to 8. group: weights of a row that share a scale, and a shift, where
    they are shifted. dtype: of scales."""

    bits: int
    group: int
    shifted: bool = False
    dtype: torch.dtype = torch.float32

    def are_multiplied(self, in_features: int, dtype: torch.dtype) -> bool:
        """Whether the kernel takes them, for rows of a dtype; those of float32 would not stay in registers."""
        fits = self.group % HALF == 0 or HALF % self.group == 0 or self.group == in_features
        return fits and dtype != torch.float32 and find_spec("triton") is not None


@dataclass(frozen=True)
class QuantizedMatrix:
    """`integers * scales + shifts`, with the scale and the shift of a weight's group.

    codes: int8 `[out_features, in_features]`; or uint8 `[out_features, bytes]`, two integers of 4 bits in each, from 0
        on; without shifts, they are 8 more than is meant.
    scales: `[groups, out_features]`, of float16 or float32. shifts: the same, or None if all are 0.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    shifts: torch.Tensor | None
    in_features: int

    @classmethod
    def of(cls, shape: tuple[int, int], integers: IntegerGroups, device: torch.device) -> QuantizedMatrix:
        """Zeros. shape: `[out_features, in_features]`."""
        rows, columns = shape
        held = (columns, torch.int8) if integers.bits > 4 else (-(-columns // (2 * HALF)) * HALF, torch.uint8)
        scales = torch.zeros(1 + integers.shifted, columns // integers.group, rows, dtype=integers.dtype, device=device)
        codes = torch.zeros(rows, held[0], dtype=held[1], device=device)
        return cls(codes, scales[0], scales[1] if integers.shifted else None, columns)

    @property
    def bits(self) -> int:
        return 4 if self.codes.dtype == torch.uint8 else 8

    @property
    def group(self) -> int:
        return self.in_features // len(self.scales)

    @property
    def excess(self) -> int:
        """What held integers of 4 bits with shifts have more than those with a sign."""
        return 8 if self.bits == 4 and self.shifts is not None else 0

    def write(
        self, first: int, integers: torch.Tensor, scales: torch.Tensor, shifts: torch.Tensor | None = None
    ) -> None:
        """Fill the rows from `first` on.

        integers: int8 `[n, in_features]`. scales, shifts: `[n, groups]`.
        """
        rows = slice(first, first + len(integers))
        if self.bits == 4:
            held = integers if self.shifts is not None else integers + 8
            halves = F.pad(held.view(torch.uint8), (0, -self.in_features % (2 * HALF))).unflatten(1, (-1, 2, HALF))
            integers = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
        self.codes[rows] = integers.to(self.codes.device)
        self.scales[:, rows] = scales.T.to(self.scales)
        if self.shifts is not None and shifts is not None:
            self.shifts[:, rows] = shifts.T.to(self.shifts)

    def write_integers(self, first: int, rows: Integers) -> None:
        """Fill the rows from `first` on with those of a quantized checkpoint."""
        if rows.zeros is None:
            self.write(first, rows.values, rows.scales)
        else:
            shifts = (rows.zeros.float() + self.excess) * -rows.scales
            self.write(first, rows.values + self.excess, rows.scales, shifts)

    def write_groups(self, first: int, rows: Groups, form: GroupForm) -> None:
        """Fill the rows from `first` on with those of a file, held in a form."""
        held = rows.held_as(form)
        shifts = None if held.minimums is None else -held.minimums
        self.write(first, held.values - form.offset, held.scales, shifts)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """int64 `[n]` -> these rows of the matrix, float32."""
        codes = self.codes[indices]
        if codes.dtype == torch.uint8:
            bytes_ = codes.unflatten(1, (-1, HALF))
            codes = torch.cat((bytes_ & 15, bytes_ >> 4), 2).flatten(1)[:, : self.in_features].to(torch.int8)
            codes = codes if self.shifts is not None else codes - 8
        groups = codes.float().unflatten(1, (len(self.scales), -1)) * self.scales[:, indices].T.float().unsqueeze(2)
        if self.shifts is not None:
            groups += self.shifts[:, indices].T.float().unsqueeze(2)
        return groups.flatten(1)

    def part(self, first: int, count: int) -> QuantizedMatrix:
        """The matrix of the `count` rows from `first` on, in the same memory."""
        rows = slice(first, first + count)
        shifts = None if self.shifts is None else self.shifts[:, rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[:, rows], shifts=shifts)

    def multiply(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        width: int | None = None,
        experts: tuple[int, int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """`[T, in_features]` times the transpose, plus `bias` -> `[T, width]`, by default of all rows.

        experts: as `integer_linear` takes them.
        """
        from kvllm.kernels.integer_linear import integer_linear

        width = len(self.codes) if width is None else width
        return integer_linear(x.contiguous(), self.codes, self.scales, self.shifts, bias, self.group, width, experts)
