"""Sets of tokens as bits: token t is bit t % 32 of word t // 32, uint32 `[ceil(V / 32)]`, as llguidance has them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np


def pack(token_ids: Sequence[int], vocab: int) -> np.ndarray:
    """The set of some tokens below `vocab`."""
    listed = np.zeros(-(-vocab // 32) * 32, dtype=bool)
    listed[:vocab][token_ids] = True
    return np.packbits(listed, bitorder="little").view(np.uint32)


@lru_cache(maxsize=8)
def all_tokens(vocab: int) -> np.ndarray:
    """The set of all tokens, not to be changed."""
    return pack(range(vocab), vocab)


def unpack(words: np.ndarray) -> np.ndarray:
    """Sets `[..., W]` -> whether each token is in them, bool `[..., 32 * W]`."""
    return np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").view(np.bool_)
