"""Tensors of a GGUF file: the blocks of numbers as they lie in the file, and what they mean."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize

from kvllm.errors import CheckpointError
from kvllm.files.gguf.header import TensorInfo
from kvllm.files.gguf.integers import FORMS, decode
from kvllm.files.groups import GroupForm, Groups, alternating
from kvllm.memory_pages import forget_pages

TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
)
"""The types that are read."""


@dataclass(frozen=True)
class GGUFTensor:
    """As `GroupedTensor`, and its blocks. What `read` reads is float32.

    blocks: uint8 `[*shape[:-1], bytes of a row]`, a view of the file.
    order: int64 `[shape[0]]`, the row of the file that each row is, if not its own.
    column_parts: int64, of equal parts of the columns, the one of the file that each is, if not its own.
    undo: makes the values of those of the file, if they are others.
    """

    file: Path
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    blocks: torch.Tensor
    order: torch.Tensor | None = None
    column_parts: torch.Tensor | None = None
    undo: Callable[[torch.Tensor], torch.Tensor] | None = None

    dtype = "F32"

    @classmethod
    def view(cls, info: TensorInfo, data: torch.Tensor) -> GGUFTensor:
        """The tensor in the bytes of its whole file."""
        blocks = data[info.start : info.start + info.num_bytes].view(*info.shape[:-1], -1)
        return cls(info.file, info.type, info.shape, blocks)

    @property
    def kind(self) -> str:
        return self.type.name

    @property
    def form(self) -> GroupForm | None:
        if len(self.shape) == 3:
            return self.expert(0).form
        form = FORMS.get(self.type.name) if len(self.shape) == 2 and not self.undo else None
        if form and self.column_parts is not None and self.shape[1] // len(self.column_parts) % form.group:
            return None
        return form

    def read_groups(self, rows: slice | torch.Tensor) -> Groups:
        if len(self.shape) == 3:  # the matrix of one expert
            assert isinstance(rows, slice) and rows.stop - rows.start == 1
            return self.expert(rows.start).read_groups(slice(None))
        rows = rows if self.order is None else self.order[rows]
        with np.errstate(all="ignore"):  # as in `_numbers`
            values, scales, minimums = decode(self.blocks[rows].contiguous().numpy(), self.type)
        return Groups(
            self._in_order(torch.from_numpy(values)),
            self._in_order(torch.from_numpy(scales)),
            None if minimums is None else self._in_order(torch.from_numpy(minimums)),
        )

    def read(self, rows: slice | torch.Tensor | None = None) -> torch.Tensor:
        rows = slice(None) if rows is None else rows
        if self.order is not None:
            rows = self.order[rows]
        if len(self.shape) == 1:  # one row of blocks
            return self._numbers(self.blocks)[rows]
        return self._numbers(self.blocks[rows])

    def _numbers(self, blocks: torch.Tensor) -> torch.Tensor:
        raw = blocks.contiguous().numpy()
        with np.errstate(all="ignore"):  # a scale that is no number makes such weights
            numbers = torch.from_numpy(dequantize(raw.reshape(-1, raw.shape[-1]), self.type))
        numbers = self.undo(numbers) if self.undo else numbers
        return self._in_order(numbers.view(*raw.shape[:-1], -1))

    def _in_order(self, columns: torch.Tensor) -> torch.Tensor:
        """`[..., columns]`, or `[..., groups of columns]`."""
        if self.column_parts is None:
            return columns
        return columns.unflatten(-1, (len(self.column_parts), -1))[..., self.column_parts, :].flatten(-2)

    def forget(self) -> None:
        forget_pages(self.blocks)

    def expert(self, index: int) -> GGUFTensor:
        """One matrix of those of all experts."""
        return GGUFTensor(self.file, self.type, self.shape[1:], self.blocks[index])


@dataclass(frozen=True)
class ExpertStack:
    """As `GroupedTensor`: projections of all experts as gpt-oss has them, `[experts, in_features, out_features]`, or
    their biases `[experts, out_features]`. Where there are several, their outputs alternate."""

    parts: tuple[GGUFTensor, ...]

    dtype = "F32"

    @staticmethod
    def fits(parts: tuple[GGUFTensor, ...]) -> bool:
        return len({part.shape for part in parts}) == 1 and len(parts[0].shape) in (2, 3)

    @property
    def file(self) -> Path:
        return self.parts[0].file

    @property
    def shape(self) -> tuple[int, ...]:
        experts, out_features, *in_features = self.parts[0].shape
        return (experts, *in_features, out_features * len(self.parts))

    @property
    def kind(self) -> str:
        return self.parts[0].kind

    @property
    def form(self) -> GroupForm | None:
        matrices, kinds = [part.expert(0) for part in self.parts], {part.kind for part in self.parts}
        return matrices[0].form if len(kinds) == 1 else None

    def read_groups(self, rows: slice | torch.Tensor) -> Groups:
        """The matrix `[out_features, in_features]` of one expert."""
        assert isinstance(rows, slice) and rows.stop - rows.start == 1
        return alternating([part.expert(rows.start).read_groups(slice(None)) for part in self.parts])

    def read(self, rows: slice | torch.Tensor | None = None) -> torch.Tensor:
        found = torch.stack([part.read(rows) for part in self.parts], 2).flatten(1, 2)
        return found if found.dim() == 2 else found.transpose(1, 2)

    def forget(self) -> None:
        for part in self.parts:
            part.forget()


@dataclass(frozen=True)
class HeadProjections:
    """What makes keys and values of latents, `[heads * (plain + value), rank]`, each head's keys first, of two tensors:
    those of keys are `[heads, rank, plain]`, of values `[heads, value, rank]`."""

    parts: tuple[GGUFTensor, ...]

    dtype = "F32"

    @staticmethod
    def fits(parts: tuple[GGUFTensor, ...]) -> bool:
        keys, values = (part.shape for part in parts)
        return len(keys) == len(values) == 3 and keys[:2] == values[::2]

    @property
    def file(self) -> Path:
        return self.parts[0].file

    @property
    def shape(self) -> tuple[int, ...]:
        keys, values = (part.shape for part in self.parts)
        return (keys[0] * (keys[2] + values[1]), keys[1])

    def read(self, rows: slice | torch.Tensor | None = None) -> torch.Tensor:
        rows = torch.arange(self.shape[0])[slice(None) if rows is None else rows]
        of_head = self.shape[0] // self.parts[0].shape[0]
        heads, index = (rows // of_head).unique(return_inverse=True)
        keys, values = (part.read(heads) for part in self.parts)
        return torch.cat((keys.transpose(1, 2), values), 1)[index, rows % of_head]

    def forget(self) -> None:
        for part in self.parts:
            part.forget()


RenamedTensor = GGUFTensor | ExpertStack | HeadProjections


def map_file(file: Path) -> torch.Tensor:
    """All bytes of a file, of which nothing is read yet: uint8. Raises CheckpointError."""
    try:
        with file.open("rb") as opened:
            # A private copy, to which nothing is written: torch warns about memory that cannot be.
            return torch.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
