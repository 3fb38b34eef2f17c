"""Random choice: the baseline that any method has to beat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvllm.compression.methods.token2chunk import top_indices
from kvllm.compression.region import everything, keeps_everything, with_buffer


def select(
    queries: Tensor | None, keys: Tensor, *, retain: int, buffer: int, seeds: Sequence[int], layer: int
) -> Tensor:
    """Keep random KV pairs of a region, independently for every KV head; the same ones on any device.

    seeds: the same seed draws the same offsets of a region of the same length. layer: makes the layers of a sequence
    differ.
    """
    num_seqs, num_kv_heads, length, _ = keys.shape
    if len(seeds) != num_seqs:
        raise ValueError(f"{len(seeds)} seeds for {num_seqs} sequences: give one for each")
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    lots = [np.random.default_rng((seed, layer)).random((num_kv_heads, length - buffer)) for seed in seeds]
    kept = top_indices(torch.from_numpy(np.stack(lots)), retain - buffer).to(keys.device)
    return with_buffer(kept, keys, buffer)
