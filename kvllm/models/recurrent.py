"""The sizes of layers that hold a recurrent state in the place of KV pairs, read from `config.json`. Free of torch."""

from __future__ import annotations

import msgspec

from kvllm.errors import CheckpointError

LARGEST = {"key_heads": 1 << 11, "value_heads": 1 << 11, "key_dim": 1 << 10, "value_dim": 1 << 10, "taps": 1 << 5}
"""Bounds of sizes, far above those of any published model."""


class RecurrentLayers(msgspec.Struct, frozen=True, kw_only=True):
    """Gated DeltaNet layers.

    indices: of these layers among all of the decoder.
    key_heads, value_heads: of a layer, in the whole model; each key head is that of `value_heads // key_heads` value
        heads. key_dim, value_dim: numbers of a head. taps: tokens that the convolution before them sees.
    """

    indices: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: those of queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def check(self) -> None:
        """Raise CheckpointError for sizes that cannot be."""
        for name, most in LARGEST.items():
            size, least = getattr(self, name), 2 if name == "taps" else 1
            if not least <= size <= most:
                raise CheckpointError(f"{name} of linear attention is {size}, but must be {least} to {most}")
        if self.value_heads % self.key_heads:
            raise CheckpointError(
                f"linear_num_value_heads {self.value_heads} is not a multiple of linear_num_key_heads {self.key_heads}"
            )
