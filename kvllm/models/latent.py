"""The sizes of latent attention, read from `config.json`. Free of torch."""

from __future__ import annotations

import msgspec


class Latent(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of latent attention.

    query_rank: of the latent from which queries are made; None: they are made from the layer's input.
    rank: of the latent of keys and values. plain, rotated: channels of a query head without and with RoPE.
    value: channels of a head of values.
    """

    query_rank: int | None
    rank: int
    plain: int
    rotated: int
    value: int

    def weights(self, hidden_size: int, query_heads: int) -> tuple[int, int]:
        """Weights that make a layer's queries, and all that a token is multiplied with around attention."""
        heads = query_heads * (self.plain + self.rotated)
        queries = hidden_size * heads if self.query_rank is None else self.query_rank * (hidden_size + heads)
        queries += query_heads * self.plain * self.rank
        others = hidden_size * (self.rank + self.rotated) + query_heads * self.value * (self.rank + hidden_size)
        return queries, queries + others
