"""The scores of `kara_sharp`, predicted by a linear map that is learned while the engine runs (ours).

Computing the queries of a window again takes a pass of the model, and says which KV pairs were looked up and what these
are like. A ridge regression learns that from the first windows of an engine and from a few of the later ones, for each
layer and KV head, and all windows are compressed by what it predicts, those that it has just learned from, too. For the
others no pass is run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvllm.compression.linear_fit import LinearFit
from kvllm.compression.mass import PLAIN_SOFTMAX, Softmax
from kvllm.compression.methods import kara_sharp
from kvllm.compression.region import everything, keeps_everything
from kvllm.compression.rotation import pair_lengths, unrotate


def select(
    queries: Tensor | None,
    keys: Tensor,
    *,
    retain: int,
    buffer: int,
    chunk_budget: int,
    max_chunk: int,
    query_offsets: Tensor,
    value_norms: Tensor,
    last_positions: Sequence[int],
    frequencies: Tensor,
    fits: Sequence[LinearFit],
    softmax: Softmax = PLAIN_SOFTMAX,
) -> Tensor:
    """Choose the KV pairs of a region to keep, as `registry.Method` says.

    Args:
        queries: in one layer, as for `kara_sharp`, whose scores are learned from; or None, where nothing is to be
            learned.
        keys: of successive positions; without queries, of sequences in one layer after the other.
        chunk_budget, max_chunk: see `token2chunk`.
        fits: of each layer, for these KV heads. That of a call with queries learns.
    """
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    of_pairs = features(keys, value_norms, last_positions, frequencies)[:, :, : keys.shape[2] - buffer]
    if queries is not None:
        fits[0].add(of_pairs, kara_sharp.scores(queries, keys, buffer, query_offsets, softmax))
    rows = of_pairs.chunk(len(fits))
    looked_up = torch.cat([fit.predict(of_layer) for fit, of_layer in zip(fits, rows, strict=True)])
    both = kara_sharp.with_distinctness(looked_up, keys)
    return kara_sharp.choose(both, retain=retain, buffer=buffer, chunk_budget=chunk_budget, max_chunk=max_chunk)


def num_features(head_dim: int) -> int:
    """Of each KV pair."""
    return head_dim + head_dim // 2 + 2


@torch.no_grad()
def features(keys: Tensor, value_norms: Tensor, last_positions: Sequence[int], frequencies: Tensor) -> Tensor:
    """What is known of each KV pair without a query. Arguments as for `select`.

    Its key in front of the rotation, the lengths of the key's pairs of channels, the length of its value, and its place
    in the window.

    Returns:
        float32 `[S, Hkv, W, num_features]`.
    """
    unrotated = torch.stack([unrotate(*each, frequencies) for each in zip(keys, last_positions, strict=True)])
    places = torch.linspace(0, 1, keys.shape[2], device=keys.device).expand(*keys.shape[:3])[..., None]
    return torch.cat((unrotated, pair_lengths(keys), value_norms[..., None], places), dim=-1)
