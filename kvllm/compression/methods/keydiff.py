"""KeyDiff (Park et al., arXiv 2504.15364): keep the keys that differ most from the mean key."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvllm._extension import operator
from kvllm.compression.methods.token2chunk import top_indices
from kvllm.compression.paged_keys import Keys, PagedKeys
from kvllm.compression.region import everything, keeps_everything, with_buffer


def select(queries: Tensor | None, keys: Keys, *, retain: int, buffer: int) -> Tensor:
    """Choose the KV pairs of a region to keep, as `registry.Method` says. The paper's `buffer` is 0."""
    if keeps_everything(keys, retain, buffer):
        return everything(keys)
    of_all = scores(keys)
    kept = top_indices(of_all[..., : of_all.shape[-1] - buffer], retain - buffer)
    return with_buffer(kept, keys, buffer)


@torch.no_grad()
def scores(keys: Keys) -> Tensor:
    """Negative cosine similarity of each key to the mean of all unit keys, the buffer's included.

    Returns:
        float32 `[S, Hkv, C]` for keys `[S, Hkv, C, d]`, bit-identical for a sequence whatever the others are.
    """
    if isinstance(keys, PagedKeys):
        from kvllm.kernels.keydiff import key_differences  # cannot be imported without triton

        return key_differences(keys.blocks, keys.tables, keys.shape[2], keys.shape[3], keys.dtype)
    if keys.is_cpu and keys.dtype in (torch.float32, torch.bfloat16):
        return operator("key_differences")(keys.contiguous())
    unit = normalize(keys.float(), dim=-1)
    anchor = normalize(unit.mean(dim=2, keepdim=True), dim=-1)
    return -(unit * anchor).sum(dim=-1)
