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

    def key_scores(
        self, layer: int, queries: torch.Tensor, block_tables: torch.Tensor, last_kv_index: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Scores of each sequence's query tokens with its keys, as attention has them in front of a soft cap.

        queries: `[S, T, query_heads, head_dim]` of the shape's dtype. block_tables: int32 `[S, n]`. last_kv_index:
            int32 `[S, T]`, the last KV pair that each query token sees, -1 for none.

        Returns:
            float32 `[S, kv_heads, T * group, n * block_size]`, the heads of a query token beside each other, -inf
            behind what it sees.
        """
        heads = self.cache.shape.num_kv_heads
        of_heads = queries.float().unflatten(2, (heads, -1)).transpose(1, 2).flatten(2, 3)
        keys = self._gather(layer, 0, block_tables, torch.float32)
        # A product of four dimensions is slow on a CPU: with few queries it takes several times as long.
        scores = torch.bmm(of_heads.flatten(0, 1) * scale, keys.flatten(0, 1).mT).unflatten(0, keys.shape[:2])
        last = last_kv_index.repeat_interleave(queries.shape[2] // heads, dim=1)[:, None, :, None]
        return scores.masked_fill_(torch.arange(keys.shape[2], device=last.device) > last, -torch.inf)

    def gather_keys(self, layer: int, block_tables: torch.Tensor) -> torch.Tensor:
        """Keys of whole blocks, as attention sees them: int `[S, n]` block ids ->
        `[S, kv_heads, n * block_size, head_dim]` of the shape's dtype, a copy."""
        return self._gather(layer, 0, block_tables, self.cache.shape.dtype)

    def gather_values(self, layer: int, block_tables: torch.Tensor) -> torch.Tensor:
        """Values of whole blocks; arguments and result as for `gather_keys`."""
        return self._gather(layer, 1, block_tables, self.cache.shape.dtype)

    def _gather(self, layer: int, plane: int, block_tables: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        blocks = block_tables.long()
        stored, place = self.cache.planes[plane], self.cache.place(layer)
        rows = [part[place][blocks].transpose(1, 2).flatten(2, 3) for part in stored.parts]
        return stored.decode(rows, dtype)
