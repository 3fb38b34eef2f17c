"""TRIM-KV (Bui et al., arXiv 2512.03324): keep what trained gates hold on to longest.

A gate of each KV head gives every KV pair a retention between 0 and 1. What is held of the KV pair falls by this factor
with each token that follows. It was trained so that the model predicts as with the whole cache, while the sum of what
is held stays within a capacity. The KV pairs of which least is held at the end of the region are dropped.

In the paper the gate reads the token's hidden state, and drops one KV pair for each new token. Here it reads what the
cache has, the key in front of its rotation and the value, and a region is judged once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from kvllm.compression.gates import Gates, gate_logits
from kvllm.compression.methods.token2chunk import choose
from kvllm.compression.region import everything, keeps_everything


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
    """Choose the KV pairs of a region to keep, per sequence and KV head. Arguments and result as for `dms.select`."""
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    logits = gate_logits(gates, keys, values, last_positions, frequencies)
    ahead = torch.arange(keys.shape[2] - 1, -1, -1, device=keys.device)  # tokens up to the last of the region
    held = logsigmoid(logits) * ahead
    return choose(held[..., : keys.shape[2] - buffer], retain=retain, buffer=buffer)
