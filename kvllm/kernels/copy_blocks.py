"""Copy whole blocks of the paged cache, all layers, keys and values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_blocks"])
def _copy_chunk(cache, sources, destinations, num_blocks, BLOCK_ELEMENTS: tl.constexpr, CHUNK: tl.constexpr):
    copy, plane, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    element = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = element < BLOCK_ELEMENTS
    source = (plane * num_blocks + tl.load(sources + copy)) * BLOCK_ELEMENTS
    destination = (plane * num_blocks + tl.load(destinations + copy)) * BLOCK_ELEMENTS
    tl.store(cache + destination + element, tl.load(cache + source + element, mask=mask), mask=mask)


def copy_blocks(cache: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """Copy block `sources[i]` to `destinations[i]`, bit for bit, in one launch.

    cache: contiguous `[layers, planes, blocks, kv_heads, block_size, width]`. sources, destinations: int64 `[n]`; no id
        is in both, and none is twice among the destinations.
    """
    layers, planes, num_blocks = cache.shape[:3]
    block_elements = cache[0, 0, 0].numel()
    chunk = min(4096, triton.next_power_of_2(block_elements))
    _copy_chunk[(sources.shape[0], layers * planes, triton.cdiv(block_elements, chunk))](
        cache, sources, destinations, num_blocks, BLOCK_ELEMENTS=block_elements, CHUNK=chunk, num_warps=4
    )
