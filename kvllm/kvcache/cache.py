"""The paged KV cache: one allocation for all layers, and its slot arithmetic.

Layout `[places, 2, blocks, kv_heads, block_size, head_dim]`: the vectors of one head in one block are contiguous, so a
decode kernel streams them, and a compaction moves each head on its own. A slot is `block * block_size + offset`. A
block has a place for each layer that it holds: all layers of the model, or those of a part of a KV group.

In a quantized cache the last dimension is the bytes of a vector with its scale, and the bytes of one head in one block
are the codes of all its vectors, then their scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvllm.kvcache.formats import KVFormat
from kvllm.kvcache.quantize import codec
from kvllm.memory_pages import use_huge_pages


@dataclass(frozen=True)
class CacheShape:
    """Sizes of what one rank stores for each token: enough to size the pool before anything is allocated.

    dtype: of keys and values outside of the cache. kv_format: of those in it; None: the same.
    scored: every KV pair has a float32 score beside it, in each layer and head.
    places: where in a block each layer lies; layers of different parts share places. None given: each has its own.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    scored: bool = False
    kv_format: KVFormat | None = None
    places: tuple[int, ...] = ()

    @property
    def num_places(self) -> int:
        return max(self.places) + 1 if self.places else self.num_layers

    @property
    def vector_bytes(self) -> int:
        """Bytes of the key, or the value, of one token and one head, with its scale."""
        return self.kv_format.vector_bytes(self.head_dim) if self.kv_format else self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block with all its places: keys, values, their scales and scores."""
        of_pair = 2 * self.vector_bytes + (4 if self.scored else 0)
        return self.num_places * self.num_kv_heads * self.block_size * of_pair


class PagedKVCache:
    """Keys (after RoPE) and values of all layers, addressed by block id. What a block holds of a layer is of no meaning
    unless the block belongs to the layer's part.

    The tensor is allocated with `torch.empty`: slots that no sequence's cached length covers hold garbage, and no
    kernel may read them into a result.

    data: the whole of it. Its dtype is the shape's, or tells the format (`kvllm.kvcache.quantize`).
    parts: views of it, `[places, 2, blocks, kv_heads, block_size, width]`, that together make up a vector in any slot:
        codes and scale, or the vector itself.
    scores: float32 `[places, blocks, kv_heads, block_size]`, if the shape has them.
    """

    def __init__(self, shape: CacheShape, num_blocks: int, device: torch.device | str = "cpu") -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.codec = codec(shape.kv_format) if shape.kv_format else None
        dtype = self.codec.storage if self.codec else shape.dtype
        width = shape.vector_bytes // dtype.itemsize
        size = (shape.num_places, 2, num_blocks, shape.num_kv_heads, shape.block_size, width)
        self.data = use_huge_pages(torch.empty(size, dtype=dtype, device=device))
        self.parts = self._parts()
        self.scores: torch.Tensor | None = None
        if shape.scored:
            size = (shape.num_places, num_blocks, shape.num_kv_heads, shape.block_size)
            self.scores = torch.empty(size, dtype=torch.float32, device=device)

    def _parts(self) -> tuple[torch.Tensor, ...]:
        if self.shape.kv_format is None:
            return (self.data,)
        block_size, code_bytes = self.shape.block_size, self.shape.kv_format.code_bytes(self.shape.head_dim)
        of_heads = self.data.view(torch.uint8).flatten(4)
        codes = of_heads[..., : block_size * code_bytes].unflatten(-1, (block_size, code_bytes))
        return codes, of_heads[..., block_size * code_bytes :].view(torch.int32).unsqueeze(-1)

    def keys(self, layer: int) -> torch.Tensor:
        """`[blocks, kv_heads, block_size, width]`, a view."""
        return self.data[self.place(layer), 0]

    def values(self, layer: int) -> torch.Tensor:
        """`[blocks, kv_heads, block_size, width]`, a view."""
        return self.data[self.place(layer), 1]

    def scores_of(self, layer: int) -> torch.Tensor | None:
        """float32 `[blocks, kv_heads, block_size]`, a view, if there are scores."""
        return None if self.scores is None else self.scores[self.place(layer)]

    def place(self, layer: int) -> int:
        """Where in a block a layer lies."""
        return self.shape.places[layer] if self.shape.places else layer

    def encode(self, vectors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Vectors `[..., head_dim]` as the parts hold them: `[..., width]` of each."""
        return self.codec.quantize(vectors) if self.codec else (vectors,)

    def decode(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The inverse of `encode`, `[..., head_dim]` of `dtype`: what quantization lost stays lost."""
        return (self.codec.dequantize(*parts) if self.codec else parts[0]).to(dtype)
