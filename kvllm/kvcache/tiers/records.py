"""Blocks of a paged cache as records, one after the other, as tiers below the pool hold them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KVFormat
from kvllm.kvcache.quantize import codec

Records = tuple[torch.Tensor, ...]
"""Tensors `[count, ...]` that together make up `count` blocks."""
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Bytes are moved in the widest words that fit."""


class LostBlocksError(Exception):
    """A tier does not hold what was to be stored in it."""


class RecordLayout:
    """Packs blocks into records and back: all layers of a block at once, keys, values, their scales and scores.

    kv_format: keys and values are quantized to it on their way out, and are not exactly what they were when they
        return. None: records hold a block's bytes as they are. A quantized cache allows no other.
    """

    def __init__(self, shape: CacheShape, kv_format: KVFormat | None = None) -> None:
        assert kv_format is None or shape.kv_format is None, "it is quantized already"
        self.shape = shape
        formats = [kv_format.keys, kv_format.values][: 1 if shape.shared else 2] if kv_format else []
        self.codecs = [codec(each) for each in formats]
        slots = (shape.num_kv_heads, shape.block_size)
        self._sizes: list[tuple[torch.dtype, tuple[int, ...]]] = []
        self._words: list[torch.dtype] = []  # of each tensor of a cache
        if kv_format:
            for each in formats:
                self._sizes.append((torch.uint8, (shape.num_places, *slots, each.code_bytes(shape.head_dim))))
                self._sizes.append((torch.int32, (shape.num_places, *slots, 1)))
        else:
            for planes, vector_bytes in shape.plane_groups:
                plane_bytes = prod(slots) * vector_bytes
                word = next(word for word in WORDS if plane_bytes % word.itemsize == 0)
                self._words.append(word)
                self._sizes.append((word, (shape.num_places, planes, plane_bytes // word.itemsize)))
        if shape.scored:
            self._sizes.append((torch.float32, (shape.num_places, shape.num_kv_heads, shape.block_size)))

    @property
    def record_bytes(self) -> int:
        """Bytes of one block."""
        return sum(dtype.itemsize * prod(size) for dtype, size in self._sizes)

    def allocate(self, count: int, device: torch.device | str = "cpu", *, pinned: bool = False) -> Records:
        """Room for `count` records."""
        return tuple(
            torch.empty((count, *size), dtype=dtype, device=device, pin_memory=pinned) for dtype, size in self._sizes
        )

    def pack(self, cache: PagedKVCache, blocks: torch.Tensor, records: Records) -> None:
        """Write blocks, int64 `[count]`, to records on the cache's device."""
        if self.codecs:
            for plane, codec, room in zip(cache.planes, self.codecs, (records[:2], records[2:4]), strict=False):
                quantized = codec.quantize(plane.parts[0].movedim(1, 0)[blocks])
                for part, made in zip(room, quantized, strict=True):
                    part.copy_(made)
        else:
            for words, record in zip(self._words_of(cache), records, strict=False):
                torch.index_select(words.movedim(2, 0), 0, blocks, out=record)
        if cache.scores is not None:
            torch.index_select(cache.scores.movedim(1, 0), 0, blocks, out=records[-1])

    def unpack(self, records: Records, cache: PagedKVCache, blocks: torch.Tensor) -> None:
        """Write records, on the cache's device, to blocks, int64 `[count]`."""
        if self.codecs:
            quantized = zip(cache.planes, self.codecs, (records[:2], records[2:4]), strict=False)
            for plane, codec, (codes, scales) in quantized:
                vectors = plane.parts[0].movedim(1, 0)
                vectors[blocks] = codec.dequantize(codes, scales).to(vectors.dtype)
        else:
            for words, record in zip(self._words_of(cache), records, strict=False):
                words.movedim(2, 0)[blocks] = record
        if cache.scores is not None:
            cache.scores.movedim(1, 0)[blocks] = records[-1]

    def to_bytes(self, records: Sequence[torch.Tensor], index: int) -> bytes:
        """One record, on the CPU, as `record_bytes` bytes."""
        return b"".join(part[index].reshape(-1).view(torch.uint8).numpy().tobytes() for part in records)

    def from_bytes(self, contents: Sequence[bytes]) -> Records:
        """The inverse of `to_bytes`, for several records."""
        records = self.allocate(len(contents))
        for i, content in enumerate(contents):
            left = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            for part in records:
                num_bytes = part[i].numel() * part.itemsize
                part[i].view(-1).view(torch.uint8).copy_(left[:num_bytes])
                left = left[num_bytes:]
        return records

    def _words_of(self, cache: PagedKVCache) -> list[torch.Tensor]:
        """`[places, planes, blocks, words]` of each tensor of a cache, views."""
        pairs = zip(cache.tensors, self._words, strict=True)
        return [tensor.view(torch.uint8).flatten(3).view(word) for tensor, word in pairs]
