"""Tensors of a checkpoint that hold one projection of all experts, as gpt-oss and Gemma 4 have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvllm.files.groups import Groups
from kvllm.models.experts import GroupedLinear
from kvllm.models.layers import Weight
from kvllm.models.weight_format import WeightFormat
from kvllm.models.weights import MatrixRows


@dataclass(frozen=True, kw_only=True)
class ExpertMatrices(Weight):
    """A tensor `[experts, in_features, out_features]` of `linear`.

    outputs: int64, the columns of it that are this rank's rows. inputs: the rows of it that are this rank's columns.
    """

    linear: GroupedLinear
    outputs: torch.Tensor
    inputs: slice

    def is_quantized(self, form: WeightFormat | None) -> bool:
        return form is not None

    def strips(self) -> Iterator[tuple[int, int]]:
        for expert in range(self.shape[0]):
            yield expert, expert + 1

    def rows(self, first: int, last: int) -> slice:
        return slice(first, last)

    def write(self, first: int, values: torch.Tensor) -> None:
        """Experts from `first` on: `[n, in_features, out_features]`."""
        for expert, matrix in enumerate(values, first):
            self.write_expert(expert, matrix.T)

    @property
    def first_column(self) -> int:
        return self.inputs.start or 0

    def write_groups(self, first: int, values: Groups) -> None:
        """One expert's matrix `[out_features, in_features]`."""
        part = values.rows(self.outputs).columns(self.first_column, self.linear.weight.in_features)
        self.linear.weight.write_groups(first * self.linear.stride, part)

    def write_expert(self, expert: int, matrix: torch.Tensor) -> None:
        """One expert's matrix `[out_features, in_features]`."""
        self.linear.weight.write(expert * self.linear.stride, matrix[self.outputs, self.inputs])


@dataclass(frozen=True, kw_only=True)
class ExpertRows(ExpertMatrices):
    """A tensor `[experts, out_features, in_features]`, which no checkpoint quantizes."""

    @classmethod
    def of(
        cls, linear: GroupedLinear, shape: tuple[int, int], outputs: torch.Tensor, inputs: slice = slice(None)
    ) -> ExpertRows:
        """shape: of one expert's matrix in the checkpoint."""
        target = MatrixRows(linear.weight, 0, linear.weight.out_features)
        return cls((linear.num_experts, *shape), target, linear=linear, outputs=outputs, inputs=inputs)

    def is_quantized(self, form: WeightFormat | None) -> bool:
        return False

    def write(self, first: int, values: torch.Tensor) -> None:
        for expert, matrix in enumerate(values, first):
            self.write_expert(expert, matrix)


@dataclass(frozen=True, kw_only=True)
class ExpertVectors(Weight):
    """A tensor `[experts, out_features]`, of which `target` has the columns `outputs`, int64."""

    outputs: torch.Tensor

    def write(self, first: int, values: torch.Tensor) -> None:
        self.write_part(first, values[:, self.outputs])
