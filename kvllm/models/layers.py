"""The matrix products of a decoder, each holding one rank's part of its weight.

`weights` says which tensors of the checkpoint go where. `allocate` makes room for them, in the form that is multiplied
fastest; it is called before they are written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass

import torch

from kvllm.files.groups import GroupForm, Groups
from kvllm.models.config import ModelConfig
from kvllm.models.quantized_matrix import QuantizedMatrix
from kvllm.models.quantized_tensors import Integers
from kvllm.models.rotary import channel_order
from kvllm.models.weight_format import WeightFormat
from kvllm.models.weights import LinearWeight, MatrixRows, Packing, strips
from kvllm.parallel import Shard, kv_heads, split

HEAD_BITS = 8
"""Bits of the projection to the vocabulary where weights have 8 or 4: its error goes straight to the tokens."""


@dataclass(frozen=True)
class Weight:
    """One tensor of a checkpoint: its whole `shape`, and `target`, where this rank's part of it goes, which begins at
    index `start` of dimension `dim`.

    order: int64, the rows of the tensor that the rows of the target are, if they do not follow each other.
    quantized: a checkpoint with quantized matrices may have other tensors in its place.
    offset: what is added to the values.
    """

    shape: tuple[int, ...]
    target: torch.Tensor | MatrixRows
    dim: int = 0
    start: int = 0
    order: torch.Tensor | None = None
    quantized: bool = False
    offset: float = 0.0

    def is_quantized(self, form: WeightFormat | None) -> bool:
        """Whether a checkpoint of a form may have other tensors in the place of this one."""
        return self.quantized and form is not None and form.method != "mxfp4"

    @property
    def form(self) -> GroupForm | None:
        """That of the matrix, where it holds a file's integers."""
        return self.target.matrix.form if isinstance(self.target, MatrixRows) else None

    @property
    def holds_integers(self) -> bool:
        """Whether the target is of a matrix that holds a quantized checkpoint's integers."""
        return isinstance(self.target, MatrixRows) and self.target.matrix.integers is not None

    @property
    def first_column(self) -> int:
        """The column of the tensor that is the target's first one."""
        return self.start if self.dim else 0

    def strips(self) -> Iterator[tuple[int, int]]:
        """Bounds of the parts of the target that are read and written one after the other."""
        return strips(self.target.shape[0], math.prod(self.shape[1:]))

    def rows(self, first: int, last: int) -> slice | torch.Tensor:
        """The rows of the tensor that rows `first` to `last` - 1 of the target are, all of them or a part of each."""
        if self.order is not None:
            return self.order[first:last]
        start = 0 if self.dim else self.start
        return slice(start + first, start + last)

    def write(self, first: int, values: torch.Tensor) -> None:
        """Rows of the target from row `first` on, from those of the whole tensor, `[n, ...]`."""
        if self.dim:
            values = values.narrow(1, self.start, self.target.shape[1])
        self.write_part(first, values)

    def write_groups(self, first: int, values: Groups) -> None:
        """The same of the integers that a file has, to a matrix that holds them."""
        assert isinstance(self.target, MatrixRows)
        if self.dim:
            values = values.columns(self.start, self.target.shape[1])
        self.target.matrix.write_groups(self.target.first + first, values)

    def write_part(self, first: int, values: torch.Tensor | Integers) -> None:
        """This rank's part of these rows; of a quantized checkpoint, the integers."""
        if isinstance(values, Integers) and not self.holds_integers:
            values = values.expanded()
        if isinstance(self.target, torch.Tensor):
            assert isinstance(values, torch.Tensor)
            self.target[first : first + len(values)] = values.to(self.target.dtype) + self.offset
        elif isinstance(values, Integers):
            self.target.matrix.write_integers(self.target.first + first, values)
        else:
            self.target.matrix.write(self.target.first + first, values)


def quantized_matrices(weights: dict[str, Weight]) -> list[QuantizedMatrix]:
    """Those of a model that a GPU holds as integers."""
    matrices = {each.target.matrix for each in weights.values() if isinstance(each.target, MatrixRows)}
    return [matrix.quantized for matrix in matrices if matrix.quantized is not None]


def whole(target: torch.Tensor, offset: float = 0.0, order: torch.Tensor | None = None) -> Weight:
    """A tensor that every rank holds completely."""
    return Weight(tuple(target.shape), target, order=order, offset=offset)


def row_part(total: int, target: MatrixRows, shard: Shard) -> Weight:
    """A matrix of `total` rows that are shared out among the ranks."""
    return Weight((total, target.shape[1]), target, 0, shard.rank * target.shape[0], quantized=True)


def vocab_part(vocab_size: int, matrix: LinearWeight, shard: Shard) -> Weight:
    """A tensor with a row for each token. Where the ranks do not divide the vocabulary, the last have rows to spare."""
    first = min(shard.rank * matrix.out_features, vocab_size)
    held = min(matrix.out_features, vocab_size - first)
    return Weight((vocab_size, matrix.in_features), MatrixRows(matrix, 0, held), 0, first)


class QKVLinear:
    """The projections to queries, keys and values as one product; heads are shared out, or repeated (`kv_heads`).

    The rows of the weight are those of the queries, keys and values, in this order. The channels of query and key heads
    are in `channel_order`. The checkpoint has a tensor for each, or one of all (`fused`).
    """

    def __init__(
        self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device, *, fused: bool = False
    ) -> None:
        self.head_dim = config.head_dim
        self.fused = fused
        self.order = channel_order(config)
        self.num_query_heads = split(config.num_query_heads, shard, "query heads")
        held = kv_heads(config.num_kv_heads, shard)
        self.num_kv_heads = held.count
        # How many heads the checkpoint has, and the first of this rank.
        of_keys = (config.num_kv_heads, held.first)
        self.heads = {"q": (config.num_query_heads, shard.rank * self.num_query_heads), "k": of_keys, "v": of_keys}
        query_size, kv_size = self.num_query_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.sizes = (query_size, kv_size, kv_size)
        self.weight = LinearWeight(sum(self.sizes), config.hidden_size, dtype, device)
        self.bias = torch.empty(sum(self.sizes), dtype=dtype, device=device) if config.qkv_bias else None

    def weights(self, prefix: str) -> dict[str, Weight]:
        rows = {name: self._rows(name) for name in self.heads}
        if self.fused:
            totals = [total * self.head_dim for total, _ in self.heads.values()]
            starts = (0, totals[0], totals[0] + totals[1])
            order = torch.cat([start + each for start, each in zip(starts, rows.values(), strict=True)])
            return self._weights(f"{prefix}.qkv_proj", sum(totals), 0, order)
        found, row = {}, 0
        for (name, (total, _)), size in zip(self.heads.items(), self.sizes, strict=True):
            found |= self._weights(f"{prefix}.{name}_proj", total * self.head_dim, row, rows[name])
            row += size
        return found

    def _rows(self, name: str) -> torch.Tensor:
        """The rows of one projection that this rank holds: int64."""
        first = self.heads[name][1] * self.head_dim
        size = self.sizes["qkv".index(name)]
        if self.order is None or name == "v":
            return torch.arange(first, first + size)
        heads = torch.arange(first, first + size, self.head_dim)
        return (heads.unsqueeze(1) + self.order).flatten()

    def _weights(self, name: str, total: int, first: int, rows: torch.Tensor) -> dict[str, Weight]:
        """The tensors of a projection of `total` rows: `rows` of it are those of the weight from `first` on."""
        start, size = int(rows[0]), len(rows)
        order = None if torch.equal(rows, torch.arange(start, start + size)) else rows
        start = start if order is None else 0
        part = MatrixRows(self.weight, first, size)
        found = {f"{name}.weight": Weight((total, self.weight.in_features), part, 0, start, order, quantized=True)}
        if self.bias is not None:
            found[f"{name}.bias"] = Weight((total,), self.bias[first : first + size], 0, start, order)
        return found

    def allocate(self, packing: Packing) -> None:
        self.weight.allocate(packing)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, hidden_size]` -> `[T, (query_heads + 2 * kv_heads) * head_dim]`."""
        return self.weight.multiply(x, self.bias)

    def forward_queries(self, x: torch.Tensor) -> torch.Tensor:
        """The queries of `forward`, without the work for keys and values: `[T, query_heads * head_dim]`."""
        size = self.sizes[0]
        return self.weight.part(0, size).multiply(x, None if self.bias is None else self.bias[:size])


class MergedColumnLinear:
    """Projections of one input, equally wide, as one product; the rows of each are shared out.

    The checkpoint has a tensor for each of `names`, or one of all that is called `fused`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        names: tuple[str, ...],
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
        *,
        bias: bool = False,
        fused: str | None = None,
    ) -> None:
        self.shard = shard
        self.names = names
        self.fused = fused
        self.out_features = out_features
        self.size = split(out_features, shard, "MLP columns")
        self.weight = LinearWeight(len(names) * self.size, in_features, dtype, device)
        self.bias = torch.empty(len(names) * self.size, dtype=dtype, device=device) if bias else None

    def weights(self, prefix: str) -> dict[str, Weight]:
        if self.fused:
            starts = torch.arange(len(self.names)).unsqueeze(1) * self.out_features + self.shard.rank * self.size
            order = (starts + torch.arange(self.size)).flatten()
            shape = (len(self.names) * self.out_features, self.weight.in_features)
            part = MatrixRows(self.weight, 0, self.weight.out_features)
            return {f"{prefix}.{self.fused}.weight": Weight(shape, part, order=order, quantized=True)}
        found = {}
        for i, name in enumerate(self.names):
            part = MatrixRows(self.weight, i * self.size, self.size)
            found[f"{prefix}.{name}.weight"] = row_part(self.out_features, part, self.shard)
            if self.bias is not None:
                bias = self.bias[i * self.size : (i + 1) * self.size]
                found[f"{prefix}.{name}.bias"] = Weight((self.out_features,), bias, 0, self.shard.rank * self.size)
        return found

    def allocate(self, packing: Packing) -> None:
        self.weight.allocate(packing)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, in_features]` -> `[T, len(names) * out_features / ranks]`, one projection after the other."""
        return self.weight.multiply(x, self.bias)


class RowLinear:
    """A projection whose input columns are shared out: each rank computes one term of the sum, the first one the bias
    as well."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
        *,
        bias: bool = False,
    ) -> None:
        self.shard = shard
        self.in_features = in_features
        columns = split(in_features, shard, "input columns")
        self.weight = LinearWeight(out_features, columns, dtype, device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None

    def weights(self, prefix: str) -> dict[str, Weight]:
        rows, columns = self.weight.out_features, self.weight.in_features
        part = MatrixRows(self.weight, 0, rows)
        start = self.shard.rank * columns
        found = {f"{prefix}.weight": Weight((rows, self.in_features), part, 1, start, quantized=True)}
        if self.bias is not None:
            found[f"{prefix}.bias"] = whole(self.bias)
        return found

    def allocate(self, packing: Packing) -> None:
        self.weight.allocate(packing)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, in_features / ranks]` -> `[T, out_features]`, summed over the ranks."""
        return self.shard.all_reduce(self.weight.multiply(x, self.bias if self.shard.rank == 0 else None))


class VocabEmbedding:
    """The vectors of tokens, times `scale`, divided by `divisor`; the vocabulary is shared out."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
        scale: float = 1.0,
        divisor: float = 1.0,
    ) -> None:
        self.shard = shard
        self.scale = torch.tensor(scale, dtype=dtype).item() / divisor
        self.vocab_size = vocab_size
        self.size = -(-vocab_size // shard.world_size)
        self.weight = LinearWeight(self.size, hidden_size, dtype, device)

    def weights(self, prefix: str) -> dict[str, Weight]:
        return {f"{prefix}.weight": vocab_part(self.vocab_size, self.weight, self.shard)}

    def allocate(self, packing: Packing) -> None:
        """Packed only to hold a file's integers, because its rows are only looked up."""
        self.weight.allocate(packing if self.weight.form else None)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 `[T]` -> `[T, hidden_size]`, a fresh tensor."""
        if self.shard.world_size == 1:
            vectors = self.weight.rows(token_ids)
        else:
            local = token_ids - self.shard.rank * self.size
            elsewhere = (local < 0) | (local >= self.size)
            vectors = self.weight.rows(local.masked_fill_(elsewhere, 0))
            vectors = self.shard.all_reduce(vectors.masked_fill_(elsewhere.unsqueeze(1), 0))
        return vectors if self.scale == 1 else vectors.mul_(self.scale)


class LMHead:
    """The projection to the vocabulary, which is shared out. With `tied` embeddings, the weight is theirs."""

    def __init__(self, embedding: VocabEmbedding, tied: bool, shard: Shard) -> None:
        self.shard = shard
        self.tied = tied
        self.vocab_size = embedding.vocab_size
        self.weight = embedding.weight if tied else copy(embedding.weight)

    def weights(self, prefix: str) -> dict[str, Weight]:
        return {} if self.tied else {f"{prefix}.weight": vocab_part(self.vocab_size, self.weight, self.shard)}

    def allocate(self, packing: Packing) -> None:
        self.weight.allocate(Packing(HEAD_BITS if packing.bits else None))

    def forward(self, hidden: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """`[R, hidden_size]` -> logits `[R, n]` of this rank's tokens, on the last ranks some more (`vocab_part`).

        into: written and returned.
        """
        return self.weight.multiply(hidden) if into is None else self.weight.multiply_into(hidden, into)
