"""The sizes of layers that hold a recurrent state in the place of KV pairs, read from `config.json`. Free of torch."""

from __future__ import annotations

import msgspec

from kvllm.errors import CheckpointError

LARGEST = {"key_heads": 1 << 11, "value_heads": 1 << 11, "key_dim": 1 << 10, "value_dim": 1 << 10}
"""Bounds of sizes, far above those of any published model."""
MOST_TAPS = 1 << 5


class RecurrentLayers(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of short convolutions, whose state is their last inputs; in Gated DeltaNet and Mamba-2, a matrix of each
    head as well.

    indices: of these layers among all of the decoder. taps: tokens that the convolution sees. channels: of it, in the
        whole model.
    key_heads, value_heads: of a layer of Gated DeltaNet, in the whole model; each key head is that of
        `value_heads // key_heads` value heads. 0: there are none. key_dim, value_dim: numbers of a head. In Mamba-2,
        key heads are the groups, which several ranks may hold, and value heads the heads.
    """

    indices: tuple[int, ...]
    taps: int
    channels: int
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0

    def channels_of(self, num_ranks: int) -> int:
        """Channels on each of so many ranks."""
        if not self.key_heads:
            return self.channels // num_ranks
        keys = max(1, self.key_heads // num_ranks) * self.key_dim
        return 2 * keys + self.value_heads // num_ranks * self.value_dim

    def check(self) -> None:
        """Raise CheckpointError for sizes that cannot be."""
        if not 2 <= self.taps <= MOST_TAPS:
            raise CheckpointError(f"a convolution sees {self.taps} tokens, but must see 2 to {MOST_TAPS}")


def delta_layers(
    indices: tuple[int, ...],
    taps: int,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    what: str = "linear attention",
) -> RecurrentLayers:
    """Layers of Gated DeltaNet, whose channels are those of queries, keys and values of all heads. what: their name in
    messages.

    Raises CheckpointError for sizes that cannot be.
    """
    sizes = {"key_heads": key_heads, "value_heads": value_heads, "key_dim": key_dim, "value_dim": value_dim}
    for name, size in sizes.items():
        if not 1 <= size <= LARGEST[name]:
            raise CheckpointError(f"{name} of {what} is {size}, but must be 1 to {LARGEST[name]}")
    if value_heads % key_heads:
        raise CheckpointError(
            f"linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}"
        )
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return RecurrentLayers(indices=indices, taps=taps, channels=channels, **sizes)
