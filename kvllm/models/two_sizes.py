"""The sizes of layers whose heads have two sizes, and some of which have no KV pairs of their own (Gemma 4). Free of
torch."""

from __future__ import annotations

import msgspec


class HeadSizes(msgspec.Struct, frozen=True, kw_only=True):
    """KV heads of a layer, in the whole model, and numbers of each of its heads."""

    kv_heads: int
    head_dim: int


class TwoSizes(msgspec.Struct, frozen=True, kw_only=True):
    """The layers of a decoder with heads of two sizes. The cache has one, into which the pairs of both fit.

    full, sliding: of layers without a window, and of those with one. slides: of each layer, whether it is one of these.
    sources: of each layer, whose KV pairs it attends, a number among the layers that have some: the first ones, each
        its own.
    keys_are_values: values of full layers are their keys, before norms and RoPE.
    wide: the MLPs of layers without KV pairs are twice as wide.
    input_size: numbers that each layer gets of each token beside the residual; 0: none. input_vocab_size: tokens that
        have some.
    """

    full: HeadSizes
    sliding: HeadSizes
    slides: tuple[bool, ...]
    sources: tuple[int, ...]
    keys_are_values: bool = False
    wide: bool = False
    input_size: int = 0
    input_vocab_size: int = 0

    @property
    def shares(self) -> bool:
        """Whether some layers attend the KV pairs of others."""
        return len(set(self.sources)) < len(self.sources)

    @property
    def cached(self) -> HeadSizes:
        """The size in the cache. As many small heads lie in the place of a large one as have room, where that needs no
        more places than the large ones; else one."""
        packed = self.full.head_dim // self.sliding.head_dim
        places = self.sliding.kv_heads
        if places % packed == 0 and places // packed >= self.full.kv_heads:
            places //= packed
        return HeadSizes(kv_heads=max(places, self.full.kv_heads), head_dim=self.full.head_dim)
