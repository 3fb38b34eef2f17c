"""The weight of a matrix product: as a checkpoint has it, then in the order in which it is multiplied fastest."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvllm._extension import operator
from kvllm.huge_pages import use_huge_pages
from kvllm.models.quantize import dequantize_rows, group_size, quantize

PACKABLE_DTYPES = (torch.float32, torch.bfloat16)
ALIGNMENT = 64
HUGE_PAGE = 1 << 21
CHUNK = 64 << 20
"""Bytes that weights share. A huge page would otherwise hold one weight of a small model, and stay empty for the most
part."""


class Packing:
    """How the weights of a model are packed.

    bits: 8 or 4 for integers, None for the dtype as it is.
    """

    def __init__(self, bits: int | None = None) -> None:
        self.bits = bits
        self._free = torch.empty(0, dtype=torch.uint8)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in memory of huge pages, behind the tensors that were placed before."""
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if len(self._free) < size:
            memory = use_huge_pages(torch.empty(max(size, CHUNK) + HUGE_PAGE, dtype=torch.uint8))
            self._free = memory[-memory.data_ptr() % HUGE_PAGE :]
        part, self._free = self._free[: tensor.nbytes], self._free[size:]
        return part.view(tensor.dtype).view(tensor.shape).copy_(tensor)


class LinearWeight:
    """A matrix `[out_features, in_features]`.

    tensor: the matrix itself, to be filled by a loader.
    packed: None until `pack` is called. On a CPU it is a copy from then on whose rows lie in tiles of 16 (csrc/cpu,
        `pack_weight`), and `tensor` is empty. A product reads that memory once, in order, for any few rows, and a row
        of the result has the same bits whatever other rows there are. On other devices `pack` changes nothing.
    scales: of a packed matrix of integers (`quantize`).
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.out_features, self.in_features = tensor.shape
        self.packed: torch.Tensor | None = None
        self.scales: torch.Tensor | None = None

    def pack(self, packing: Packing) -> None:
        """Bring the matrix into the form that is multiplied fastest. It stays as it is on other devices than a CPU, and
        where its rows do not fill words of 32 bits."""
        tensor, bits = self.tensor, packing.bits
        if self.packed is not None or not tensor.is_cpu or tensor.dtype not in PACKABLE_DTYPES:
            return
        group = group_size(self.in_features, bits) if bits else None
        if bits and group:
            packed, scales = quantize(tensor, bits, group)
            self.packed, self.scales = packing.place(packed), packing.place(scales)
        elif tensor.dtype == torch.float32 or self.in_features % 2 == 0:
            self.packed = packing.place(operator("pack_weight")(tensor))
        else:
            return
        self.tensor = tensor.new_empty(0, self.in_features)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`[T, in_features]` times the transpose, plus `bias` `[out_features]` -> `[T, out_features]`."""
        if self.packed is None:
            return F.linear(x, self.tensor, bias)
        return operator("packed_linear")(x.contiguous(), self.packed, self.scales, bias, self.out_features)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """int64 `[T]` -> these rows of the matrix `[T, in_features]`, a fresh tensor."""
        if self.packed is None:
            return F.embedding(indices, self.tensor)
        if self.scales is not None:
            return dequantize_rows(self.packed, self.scales, indices).to(self.tensor.dtype)
        return operator("unpack_rows")(self.packed, indices)

    def first_rows(self, count: int) -> LinearWeight:
        """The matrix of the first `count` rows, in the same memory."""
        if self.packed is None:
            return LinearWeight(self.tensor[:count])
        part = LinearWeight(self.tensor)
        part.out_features = count
        part.packed = self.packed[: -(-count // self.packed.shape[2])]
        part.scales = None if self.scales is None else self.scales[: len(part.packed)]
        return part
