"""H2O (Zhang et al., arXiv 2306.14048): keep the last KV pairs and those that all queries so far attended to most.

The mass of a KV pair starts at 0 and grows, with its own query token and every later one, by what
`mass.attention_mass` returns. It moves with the KV pair when a compression moves that, and no compression resets it.
"""

from __future__ import annotations

from torch import Tensor

from kvllm.compression.methods.token2chunk import top_indices
from kvllm.compression.paged_keys import Keys
from kvllm.compression.region import everything, keeps_everything, with_buffer


def select(queries: Tensor | None, keys: Keys, *, retain: int, buffer: int, mass: Tensor) -> Tensor:
    """Choose the KV pairs of a region to keep, as `registry.Method` says. The paper's `buffer` is half of `retain`."""
    if mass.shape != keys.shape[:3]:
        raise ValueError(f"mass {tuple(mass.shape)} must be [S, Hkv, C] for keys {tuple(keys.shape)}")
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    return with_buffer(top_indices(mass[..., : keys.shape[2] - buffer], retain - buffer), keys, buffer)
