"""Kara with keys that differ counted higher (ours): the attention an entry receives, times how distinct its key is.

Of entries that receive like attention, those whose keys resemble the window's mean are words that occur again and
again; a fact is said once. KeyDiff (Park et al., arXiv 2504.15364) selects by that alone; here it is a weight between
1, for a key like the mean, and 3, for its opposite.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvllm.attention.compression import kara
from kvllm.attention.compression.precision import no_tf32
from kvllm.attention.compression.region import everything, keeps_everything, with_buffer
from kvllm.attention.compression.token2chunk import expand


def select(queries: Tensor, keys: Tensor, *, retain: int, buffer: int, chunk_budget: int, max_chunk: int) -> Tensor:
    """Choose the pairs of a window to keep, per sequence and KV head. Arguments and result as for Kara."""
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    scores = kara.scores(queries, keys, buffer)
    weights = torch.stack([distinctness(of_sequence) for of_sequence in keys])
    kept = expand(scores * weights[:, :, : scores.shape[2]], retain - buffer, chunk_budget, max_chunk)
    return with_buffer(kept, keys, buffer)


@torch.no_grad()
@no_tf32()
def distinctness(keys: Tensor) -> Tensor:
    """2 minus the product of each unit key with the mean of all unit keys of its head.

    Args:
        keys: `[Hkv, W, d]`, rotated, bfloat16 or float32.

    Returns:
        float32 `[Hkv, W]`, between 1 and 3.
    """
    unit = normalize(keys.float(), dim=-1)
    return 2 - (unit @ unit.mean(dim=1).unsqueeze(-1)).squeeze(-1)
