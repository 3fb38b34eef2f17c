"""The last KV pairs of each running sequence as they were before a quantized cache rounded them.

The cache holds all pairs as codes, these too, so blocks, prefixes and compactions know nothing of them. They are copies
beside it, which attention reads in place of the codes. A pair is held by its position in the text, which no compaction
changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class ResidualStep:
    """What the attention of one step reads and writes.

    pairs: `[layers, 2, num_slots, size, kv_heads, head_dim]`, keys before values, of the dtype of activations. The pair
        of position p is in row `p % size` of its sequence's slot.
    positions: int64 `[T]`, of the query tokens. slots: int32 `[S]`, of the sequences. first: int32 `[S]`, the positions
        from which on their pairs are held.
    new_pairs: keys and values of the step's tokens in the layer that was stored last, `[T, kv_heads, head_dim]` each.
    """

    pairs: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    first: torch.Tensor
    new_pairs: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, init=False)
