"""The paged KV cache: one allocation for all layers, and its slot arithmetic.

Layout `[places, 2, blocks, kv_heads, block_size, head_dim]`: the vectors of one head in one block are contiguous, so a
decode kernel streams them, and a compaction moves each head on its own. A slot is `block * block_size + offset`. A
block has a place for each layer that it holds: all layers of the model, or those of a part of a KV group.

In a quantized cache the last dimension is the bytes of a vector with its scale, and the bytes of one head in one block
are the codes of all its vectors, then their scales. Keys and values of different formats have different widths, and lie
one after the other: `[places, 1, blocks, kv_heads, block_size, width]` each. Where values are the keys, there is one
such tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from kvllm.kvcache.formats import KVFormat
from kvllm.kvcache.quantize import Codec, codec
from kvllm.kvcache.recurrent import StateShape
from kvllm.memory_pages import use_huge_pages
from kvllm.quantized_vectors import SCALE_BYTES


@dataclass(frozen=True)
class CacheShape:
    """Sizes of what one rank stores for each token: enough to size the pool before anything is allocated.

    dtype: of keys and values outside of the cache. kv_format: of those in it; None: the same.
    scored: every KV pair has a float32 score beside it, in each layer and head.
    places: where in a block each layer lies; layers of different parts share places. None given: each has its own.
    recurrent: of the layers that hold a state for each sequence, beside the pool.
    shared: values are the keys, and stored once. A kv_format has the same format for both.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    scored: bool = False
    kv_format: KVFormat | None = None
    places: tuple[int, ...] = ()
    recurrent: StateShape | None = None
    shared: bool = False

    @property
    def rotated(self) -> bool:
        """Whether keys and values are multiplied with a Hadamard matrix before they are stored."""
        return self.kv_format is not None and self.kv_format.keys.rotated

    @property
    def num_places(self) -> int:
        return max(self.places) + 1 if self.places else self.num_layers

    @property
    def plane_groups(self) -> tuple[tuple[int, int], ...]:
        """Planes, of keys and of values, that share a tensor, and bytes of a vector in them, with its scale."""
        planes = 1 if self.shared else 2
        if self.kv_format is None:
            return ((planes, self.head_dim * self.dtype.itemsize),)
        keys, values = (each.vector_bytes(self.head_dim) for each in (self.kv_format.keys, self.kv_format.values))
        return ((planes, keys),) if self.kv_format.keys == self.kv_format.values else ((1, keys), (1, values))

    @property
    def vector_bytes(self) -> tuple[int, int]:
        """Bytes of a key and of a value of one token and one head, each with its scale."""
        groups = self.plane_groups
        return groups[0][1], groups[-1][1]

    @property
    def pair_bytes(self) -> int:
        """Bytes of the key and the value of one token and one head, with their scales."""
        return sum(planes * vector_bytes for planes, vector_bytes in self.plane_groups)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block with all its places: keys, values, their scales and scores."""
        return self.num_places * self.num_kv_heads * self.block_size * (self.pair_bytes + (4 if self.scored else 0))


@dataclass(frozen=True)
class Plane:
    """The keys, or the values, of all places.

    parts: views `[places, blocks, kv_heads, block_size, width]` that together make up a vector in any slot: codes and
        scale, or the vector itself.
    """

    parts: tuple[torch.Tensor, ...]
    codec: Codec | None

    def encode(self, vectors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Vectors `[..., head_dim]` as the parts hold them: `[..., width]` of each."""
        return self.codec.quantize(vectors) if self.codec else (vectors,)

    def decode(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The inverse of `encode`, `[..., head_dim]` of `dtype`: what quantization lost stays lost."""
        return (self.codec.dequantize(*parts) if self.codec else parts[0]).to(dtype)

    def norms(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Lengths of vectors in the parts, float32 `[...]`. A rotation leaves them as they are."""
        return self.codec.norms(*parts) if self.codec else torch.linalg.vector_norm(parts[0].float(), dim=-1)


class PagedKVCache:
    """Keys (after RoPE) and values of all layers, addressed by block id. What a block holds of a layer is of no meaning
    unless the block belongs to the layer's part.

    The tensor is allocated with `torch.empty`: slots that no sequence's cached length covers hold garbage, and no
    kernel may read them into a result.

    data: the whole of it, as the layout has it; bytes where it is quantized, in one row where widths differ.
    tensors: views of it, `[places, planes, blocks, kv_heads, block_size, width]`: one with the planes of keys and of
        values, or one for each; with a single plane where values are the keys. The dtype is the shape's, or
        tells the format (`kvllm.kvcache.quantize`).
    parts: views of those, in which a slot is contiguous: codes, scales, or vectors. What moves a pair moves all parts.
    planes: keys, and values.
    scores: float32 `[places, blocks, kv_heads, block_size]`, if the shape has them.
    """

    def __init__(self, shape: CacheShape, num_blocks: int, device: torch.device | str = "cpu") -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        kv_format = shape.kv_format
        codecs = (codec(kv_format.keys), codec(kv_format.values)) if kv_format else (None, None)
        dtypes = [each.storage if each else shape.dtype for each in codecs]
        self.data, self.tensors = self._allocate(dtypes, device)
        parts = [self._parts_of(tensor) for tensor in self.tensors]
        self.parts = tuple(part for of_tensor in parts for part in of_tensor)
        self.planes = (
            Plane(tuple(part[:, 0] for part in parts[0]), codecs[0]),
            Plane(tuple(part[:, -1] for part in parts[-1]), codecs[1]),
        )
        self.scores: torch.Tensor | None = None
        if shape.scored:
            size = (shape.num_places, num_blocks, shape.num_kv_heads, shape.block_size)
            self.scores = torch.empty(size, dtype=torch.float32, device=device)

    def _allocate(
        self, dtypes: Sequence[torch.dtype], device: torch.device | str
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """`data` and `tensors`, from the dtypes of keys and of values."""
        shape, groups = self.shape, self.shape.plane_groups
        sizes = [
            (shape.num_places, planes, self.num_blocks, shape.num_kv_heads, shape.block_size, vector_bytes)
            for planes, vector_bytes in groups
        ]
        if len(groups) == 1:
            size, dtype = (*sizes[0][:-1], sizes[0][-1] // dtypes[0].itemsize), dtypes[0]
            data = torch.empty(size, dtype=torch.uint8 if shape.kv_format else dtype, device=device)
            return use_huge_pages(data), (data.view(dtype),)
        lengths = [prod(size) for size in sizes]
        data = use_huge_pages(torch.empty(sum(lengths), dtype=torch.uint8, device=device))
        pieces = zip(data.split(lengths), dtypes, sizes, strict=True)
        return data, tuple(piece.view(dtype).view(size) for piece, dtype, size in pieces)

    def _parts_of(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`[places, planes, blocks, kv_heads, block_size, width]`, views."""
        if self.shape.kv_format is None:
            return (tensor,)
        block_size, code_bytes = self.shape.block_size, tensor.shape[-1] - SCALE_BYTES
        of_heads = tensor.view(torch.uint8).flatten(4)
        codes = of_heads[..., : block_size * code_bytes].unflatten(-1, (block_size, code_bytes))
        return codes, of_heads[..., block_size * code_bytes :].view(torch.int32).unsqueeze(-1)

    def keys(self, layer: int) -> torch.Tensor:
        """`[blocks, kv_heads, block_size, width]`, a view."""
        return self.tensors[0][self.place(layer), 0]

    def values(self, layer: int) -> torch.Tensor:
        """`[blocks, kv_heads, block_size, width]`, a view."""
        return self.tensors[-1][self.place(layer), -1]

    def scores_of(self, layer: int) -> torch.Tensor | None:
        """float32 `[blocks, kv_heads, block_size]`, a view, if there are scores."""
        return None if self.scores is None else self.scores[self.place(layer)]

    def place(self, layer: int) -> int:
        """Where in a block a layer lies."""
        return self.shape.places[layer] if self.shape.places else layer
