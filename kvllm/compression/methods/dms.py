"""DMS, Dynamic Memory Sparsification (Łańcucki et al., arXiv 2506.05345): keep what trained gates would not drop.

A gate of each KV head gives every KV pair a logit, of which the sigmoid is the probability that the KV pair is kept. It
was trained with decisions drawn from these, so that the model predicts as with the whole cache while a given share is
kept, and with a delay: a KV pair that is dropped stays for some tokens more, as the buffer does here.

In the paper the gate is a linear map of the token's hidden state, the weights of the model are trained with it, and
all that it rejects is dropped, so that heads keep different numbers. Here the gate reads what the cache has, the model
stays as it is, and the highest logits of a region are kept, in each head as many as the budget says.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvllm.compression.gates import Gates, gate_logits
from kvllm.compression.methods.token2chunk import choose
from kvllm.compression.region import everything, keeps_everything

RECENCY = 1e-4
"""What a KV pair has ahead of the one before it. In the first layer those of equal tokens are equal, and of these the
last is kept, instead of the one that rounding prefers."""


def select(
    queries: Tensor | None,
    keys: Tensor,
    *,
    retain: int,
    buffer: int,
    values: Tensor,
    last_positions: Sequence[int],
    frequencies: Tensor,
    gates: Gates,
) -> Tensor:
    """Choose the KV pairs of a region to keep, as `registry.Method` says.

    Args:
        keys: `[layers * S, Hkv, C, d]`, of successive positions; of sequences in one layer after the other.
        gates: of the layers, for these KV heads.
    """
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    logits = gate_logits(gates, keys, values, last_positions, frequencies)
    found = logits + RECENCY * torch.arange(keys.shape[2], device=keys.device)
    return choose(found[..., : keys.shape[2] - buffer], retain=retain, buffer=buffer)
