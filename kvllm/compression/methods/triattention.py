"""TriAttention (Mao et al., arXiv 2604.04921): keep the keys at distances that queries prefer, and long keys.

Before the rotation, the queries of a head lie around a centre. The attention that such a query pays to a key is a sum
of cosines of their distance, one for each pair of channels that turns together. It is averaged over positions ahead
that double from one to the next. Where queries lie less close to the centre, the length of the key counts instead. The
centres come from a text on which the model was calibrated.

The scores of each query head are standardized, and the highest of a KV head's query heads decides.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvllm.compression.methods.token2chunk import top_indices
from kvllm.compression.precision import no_tf32
from kvllm.compression.region import everything, keeps_everything, with_buffer
from kvllm.compression.rotation import mean_rotation, pair_lengths, rotate
from kvllm.compression.statistics import QueryStatistics


def select(
    queries: Tensor | None,
    keys: Tensor,
    *,
    retain: int,
    buffer: int,
    last_positions: Sequence[int],
    frequencies: Tensor,
    statistics: QueryStatistics,
    future: int = 65536,
) -> Tensor:
    """Choose the KV pairs of a region to keep, as `registry.Method` says.

    Args:
        keys: `[layers * S, Hkv, C, d]`, of sequences in one layer after the other. The buffer is never scored.
        statistics: of the layers, for the query heads of these KV heads.
        future: the farthest position ahead; 1, 2, 4, 8 and so on up to it count alike.
    """
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    ahead = 2 ** torch.arange(future.bit_length(), device=keys.device)
    scored = keys[:, :, : keys.shape[2] - buffer].unflatten(0, (len(statistics.mean), -1))
    of_sequences = []
    for i in range(scored.shape[1]):  # whose products must not depend on the others
        cos, sin = mean_rotation(last_positions[i] + 1 + ahead, frequencies)
        of_sequences.append(scores(scored[:, i], statistics, cos, sin))
    found = torch.stack(of_sequences, dim=1).flatten(0, 1)
    return with_buffer(top_indices(found, retain - buffer), keys, buffer)


@torch.no_grad()
@no_tf32()
def scores(keys: Tensor, statistics: QueryStatistics, cos: Tensor, sin: Tensor) -> Tensor:
    """Standardized scores of one sequence's keys, the highest of each KV head's query heads.

    A sum of `|q| |k| cos(frequency * distance + phase)` over pairs of channels, for a centre q and a key k, is the
    product of the rotated centre and the rotated key; so the positions of keys need not be known.

    Args:
        keys: `[layers, Hkv, n, d]`, rotated.
        cos: `[d / 2]`, means over the positions ahead.
        sin: the same.

    Returns:
        float32 `[layers, Hkv, n]`.
    """
    num_layers, num_kv_heads = keys.shape[:2]
    keys = keys.float().flatten(0, 1)
    centres = rotate(statistics.mean, cos, sin).view(len(keys), -1, keys.shape[2])
    spread = (statistics.magnitude - pair_lengths(statistics.mean)).view(len(keys), -1, keys.shape[2] // 2)
    of_heads = torch.bmm(centres, keys.mT) + torch.bmm(spread, pair_lengths(keys).mT)
    centred = of_heads - of_heads.mean(dim=-1, keepdim=True)
    highest = (centred / of_heads.std(dim=-1, correction=0, keepdim=True).clamp(min=1e-6)).amax(dim=1)
    return highest.unflatten(0, (num_layers, num_kv_heads))
