"""The interface of the operations that move KV pairs, whatever computes attention over them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from kvllm.kvcache.cache import PagedKVCache


class KVOperations(ABC):
    """Moves KV pairs into, within and out of one `PagedKVCache`; within it, bit for bit. See
    `registry.make_operations`."""

    reads_blocks: bool = False
    """Whether kernels can read the cache's keys as `PagedKeys`."""

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache = cache
        self.keys = [cache.keys(layer) for layer in range(cache.shape.num_layers)]
        self.values = [cache.values(layer) for layer in range(cache.shape.num_layers)]

    @abstractmethod
    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Write new KV pairs of one layer to their slots.

        keys, values: `[T, kv_heads, head_dim]` of the shape's dtype, may be strided views; a quantized cache rounds
        them here, and nowhere else. slot_mapping: int64 `[T]`, each slot at most once; a pair whose slot is negative is
        skipped.
        """

    @abstractmethod
    def copy_blocks(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copy whole blocks in all layers, keys and values: int64 `[n]` ids. No id is both source and destination."""

    @abstractmethod
    def compact(self, kept: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Move surviving KV pairs to the front of a region in every layer of a part of a KV group.

        kept: int64 `[layers, S, kv_heads, K]`, layers in the order of their places in a block; offsets into the source
            region (slot `o % block_size` of block `sources[s, o // block_size]`), strictly ascending; pair j goes to
            offset j of the destination region. Where heads keep different numbers of pairs, -1 fills up the end.
        sources: int64 `[S, source_blocks]`; destinations: int64 `[S, destination_blocks]`. Shorter regions are filled
            up at the end by any id that `kept` does not reach. In place means `destinations[s]` is a prefix of
            `sources[s]`; otherwise the two are disjoint. Regions of different sequences do not share destination
            blocks. Sequences are moved in order: a destination may be a source of a sequence before it.
        """

    def gather_keys(self, layer: int, block_tables: torch.Tensor) -> torch.Tensor:
        """Keys of whole blocks, as attention sees them: int `[S, n]` block ids ->
        `[S, kv_heads, n * block_size, head_dim]` of the shape's dtype, a copy."""
        return self._gather(layer, 0, block_tables)

    def gather_values(self, layer: int, block_tables: torch.Tensor) -> torch.Tensor:
        """Values of whole blocks; arguments and result as for `gather_keys`."""
        return self._gather(layer, 1, block_tables)

    def _gather(self, layer: int, plane: int, block_tables: torch.Tensor) -> torch.Tensor:
        blocks = block_tables.long()
        stored, place = self.cache.planes[plane], self.cache.place(layer)
        rows = [part[place][blocks].transpose(1, 2).flatten(2, 3) for part in stored.parts]
        return stored.decode(rows, self.cache.shape.dtype)
