"""The weight of a matrix product, in the order in which it is multiplied fastest."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from kvllm._extension import operator
from kvllm.errors import CheckpointError
from kvllm.files.groups import GroupForm, Groups
from kvllm.lora.product import AdaptedMatrix
from kvllm.memory_pages import use_huge_pages
from kvllm.models.quantize import TILE, WORD, dequantize_rows, group_size, pack_integers, packed_form, quantize
from kvllm.models.quantized_matrix import IntegerGroups, QuantizedMatrix
from kvllm.models.quantized_tensors import Integers
from kvllm.models.weight_format import WeightFormat

PACKABLE_DTYPES = (torch.float32, torch.bfloat16)
PACKED_DTYPES = {4: torch.int32, 6: torch.uint8, 8: torch.int8}
"""Of packed integers, by their bits."""
ALIGNMENT = 64
HUGE_PAGE = 1 << 21
CHUNK = 64 << 20
"""Bytes that weights share. A huge page would otherwise hold one weight of a small model, and stay empty for the most
part."""
STRIP = 1 << 19
"""Numbers of a matrix that are read and packed together. It bounds the copies meanwhile."""


class Packing:
    """How the weights of a model are packed, and the memory that they lie in.

    bits: 8 or 4 for integers that are made while the model is loaded, None for the dtype as it is.
    """

    def __init__(self, bits: int | None = None) -> None:
        self.bits = bits
        self._free = torch.empty(0, dtype=torch.uint8)

    @cached_property
    def unquantized(self) -> Packing:
        """For the weights of the same model that are never quantized."""
        return Packing()

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of huge pages on the CPU, after that of the call before. It takes no room until it is written."""
        num_bytes = math.prod(shape) * dtype.itemsize
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if len(self._free) < size:
            pages = mmap.mmap(-1, max(size, CHUNK) + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory = use_huge_pages(torch.frombuffer(pages, dtype=torch.uint8))
            self._free = memory[-memory.data_ptr() % HUGE_PAGE :]
        part, self._free = self._free[:num_bytes], self._free[size:]
        return part.view(dtype).view(shape)


class LinearWeight:
    """A matrix `[out_features, in_features]`. `allocate` makes room for it, then `write` fills it, some rows at a time.

    tensor: the matrix as it is; `[0, in_features]` where it is packed or quantized.
    packed: the matrix in tiles of 16 rows (csrc/cpu, `pack_weight`), on a CPU alone. A product reads that memory once,
        in order, for any few rows, and a row of the result has the same bits whatever other rows there are.
    scales: of a packed matrix of integers (`quantize`).
    sums: channels that each group has beside its weights, where groups have zero points. Each is the zero point, as an
        integer like the weights, and multiplies the negative sum of as many channels of the group. So the same kernels
        compute it, and round the sums as they round channels.
    quantized: a matrix of integers on a GPU.
    order: int64 `[in_features]`: the channel of x that each column multiplies, if not its own.
    form: how the integers of a GGUF file are held. integers: the form of a quantized checkpoint whose integers are
        held. Both are set before `allocate`, and None for all other weights.
    adapters: that may be added to its products; None where there are none.
    """

    def __init__(self, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> None:
        self.out_features, self.in_features = out_features, in_features
        self.tensor = torch.empty(0, in_features, dtype=dtype, device=device)
        self.packed: torch.Tensor | None = None
        self.scales: torch.Tensor | None = None
        self.sums = 0
        self.quantized: QuantizedMatrix | None = None
        self.order: torch.Tensor | None = None
        self.form: GroupForm | None = None
        self.integers: WeightFormat | None = None
        self.adapters: AdaptedMatrix | None = None

    @classmethod
    def pack(cls, matrix: torch.Tensor, packing: Packing) -> LinearWeight:
        """A weight with the values of `matrix` `[out_features, in_features]`."""
        weight = cls(matrix.shape[0], matrix.shape[1], matrix.dtype, matrix.device)
        weight.allocate(packing)
        for first, last in strips(len(matrix), weight.in_features):
            weight.write(first, matrix[first:last])
        return weight

    def allocate(self, packing: Packing | None) -> None:
        """Make room for the matrix, filled with zeros. It is not packed if `packing` is None, on other devices than a
        CPU, and where its rows do not fill words of 32 bits."""
        dtype, columns = self.tensor.dtype, self.in_features
        tiles = -(-self.out_features // TILE)
        if not self.tensor.is_cpu:
            self._allocate_on_device(packing)
        elif packing and self.form:
            shape = packed_shape(tiles, columns, self.form)
            self.packed = packing.zeros(shape, PACKED_DTYPES[self.form.bits])
            self.scales = packing.zeros(scales_shape(tiles, columns, self.form), torch.float16)
        elif packing and self.integers:
            self._allocate_integers(packing, self.integers, tiles)
        elif packing is None or dtype not in PACKABLE_DTYPES:
            self.tensor = self.tensor.new_zeros(self.out_features, columns)
        elif packing.bits and (group := group_size(columns, packing.bits)):
            self.packed = packing.zeros(*packed_form(tiles, columns, packing.bits))
            self.scales = packing.zeros((tiles, columns // group, TILE), torch.float32)
        elif columns * dtype.itemsize % WORD == 0:
            word = WORD // dtype.itemsize
            self.packed = packing.zeros((tiles, columns // word, TILE, word), dtype)
        else:
            self.tensor = self.tensor.new_zeros(self.out_features, columns)

    def _allocate_on_device(self, packing: Packing | None) -> None:
        """Not on a CPU: integers, if there are any that are multiplied there."""
        shape = self.out_features, self.in_features
        if integers := packing and self._integers(packing.bits):
            self.tensor = self.tensor.new_empty(0, self.in_features)  # an embedding's, if it gives the logits, too
            self.quantized = QuantizedMatrix.of(shape, integers, self.tensor.device)
        else:
            self.form = self.integers = None
            self.tensor = self.tensor.new_zeros(shape)

    def _integers(self, bits: int | None) -> IntegerGroups | None:
        """Those that a GPU holds of this matrix, if it holds integers. bits: of those that are made."""
        columns, found = self.in_features, None
        if self.form:
            found = IntegerGroups(self.form.bits, self.form.group, self.form.minimums, torch.float16)
        elif self.integers:
            form = self.integers
            found = IntegerGroups(form.bits, form.group_size or columns, form.zero_points)
        elif bits and (group := group_size(columns, bits)):
            found = IntegerGroups(bits, group)
        return found if found and found.are_multiplied(columns, self.tensor.dtype) else None

    def _allocate_integers(self, packing: Packing, form: WeightFormat, tiles: int) -> None:
        groups = self.in_features // (form.group_size or self.in_features)
        self.sums = 32 // form.bits if form.zero_points else 0
        self.packed = packing.zeros(*packed_form(tiles, self.in_features + groups * self.sums, form.bits))
        self.scales = packing.zeros((tiles, groups, TILE), torch.float32)

    def write(self, first: int, rows: torch.Tensor) -> None:
        """Fill the rows from `first` on with `rows` `[n, in_features]` of floating point."""
        rows = rows.to(self.tensor)
        if self.quantized is not None:
            self.quantized.write(first, *quantize(rows, self.quantized.bits, self.quantized.group))
        elif self.packed is None:
            self.tensor[first : first + len(rows)] = rows
        elif self.scales is None:
            _tile(rows, first, self.packed)
        else:
            bits, group = 8 if self.packed.dtype == torch.int8 else 4, self.in_features // self.scales.shape[1]
            integers, scales = quantize(rows, bits, group)
            _tile(pack_integers(integers, bits), first, self.packed)
            _tile(scales, first, self.scales)

    def write_integers(self, first: int, rows: Integers) -> None:
        """Fill the rows from `first` on. All rows of a matrix have one order of columns.

        Raises CheckpointError if they have not.
        """
        if first == 0:
            self.order = None if rows.order is None else rows.order.to(self.tensor.device)
        elif not _equal(self.order, rows.order):
            raise CheckpointError(
                "projections of one input have their columns in different orders (g_idx), which kvllm does not "
                "compute: use a checkpoint with desc_act=false"
            )
        if self.quantized is not None:
            self.quantized.write_integers(first, rows)
            return
        assert self.packed is not None and self.scales is not None
        values, scales = rows.values, rows.scales.float()
        if rows.zeros is not None:
            zeros = rows.zeros.unsqueeze(2).expand(-1, -1, self.sums)
            values = torch.cat((values.unflatten(1, (zeros.shape[1], -1)), zeros), 2).flatten(1)
        _tile(pack_integers(values, 8 if self.packed.dtype == torch.int8 else 4), first, self.packed)
        _tile(scales, first, self.scales)

    def write_groups(self, first: int, rows: Groups) -> None:
        """Fill the rows from `first` on with those of a file, in the form of the matrix."""
        assert self.form is not None
        if self.quantized is not None:
            self.quantized.write_groups(first, rows, self.form)
            return
        assert self.packed is not None and self.scales is not None
        integers, scales = pack_groups(rows, self.form)
        _tile(integers, first, self.packed)
        operator("tile_rows")(scales, first, self.scales.flatten(1, 2))

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`[T, in_features]` times the transpose, plus `bias` `[out_features]` -> `[T, out_features]`, with what the
        adapters of the tokens add."""
        product = self._multiply(x, bias)
        if self.adapters is not None:
            self.adapters.add(x, product)
        return product

    def multiply_into(self, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """`multiply` without bias and adapters, written to `result` `[T, out_features]`, which is returned."""
        if self.packed is None and self.quantized is None:
            return torch.mm(x, self.tensor.t(), out=result)
        return result.copy_(self._multiply(x, None))

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`multiply` without adapters."""
        if self.order is not None:
            x = x[:, self.order]
        if self.quantized is not None:
            return self.quantized.multiply(x, bias)
        if self.packed is None:
            return F.linear(x, self.tensor, bias)
        if self.sums and self.scales is not None:
            wide = with_sums(x.float(), self.scales.shape[1], self.sums)
            wide_bias = None if bias is None else bias.float()
            product = operator("packed_linear")(wide, self.packed, self.scales, wide_bias, self.out_features)
            return product.to(x.dtype)
        return operator("packed_linear")(x.contiguous(), self.packed, self.scales, bias, self.out_features)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """int64 `[T]` -> these rows of the matrix `[T, in_features]`, a fresh tensor."""
        if self.quantized is not None:
            return self.quantized.rows(indices).to(self.tensor.dtype)
        if self.packed is None:
            return F.embedding(indices, self.tensor)
        if self.scales is not None and self.form is not None:
            return operator("dequantize_rows")(self.packed, self.scales, indices).to(self.tensor.dtype)
        if self.scales is not None:
            return dequantize_rows(self.packed, self.scales, indices).to(self.tensor.dtype)
        return operator("unpack_rows")(self.packed, indices)

    def part(self, first: int, count: int) -> LinearWeight:
        """The matrix of the `count` rows from `first` on, a multiple of TILE, in the same memory. With adapters,
        `first` is 0."""
        part = copy(self)
        part.out_features = count
        tiles = slice(first // TILE, -(-(first + count) // TILE))
        part.tensor = self.tensor[first : first + count]
        part.quantized = self.quantized and self.quantized.part(first, count)
        part.packed = None if self.packed is None else self.packed[tiles]
        part.scales = None if self.scales is None else self.scales[tiles]
        return part


def with_sums(x: torch.Tensor, groups: int, sums: int) -> torch.Tensor:
    """float32 `[T, in_features]` with `sums` more channels at the end of each group, the negative sums of its parts."""
    channels = x.unflatten(1, (groups, sums, -1))
    return torch.cat((channels.flatten(2), channels.sum(3).neg_()), 2).flatten(1)


@dataclass(frozen=True)
class MatrixRows:
    """The rows of a matrix that one tensor of a checkpoint fills: `count`, from `first` on."""

    matrix: LinearWeight
    first: int
    count: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.count, self.matrix.in_features


def strips(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Bounds of the parts in which the rows of a matrix are read and packed."""
    at_once = max(1, STRIP // columns // TILE) * TILE
    for first in range(0, rows, at_once):
        yield first, min(first + at_once, rows)


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a.cpu(), b)


def _tile(rows: torch.Tensor, first: int, tiles: torch.Tensor) -> None:
    """Write rows, which are whole words of 32 bits, to those of packed memory from `first` on."""
    operator("tile_rows")(rows.contiguous().view(torch.int32), first, tiles.view(torch.int32).flatten(2))


def packed_shape(tiles: int, in_features: int, form: GroupForm) -> tuple[int, ...]:
    """Of the integers that `pack_groups` makes, which have a dtype of PACKED_DTYPES."""
    words = in_features * form.bits // (8 * WORD)
    return (tiles, words, TILE) if form.bits == 4 else (tiles, words, TILE, WORD)


def scales_shape(tiles: int, in_features: int, form: GroupForm) -> tuple[int, ...]:
    """Of the scales, and minimums, that `pack_groups` makes: float16."""
    return (tiles, in_features // form.group, 2 if form.minimums else 1, TILE)


def pack_groups(rows: Groups, form: GroupForm) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[n, in_features]` as the CPU's kernels read them (csrc/cpu/linear.h), before they are put into tiles.

    Returns integers: int32 `[n, words]`. scales: float16 `[n, numbers]`, the scale of each group, and its minimum.
    """
    held = rows.held_as(form)
    words = held.values.contiguous().view(torch.int32)  # four integers each
    if form.bits == 4:
        low, high = words.unflatten(1, (-1, 2)).unbind(2)
        words = low | high << 4
    elif form.bits == 6:
        first, last = words.unflatten(1, (-1, 4)).split((3, 1), 2)
        words = (first | (last >> torch.tensor([0, 2, 4], dtype=torch.int32) & 0x03030303) << 6).flatten(1)
    numbers = [held.scales] if held.minimums is None else [held.scales, held.minimums]
    return words, torch.stack(numbers, 2).flatten(1).to(torch.float16)
