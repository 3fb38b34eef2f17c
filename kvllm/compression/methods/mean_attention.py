"""Keep what queries read most of (ours): by the mean square of a KV pair's attention, times that of its value.

A KV pair adds its value, times the attention, to what a query reads, so the length of that is the error without it
(VATP, Guo et al., arXiv 2406.12335); squares count it as errors are counted. A sum over all queries, as in H2O, favours
old KV pairs, because more queries could attend to them; a mean does not (RoCo, Ren and Zhu, arXiv 2402.06262). Each
window is chosen from together with what is left of those before, so what was kept once can go later.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvllm.compression.methods.token2chunk import top_indices
from kvllm.compression.paged_keys import Keys
from kvllm.compression.region import everything, keeps_everything, with_buffer
from kvllm.compression.specs import RECENT


def select(
    queries: Tensor | None,
    keys: Keys,
    *,
    retain: int,
    buffer: int,
    observed: Tensor,
    ages: Tensor,
    value_norms: Tensor,
    recent: int = RECENT.default,
) -> Tensor:
    """Choose the KV pairs of a region to keep, as `registry.Method` says.

    Args:
        observed: squares of attention, added up over queries and the query heads of a KV head.
        recent: the last KV pairs of the region that are kept, too, but at most half of those that are.
    """
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    num_scored = keys.shape[2] - buffer
    scores = observed / ages[:, None, :num_scored] * value_norms[:, :, :num_scored].square()
    scores[..., num_scored - max(0, min(recent, retain // 2) - buffer) :] = torch.inf
    return with_buffer(top_indices(scores, retain - buffer), keys, buffer)
