"""The matrix products of a decoder, each holding one rank's part of its weight, and the table of rotations.

`weights` says which tensors of the checkpoint go where. `allocate` makes room for them, in the form that is multiplied
fastest; it is called before they are written.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass

import torch

from kvllm.models.config import ModelConfig, RopeScaling
from kvllm.models.quantized_tensors import Integers
from kvllm.models.weights import LinearWeight, MatrixRows, Packing
from kvllm.parallel import Shard, kv_heads, split

HEAD_BITS = 8
"""Bits of the projection to the vocabulary where weights have 8 or 4: its error goes straight to the tokens."""


@dataclass(frozen=True)
class Weight:
    """One tensor of a checkpoint: its whole `shape`, and `target`, where this rank's part of it goes, which begins at
    index `start` of dimension `dim`."""

    shape: tuple[int, ...]
    target: torch.Tensor | MatrixRows
    dim: int = 0
    start: int = 0

    @property
    def rows(self) -> range:
        """Rows of the tensor that this rank holds, all of them or some of each."""
        return range(self.shape[0]) if self.dim else range(self.start, self.start + self.target.shape[0])

    def write(self, first: int, values: torch.Tensor) -> None:
        """Rows `[n, ...]` of the whole tensor, from row `first` on, all of which this rank holds."""
        if self.dim:
            values = values.narrow(1, self.start, self.target.shape[1])
        self.write_part(first, values)

    def write_part(self, first: int, values: torch.Tensor | Integers) -> None:
        """This rank's part of these rows; of a quantized checkpoint, the integers."""
        row = first if self.dim else first - self.start
        if isinstance(self.target, torch.Tensor):
            assert isinstance(values, torch.Tensor)
            self.target[row : row + len(values)] = values
        elif isinstance(values, Integers):
            self.target.matrix.write_integers(self.target.first + row, values)
        else:
            self.target.matrix.write(self.target.first + row, values)


def whole(target: torch.Tensor) -> Weight:
    """A tensor that every rank holds completely."""
    return Weight(tuple(target.shape), target)


def row_part(total: int, target: MatrixRows, shard: Shard) -> Weight:
    """A tensor of `total` rows that are shared out among the ranks."""
    return Weight((total, target.shape[1]), target, 0, shard.rank * target.shape[0])


def vocab_part(vocab_size: int, matrix: LinearWeight, shard: Shard) -> Weight:
    """A tensor with a row for each token. Where the ranks do not divide the vocabulary, the last have rows to spare."""
    first = min(shard.rank * matrix.out_features, vocab_size)
    held = min(matrix.out_features, vocab_size - first)
    return Weight((vocab_size, matrix.in_features), MatrixRows(matrix, 0, held), 0, first)


