"""The interface of the operations that move KV pairs, whatever computes attention over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

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
            after what it sees.
        """
        heads = self.cache.shape.num_kv_heads
        of_heads = queries.float().unflatten(2, (heads, -1)).transpose(1, 2).flatten(2, 3)
        size = block_tables.shape[1] * self.cache.shape.block_size
        keys = self._gather(0, [layer], block_tables, size, torch.float32)
        # A product of four dimensions is slow on a CPU: with few queries it takes several times as long.
        scores = torch.bmm(of_heads.flatten(0, 1) * scale, keys.flatten(0, 1).mT).unflatten(0, keys.shape[:2])
        last = last_kv_index.repeat_interleave(queries.shape[2] // heads, dim=1)[:, None, :, None]
        return scores.masked_fill_(torch.arange(keys.shape[2], device=last.device) > last, -torch.inf)

    def gather_keys(self, layers: Sequence[int], block_tables: torch.Tensor, size: int) -> torch.Tensor:
        """The first `size` keys of each of S tables, as attention sees them, a copy.

        layers: some that follow each other in a part of a KV group. block_tables: int32 `[S, n]`.

        Returns:
            `[layers * S, kv_heads, size, head_dim]` of the shape's dtype, the tables in the first layer before those in
            the next.
        """
        return self._gather(0, layers, block_tables, size, self.cache.shape.dtype)

    def gather_values(self, layers: Sequence[int], block_tables: torch.Tensor, size: int) -> torch.Tensor:
        """Values; arguments and result as for `gather_keys`."""
        return self._gather(1, layers, block_tables, size, self.cache.shape.dtype)

    def value_norms(self, layers: Sequence[int], block_tables: torch.Tensor, size: int) -> torch.Tensor:
        """Lengths of the values that `gather_values` finds: float32 `[layers * S, kv_heads, size]`."""
        stored, places = self.cache.planes[1], self._places(layers)
        return stored.norms([self._gather_slots(part[places], block_tables, size) for part in stored.parts])

    def gather_scores(self, layers: Sequence[int], block_tables: torch.Tensor, size: int) -> torch.Tensor:
        """The scores beside the keys that `gather_keys` finds: float32 `[layers * S, kv_heads, size]`."""
        assert self.cache.scores is not None
        of_layers = self.cache.scores[self._places(layers)].unsqueeze(-1)
        return self._gather_slots(of_layers, block_tables, size).squeeze(-1)

    def _gather(
        self, plane: int, layers: Sequence[int], block_tables: torch.Tensor, size: int, dtype: torch.dtype
    ) -> torch.Tensor:
        stored, places = self.cache.planes[plane], self._places(layers)
        return stored.decode([self._gather_slots(part[places], block_tables, size) for part in stored.parts], dtype)

    def _places(self, layers: Sequence[int]) -> slice:
        return slice(self.cache.place(layers[0]), self.cache.place(layers[-1]) + 1)

    def _gather_slots(self, of_layers: torch.Tensor, block_tables: torch.Tensor, size: int) -> torch.Tensor:
        """`[layers, blocks, kv_heads, block_size, width]` -> `[layers * S, kv_heads, size, width]`."""
        found = of_layers[:, block_tables.long()].transpose(2, 3).flatten(3, 4)
        return found[:, :, :, :size].flatten(0, 1)
