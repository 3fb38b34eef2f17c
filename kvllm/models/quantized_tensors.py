"""The tensors of a quantized checkpoint that stand in the place of one matrix, and what they mean."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

import torch

from kvllm.errors import CheckpointError
from kvllm.models.weight_format import WeightFormat

SCALES = ("F16", "BF16", "F32")
SCALE_NAMES = ("weight_scale", "weight_scale_inv")
"""What scales of 8-bit floats are called; both are multiplied with."""
UNREAD = (*(f".{of}_scale" for of in ("input", "activation", "output", "k", "v", "kv")), ".input_zero_point")
"""Ends of the names of tensors that a quantized checkpoint has for numbers that are not quantized here."""
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers that the four bits of MXFP4 stand for (OCP Microscaling Formats, E2M1)."""
FP4_GROUP = 32
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where each of eight neighbouring columns lies in a word of AWQ, counted from the lowest bits."""


@dataclass(frozen=True)
class Stored:
    """A tensor that a checkpoint must have: its dtype by the names of safetensors, and its shape, one of several."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Integers:
    """Rows of a matrix: `(values - zeros) * scales`, with the scale and the zero point of a weight's group.

    values: int8 `[n, in_features]`, in the order in which the groups follow each other. zeros: int8 `[n, groups]`, or
    None if all are 0. scales: float32 `[n, groups]`. order: int64 `[in_features]`, the column that each of these is in
    the matrix; None if they are in order.
    """

    values: torch.Tensor
    zeros: torch.Tensor | None
    scales: torch.Tensor
    order: torch.Tensor | None

    def rows(self, indices: torch.Tensor) -> Integers:
        """Some of the rows: `indices` is int64 `[m]`."""
        zeros = None if self.zeros is None else self.zeros[indices]
        return Integers(self.values[indices], zeros, self.scales[indices], self.order)

    def expanded(self) -> torch.Tensor:
        """float32 `[n, in_features]`, in the order of the matrix."""
        groups = self.values.float().unflatten(1, (self.scales.shape[1], -1))
        if self.zeros is not None:
            groups -= self.zeros.unsqueeze(2)
        values = (groups * self.scales.unsqueeze(2)).flatten(1)
        return values if self.order is None else torch.empty_like(values).index_copy_(1, self.order, values)