class QKVLinear:
    """The projections to queries, keys and values as one product; heads are shared out, or repeated (`kv_heads`).

    The rows of the weight are those of the queries, keys and values, in this order.
    """

    def __init__(self, config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device) -> None:
        self.head_dim = config.head_dim
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
        found, row = {}, 0
        for (name, (total, first)), size in zip(self.heads.items(), self.sizes, strict=True):
            rows, start = total * self.head_dim, first * self.head_dim
            part = MatrixRows(self.weight, row, size)
            found[f"{prefix}.{name}_proj.weight"] = Weight((rows, self.weight.in_features), part, 0, start)
            if self.bias is not None:
                found[f"{prefix}.{name}_proj.bias"] = Weight((rows,), self.bias[row : row + size], 0, start)
            row += size
        return found

    def allocate(self, packing: Packing) -> None:
        self.weight.allocate(packing)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, hidden_size]` -> `[T, (query_heads + 2 * kv_heads) * head_dim]`."""
        return self.weight.multiply(x, self.bias)

    def forward_queries(self, x: torch.Tensor) -> torch.Tensor:
        """The queries of `forward`, without the work for keys and values: `[T, query_heads * head_dim]`."""
        size = self.sizes[0]
        return self.weight.first_rows(size).multiply(x, None if self.bias is None else self.bias[:size])


class MergedColumnLinear:
    """Projections of one input, equally wide, as one product; the rows of each are shared out."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        names: tuple[str, ...],
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shard = shard
        self.names = names
        self.out_features = out_features
        self.size = split(out_features, shard, "MLP columns")
        self.weight = LinearWeight(len(names) * self.size, in_features, dtype, device)

    def weights(self, prefix: str) -> dict[str, Weight]:
        return {
            f"{prefix}.{name}.weight": row_part(
                self.out_features, MatrixRows(self.weight, i * self.size, self.size), self.shard
            )
            for i, name in enumerate(self.names)
        }

    def allocate(self, packing: Packing) -> None:
        self.weight.allocate(packing)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, in_features]` -> `[T, len(names) * out_features / ranks]`, one projection after the other."""
        return self.weight.multiply(x)


class RowLinear:
    """A projection whose input columns are shared out: each rank computes one term of the sum."""

    def __init__(
        self, in_features: int, out_features: int, shard: Shard, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shard = shard
        self.in_features = in_features
        columns = split(in_features, shard, "input columns")
        self.weight = LinearWeight(out_features, columns, dtype, device)

    def weights(self, prefix: str) -> dict[str, Weight]:
        rows, columns = self.weight.out_features, self.weight.in_features
        part = MatrixRows(self.weight, 0, rows)
        return {f"{prefix}.weight": Weight((rows, self.in_features), part, 1, self.shard.rank * columns)}

    def allocate(self, packing: Packing) -> None:
        self.weight.allocate(packing)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, in_features / ranks]` -> `[T, out_features]`, summed over the ranks."""
        return self.shard.all_reduce(self.weight.multiply(x))


class VocabEmbedding:
    """The vectors of tokens; the vocabulary is shared out."""

    def __init__(
        self, vocab_size: int, hidden_size: int, shard: Shard, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shard = shard
        self.vocab_size = vocab_size
        self.size = -(-vocab_size // shard.world_size)
        self.weight = LinearWeight(self.size, hidden_size, dtype, device)

    def weights(self, prefix: str) -> dict[str, Weight]:
        return {f"{prefix}.weight": vocab_part(self.vocab_size, self.weight, self.shard)}

    def allocate(self) -> None:
        """Not packed, because its rows are only looked up."""
        self.weight.allocate(None)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 `[T]` -> `[T, hidden_size]`, a fresh tensor."""
        if self.shard.world_size == 1:
            return self.weight.rows(token_ids)
        local = token_ids - self.shard.rank * self.size
        elsewhere = (local < 0) | (local >= self.size)
        vectors = self.weight.rows(local.masked_fill_(elsewhere, 0))
        return self.shard.all_reduce(vectors.masked_fill_(elsewhere.unsqueeze(1), 0))


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

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[R, hidden_size]` -> logits `[R, vocab_size]`."""
        return self.shard.all_gather_last_dim(self.weight.multiply(hidden))[:, : self.vocab_size]


def rotary_table(config: ModelConfig, num_positions: int, device: torch.device) -> torch.Tensor:
    """Cosines, then sines, of the rotation angles: float32 `[num_positions, head_dim]`."""
    angles = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1) * rotary_frequencies(config)
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(device)


def rotary_frequencies(config: ModelConfig) -> torch.Tensor:
    """Rotation of each pair of channels from one position to the next, in radians: float32 `[head_dim / 2]`."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return _scale_frequencies(1.0 / config.rope_theta**exponents, config.rope_scaling)


def _scale_frequencies(frequencies: torch.Tensor, scaling: RopeScaling | None) -> torch.Tensor:
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Operation for operation as in transformers: at position 100,000 a rounding error in a frequency shows.
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((scaling.original_max_position_embeddings / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies
