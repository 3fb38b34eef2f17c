"""Weights as integers of a few bits, in groups of neighbours that share a scale, as files hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from kvllm.files.tensor import CheckpointTensor

OFFSETS = {4: 8, 6: 32, 8: 0}
"""What is added to integers with a sign, so that they have none, by their bits. Those of 8 bits keep theirs."""


@dataclass(frozen=True)
class GroupForm:
    """How the integers of a matrix are held.

    bits: 4, 6 or 8. The last have a sign. group: weights of a row that share a scale, 16 or 32.
    minimums: a group has a number, too, that is taken away from its weights. The others of 4 and 6 bits lie on both
        sides of 0.
    """

    bits: int
    group: int = 32
    minimums: bool = False

    def joined(self, other: GroupForm) -> GroupForm:
        """The smallest form that holds what both hold."""
        return GroupForm(max(self.bits, other.bits), min(self.group, other.group), self.minimums or other.minimums)

    @property
    def offset(self) -> int:
        """What the held integers have more than those that are meant."""
        return 0 if self.minimums else OFFSETS[self.bits]


@dataclass(frozen=True)
class Groups:
    """Rows of a matrix: `values * scales - minimums`, with the scale and the minimum of a weight's group.

    values: int8 `[n, in_features]`. scales: float32 `[n, groups]`. minimums: the same, or None if all are 0.
    """

    values: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None = None

    def rows(self, indices: torch.Tensor) -> Groups:
        """Some of the rows: int64 `[m]`."""
        return self._mapped(lambda numbers: numbers[indices])

    def columns(self, start: int, count: int) -> Groups:
        """Some of the columns, which begin and end with a group."""
        columns = self.values.shape[1]

        def part(numbers: torch.Tensor) -> torch.Tensor:
            group = columns // numbers.shape[1]
            return numbers.narrow(1, start // group, count // group)

        return self._mapped(part)

    def _mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Groups:
        minimums = None if self.minimums is None else change(self.minimums)
        return Groups(change(self.values), change(self.scales), minimums)

    def held_as(self, form: GroupForm) -> Groups:
        """The same weights with the integers that a form holds, which has room for them."""
        repeats = self.values.shape[1] // self.scales.shape[1] // form.group
        scales = self.scales.repeat_interleave(repeats, 1)
        if self.minimums is not None:
            return Groups(self.values, scales, self.minimums.repeat_interleave(repeats, 1))
        offset = OFFSETS[form.bits]
        return Groups(self.values + offset, scales, scales * offset if form.minimums else None)


def alternating(parts: Sequence[Groups]) -> Groups:
    """Rows of several matrices of one form: the first of each, then the second of each, and so on."""

    def joined(numbers: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(numbers, 1).flatten(0, 1)

    minimums = [part.minimums for part in parts if part.minimums is not None]
    return Groups(
        joined([part.values for part in parts]),
        joined([part.scales for part in parts]),
        joined(minimums) if minimums else None,
    )


@runtime_checkable
class GroupedTensor(CheckpointTensor, Protocol):
    """A tensor in a file whose rows are integers, where `form` is not None.

    kind: what the file calls it, such as "Q4_K".
    """

    @property
    def form(self) -> GroupForm | None: ...

    @property
    def kind(self) -> str: ...

    def read_groups(self, rows: slice | torch.Tensor) -> Groups:
        """Some rows: a slice, or indices, int64."""
        ...