def stored_tensors(form: WeightFormat, module: str, shape: tuple[int, ...], found: Container[str]) -> dict[str, Stored]:
    """The tensors in the place of the matrix `[out_features, in_features]` of `module`, such as "...mlp.up_proj".

    found: the names of all tensors of the checkpoint.
    """
    if form.method == "float8":
        return _stored_float8(form, module, shape, found)
    if form.method == "mxfp4":
        return _stored_mxfp4(module, shape)
    rows, columns = shape
    word = 32 // form.bits
    group = form.group_size or columns
    if (form.transposed and rows % word) or columns % group or group % word:
        raise CheckpointError(
            f"{module} is {rows} x {columns}, but weights of {form.bits} bits in groups of {group} need multiples of "
            f"{word} and of {group}"
        )
    if not form.transposed:
        return _stored_compressed(form, module, shape, columns // group)
    groups = columns // group
    packed = (columns, rows // word) if form.method == "awq" else (columns // word, rows)
    stored = {
        f"{module}.qweight": Stored(("I32",), (packed,)),
        f"{module}.qzeros": Stored(("I32",), ((groups, rows // word),)),
        f"{module}.scales": Stored(SCALES, ((groups, rows),)),
    }
    if form.ordered:
        stored[f"{module}.g_idx"] = Stored(("I32",), ((columns,),))
    return stored


def _stored_compressed(form: WeightFormat, module: str, shape: tuple[int, ...], groups: int) -> dict[str, Stored]:
    rows, columns = shape
    word = 32 // form.bits
    scales = ((rows, groups), *(() if form.group_size else ((1, 1), (1,), ())))
    stored = {f"{module}.weight_scale": Stored(SCALES, scales)}
    if form.method == "packed":
        stored[f"{module}.weight_packed"] = Stored(("I32",), ((rows, columns // word),))
        stored[f"{module}.weight_shape"] = Stored(("I64", "I32"), ((2,),))
        zeros = Stored(("I32",), ((-(-rows // word), groups),))
    else:
        stored[f"{module}.weight"] = Stored(("I8",), (shape,))
        zeros = Stored(("I8",), scales)
    if form.zero_points:
        stored[f"{module}.weight_zero_point"] = zeros
    if form.ordered:
        stored[f"{module}.weight_g_idx"] = Stored(("I32",), ((columns,),))
    return stored


def _stored_float8(form: WeightFormat, module: str, shape: tuple[int, ...], found: Container[str]) -> dict[str, Stored]:
    shapes: tuple[tuple[int, ...], ...] = ((shape[0], 1), (1, 1), (1,), ())
    if form.block is not None:
        shapes = ((-(-shape[0] // form.block[0]), -(-shape[1] // form.block[1])),)
    names = [f"{module}.{name}" for name in SCALE_NAMES]
    scale = names[1] if names[1] in found else names[0]
    return {f"{module}.weight": Stored(("F8_E4M3",), (shape,)), scale: Stored(SCALES, shapes)}


def _stored_mxfp4(module: str, shape: tuple[int, ...]) -> dict[str, Stored]:
    """For a projection `[experts, in_features, out_features]`."""
    experts, columns, rows = shape
    if columns % FP4_GROUP:
        raise CheckpointError(f"{module} has rows of {columns} weights, but mxfp4 needs a multiple of {FP4_GROUP}")
    groups = columns // FP4_GROUP
    return {
        f"{module}_blocks": Stored(("U8",), ((experts, rows, groups, FP4_GROUP // 2),)),
        f"{module}_scales": Stored(("U8",), ((experts, rows, groups),)),
    }


def read_mxfp4(tensors: Mapping[str, torch.Tensor], module: str, expert: int) -> torch.Tensor:
    """One expert's matrix: float32 `[out_features, in_features]`. A byte has two weights, the first in its low bits."""
    blocks, scales = tensors[f"{module}_blocks"][expert], tensors[f"{module}_scales"][expert]
    places = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    values = torch.tensor(FP4_VALUES)[places.long()]
    return torch.ldexp(values, scales.int().unsqueeze(-1) - 127).flatten(-2)


def read_float8(
    form: WeightFormat, tensors: Mapping[str, torch.Tensor], module: str, rows: slice | torch.Tensor, columns: slice
) -> torch.Tensor:
    """Rows of a matrix of 8-bit floats, a slice or their indices, with their scales: float32 `[n, columns]`."""
    values = tensors[f"{module}.weight"][rows, columns].float()
    (scales,) = (tensors[name].float() for name in tensors if name.endswith(SCALE_NAMES))
    if form.block is None:
        return values * (scales.view(-1, 1)[rows] if scales.numel() > 1 else scales.view(1, 1))
    indices = torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
    row_blocks = indices // form.block[0]
    column_blocks = torch.arange(columns.start, columns.stop) // form.block[1]
    return values * scales[row_blocks][:, column_blocks]


def read_integers(
    form: WeightFormat, tensors: Mapping[str, torch.Tensor], module: str, rows: slice | torch.Tensor, columns: slice
) -> Integers:
    """Rows of a matrix of integers. `columns` begins and ends with a group, or is all of them.

    rows: a slice; or their indices, unless the form is transposed.

    Raises CheckpointError if groups are not equally large, or zero points are not what the config says.
    """
    group = form.group_size
    groups = slice(columns.start // group, columns.stop // group) if group else slice(1)
    if not form.transposed:
        return _read_compressed(form, tensors, module, rows, columns, groups)
    assert isinstance(rows, slice)
    word = 32 // form.bits
    offset = 1 << (form.bits - 1)
    words = slice(rows.start // word, -(-rows.stop // word))
    inside = slice(rows.start - words.start * word, rows.stop - words.start * word)
    unpack = _awq_columns if form.method == "awq" else _gptq_columns
    zeros = unpack(tensors[f"{module}.qzeros"][groups, words], form.bits)[:, inside]
    if not form.plain_zeros:
        zeros = zeros + 1 & (1 << form.bits) - 1
    if form.method == "awq":
        values = _awq_columns(tensors[f"{module}.qweight"][columns, words], form.bits)[:, inside]
    else:
        packed = tensors[f"{module}.qweight"][columns.start // word : columns.stop // word, rows]
        values = _gptq_columns(packed.T, form.bits).T
    if not form.zero_points and not bool((zeros == offset).all()):
        raise CheckpointError(f"{module}: its zero points are not {offset}, but quantization_config says sym=true")
    order = _order(tensors.get(f"{module}.g_idx"), module, columns, form.group_size)
    values = (values if order is None else values[order]) - offset
    return Integers(
        values.to(torch.int8).T.contiguous(),
        (zeros - offset).to(torch.int8).T.contiguous() if form.zero_points else None,
        tensors[f"{module}.scales"][groups, rows].float().T.contiguous(),
        order,
    )


def _read_compressed(
    form: WeightFormat,
    tensors: Mapping[str, torch.Tensor],
    module: str,
    rows: slice | torch.Tensor,
    columns: slice,
    groups: slice,
) -> Integers:
    """The same of compressed-tensors. What is packed has the integers less the smallest one."""
    word, smallest = 32 // form.bits, -(1 << (form.bits - 1))
    zeros = tensors.get(f"{module}.weight_zero_point")
    if form.method == "packed":
        packed = tensors[f"{module}.weight_packed"][rows, columns.start // word : columns.stop // word]
        values = _gptq_columns(packed, form.bits) + smallest
        zeros = None if zeros is None else _gptq_columns(zeros.T, form.bits).T + smallest
    else:
        values = tensors[f"{module}.weight"][rows, columns]

    def of_groups(numbers: torch.Tensor) -> torch.Tensor:
        if numbers.numel() == 1:
            return numbers.view(1, 1).expand(len(values), -1)
        return numbers[rows, groups]

    order = _order(tensors.get(f"{module}.weight_g_idx"), module, columns, form.group_size)
    return Integers(
        (values if order is None else values[:, order]).to(torch.int8),
        None if zeros is None else of_groups(zeros).to(torch.int8),
        of_groups(tensors[f"{module}.weight_scale"]).float(),
        order,
    )


def _gptq_columns(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 `[n, m]` -> the integers in each word, the lowest bits first: `[n, m * 32 / bits]`."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(1)


def _awq_columns(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 `[n, m]` -> the integers in each word, in the order of the columns: `[n, m * 8]`."""
    return _gptq_columns(words, bits).unflatten(1, (-1, len(AWQ_PLACES)))[..., list(AWQ_PLACES)].flatten(1)


def _order(g_idx: torch.Tensor | None, module: str, columns: slice, group: int | None) -> torch.Tensor | None:
    """The order that brings the columns of a group together; None if they are together already."""
    if g_idx is None or group is None:
        return None
    in_order = torch.arange(len(g_idx)) // group
    if torch.equal(g_idx.long(), in_order):
        return None
    order = torch.argsort(g_idx, stable=True)
    if not torch.equal(g_idx.long()[order], in_order):
        raise CheckpointError(f"{module}: g_idx has groups that are not of {group} columns each")
    if columns.stop - columns.start != len(g_idx):
        raise CheckpointError(
            f"{module}: its columns are in the order of desc_act, which is not computed where ranks share them out: "
            "use tensor_parallel_size=1"
        )
    return order
