"""The weight of a matrix product: as a checkpoint has it, then in the order in which it is multiplied fastest."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvllm._extension import operator

PACKABLE_DTYPES = (torch.float32, torch.bfloat16)


class LinearWeight:
    """A matrix `[out_features, in_features]`.

    tensor: the matrix itself, to be filled by a loader.
    packed: None until `pack` is called. On a CPU it is a copy from then on whose rows lie in tiles of 16 (csrc/cpu,
        `pack_weight`), and `tensor` is empty. A product reads that memory once, in order, for any few rows, and a row
        of the result has the same bits whatever other rows there are. On other devices `pack` changes nothing.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.out_features, self.in_features = tensor.shape
        self.packed: torch.Tensor | None = None

    def pack(self) -> None:
        # Two bfloat16 channels are multiplied at once, so an odd one stays as it is.
        even = self.tensor.dtype != torch.bfloat16 or self.in_features % 2 == 0
        if self.packed is None and self.tensor.is_cpu and self.tensor.dtype in PACKABLE_DTYPES and even:
            self.packed = operator("pack_weight")(self.tensor)
            self.tensor = self.tensor.new_empty(0, self.in_features)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`[T, in_features]` times the transpose, plus `bias` `[out_features]` -> `[T, out_features]`."""
        if self.packed is None:
            return F.linear(x, self.tensor, bias)
        return operator("packed_linear")(x.contiguous(), self.packed, bias, self.out_features)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """int64 `[T]` -> these rows of the matrix `[T, in_features]`, a fresh tensor."""
        if self.packed is None:
            return F.embedding(indices, self.tensor)
        return operator("unpack_rows")(self.packed, indices)

    def first_rows(self, count: int) -> LinearWeight:
        """The matrix of the first `count` rows. It shares this one's memory unless `count` ends within a tile."""
        if self.packed is None:
            return LinearWeight(self.tensor[:count])
        tile_rows = self.packed.shape[2]
        if count % tile_rows:
            part = LinearWeight(self.rows(torch.arange(count)))
            part.pack()
            return part
        part = LinearWeight(self.tensor)
        part.out_features = count
        part.packed = self.packed[: count // tile_rows]
        return part
