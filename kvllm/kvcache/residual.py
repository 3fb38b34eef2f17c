"""The last KV pairs of each running sequence as they were before a quantized cache rounded them.

The cache holds all pairs as codes, these too, so blocks, prefixes and compactions know nothing of them. They are copies
beside it, which attention reads in place of the codes. A pair is held by its position in the text, which no compaction
changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from kvllm.kvcache.cache import CacheShape


@dataclass
class ResidualStep:
    """What the attention of one step reads and writes.

    pairs: `KVResidual.pairs`. positions: int64 `[T]`, of the query tokens. slots: int32 `[S]`, of the sequences. first:
    int32 `[S]`, the positions from which on their pairs are held.
    held: keys and values of the step's tokens in the layer that was stored last, `[T, kv_heads, head_dim]` each.
    """

    pairs: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    first: torch.Tensor
    held: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, init=False)


class KVResidual:
    """Room for the last `size` KV pairs of each sequence, in every layer.

    pairs: `[layers, 2, num_slots, size, kv_heads, head_dim]`, keys before values, of the dtype of activations. The pair
        of position p is in row `p % size`.
    first: int32 `[num_slots]`, on the host: the position from which on a sequence's pairs are held. What lies before it
        was found in the prefix cache.
    """

    def __init__(self, shape: CacheShape, size: int, num_slots: int) -> None:
        rows = (shape.num_layers, 2, num_slots, size, shape.num_kv_heads, shape.head_dim)
        self.pairs = torch.zeros(rows, dtype=shape.dtype)
        self.first = np.zeros(num_slots, dtype=np.int32)

    @staticmethod
    def bytes_for(shape: CacheShape, size: int, num_slots: int) -> int:
        vectors = shape.num_layers * 2 * num_slots * size * shape.num_kv_heads
        return vectors * shape.head_dim * shape.dtype.itemsize

    def clear(self, table_slot: int) -> None:
        self.first[table_slot] = 0

    def start(self, table_slot: int, position: int) -> None:
        """The next token of a sequence is at `position`, and none of the pairs before it is held."""
        self.first[table_slot] = position

    def copy(self, source: int, table_slot: int) -> None:
        self.first[table_slot] = self.first[source]
        self.pairs[:, :, table_slot] = self.pairs[:, :, source]

    def save(self, table_slot: int) -> tuple[int, torch.Tensor]:
        """All that is known of a sequence, for `restore`."""
        return int(self.first[table_slot]), self.pairs[:, :, table_slot].clone()

    def restore(self, table_slot: int, saved: tuple[int, torch.Tensor]) -> None:
        self.first[table_slot], self.pairs[:, :, table_slot] = saved

    def step(self, table_slots: np.ndarray, positions: torch.Tensor) -> ResidualStep:
        """Of the sequences in `table_slots`, whose query tokens are at `positions`."""
        slots = torch.from_numpy(table_slots.astype(np.int32))
        return ResidualStep(self.pairs, positions, slots, torch.from_numpy(self.first[table_slots]))
