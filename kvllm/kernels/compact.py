"""Move surviving KV pairs to the front of their region, in place, all layers in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_blocks", "num_sequences", "num_kept", "num_sources", "num_destinations"])
def _compact_head(
    cache,
    kept,
    sources,
    destinations,
    num_blocks,
    num_sequences,
    num_kept,
    num_sources,
    num_destinations,
    PLANES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):
    plane, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cache += plane * num_blocks * (KV_HEADS * HEAD_STRIDE) + head * HEAD_STRIDE
    column = tl.arange(0, COLUMNS)
    for sequence in range(num_sequences):
        row = ((plane // PLANES) * num_sequences + sequence) * KV_HEADS + head
        for begin in range(0, num_kept, TILE):
            new = begin + tl.arange(0, TILE)
            old = tl.load(kept + row * num_kept + new, mask=new < num_kept, other=-1)
            survives = old >= 0
            mask = survives[:, None] & (column < WIDTH)[None, :]
            source = tl.load(sources + sequence * num_sources + old // BLOCK_SIZE, mask=survives, other=0)
            target = tl.load(destinations + sequence * num_destinations + new // BLOCK_SIZE, mask=survives, other=0)
            old_slot = source * (KV_HEADS * HEAD_STRIDE) + old % BLOCK_SIZE * WIDTH
            new_slot = target * (KV_HEADS * HEAD_STRIDE) + new % BLOCK_SIZE * WIDTH
            vectors = tl.load(cache + old_slot[:, None] + column[None, :], mask=mask)
            # One thread's new slot is another's old one: all must have read. Later tiles read only slots after those
            # that this one writes, because a KV pair never moves to a later slot.
            tl.debug_barrier()
            tl.store(cache + new_slot[:, None] + column[None, :], vectors, mask=mask)


def compact(part: torch.Tensor, kept: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """KVOperations.compact of one part of a cache, in every layer, bit for bit, without a temporary copy.

    A program has one head of one layer's keys or values and takes the sequences in order, because a destination may be
    a source of a sequence before it.

    part: one of `PagedKVCache.parts`, `[layers, planes, blocks, kv_heads, block_size, width]`: slots of a head in a
        block are contiguous, heads and blocks lie at equal distances.
    kept: contiguous int64 `[layers, S, kv_heads, K]`.
    sources, destinations: contiguous int64 `[S, source_blocks]`, `[S, destination_blocks]`.
    """
    layers, planes, num_blocks, kv_heads, block_size, width = part.shape
    columns = triton.next_power_of_2(width)
    _compact_head[(layers * planes, kv_heads)](
        part,
        kept,
        sources,
        destinations,
        num_blocks,
        kept.shape[1],
        kept.shape[3],
        sources.shape[1],
        destinations.shape[1],
        PLANES=planes,
        KV_HEADS=kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_STRIDE=part.stride(3),
        WIDTH=width,
        COLUMNS=columns,
        TILE=max(1, min(64, (16 << 10) // columns)),
        num_warps=4,
        num_stages=1,
    )
