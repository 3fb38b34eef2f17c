"""Kernels over quantized KV caches: bytes are those of plain torch, attention is that over what the cache holds."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.device.check_kernels import ALLOWED, attend, error_of, name_of, on_target, poisoned
from benchmarks.device.log import Figures, Log, within
from benchmarks.device.movers import MakeOperations, movers
from benchmarks.device.target import Target
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.kvcache.ops.base import KVOperations
from kvllm.kvcache.ops.plain import TorchOperations
from tests.helpers import attention_cases as attention
from tests.helpers.caches import random_kept

# head_dim, query heads of a KV head, block size, dtype of queries.
SHAPES = ((128, 4, 256, torch.bfloat16), (128, 2, 16, torch.float32), (64, 8, 32, torch.float16))
TINY_SHAPES = ((32, 2, 16, torch.float32),)
TINY_ROWS = [[20], [0], list(range(14, 23))]
# The KV pair of a sequence's query token, and the first one of its first window.
SCORED = [(0, 0), (95, 16), (111, 16), (700, 640), (1500, 512)]
TINY_SCORED = [(95, 16)]


def run(target: Target, log: Log) -> None:
    with poisoned():
        for head_dim, group, block_size, dtype in target.size(SHAPES, TINY_SHAPES):
            for name in KV_FORMATS:
                options = {"head_dim": head_dim, "group": group, "block_size": block_size, "dtype": dtype}
                title = f"{name}, head_dim {head_dim}, blocks of {block_size}, {name_of(dtype)}"
                check_attention(target, log, title, options | {"kv_cache_dtype": name})
                shape = CacheShape(1, 3, head_dim, block_size, dtype, kv_format=KV_FORMATS[name])
                for mover, make in movers(target).items():
                    log.check(f"store: {mover}, {title}", partial(store, target, shape, make))
                    log.check(f"move: {mover}, {title}", partial(move, target, shape, make))


def check_attention(target: Target, log: Log, title: str, options: dict) -> None:
    """By Triton, the one backend for GPUs that reads these caches. A key is rounded once more, to its query's dtype."""
    allowed = 2 * ALLOWED[options["dtype"]]
    mixed = attention.make_case(target.size(attention.MIXED, TINY_ROWS), **options)
    log.check(f"decodes and chunks: {title}", partial(attend, target, "triton", mixed, allowed))
    if not target.dry_run:
        ragged = attention.make_ragged_case(**options)
        log.check(f"heads of different lengths: {title}", partial(attend, target, "triton", ragged, allowed))
    log.check(f"scores of windows: {title}", partial(scores, target, options))


def scores(target: Target, options: dict) -> Figures:
    """What a decode adds to the scores of windows follows from keys as attention has them."""
    case = attention.make_scored_case(attention.WINDOWS[1], target.size(SCORED, TINY_SCORED), **options)
    expected = attention.dense_scores(case)
    moved = on_target(target, case)
    moved.run("triton")
    assert case.cache.scores is not None and moved.cache.scores is not None
    before = case.cache.scores.double()
    added = moved.cache.scores.cpu().double() - before
    return within(error_of(added, expected - before), 2 * ALLOWED[options["dtype"]])


def operations(target: Target, shape: CacheShape, make: MakeOperations) -> tuple[KVOperations, KVOperations]:
    """Those of the target and of plain torch on the CPU, over caches of the same bytes."""
    found, expected = PagedKVCache(shape, 13, target.device), PagedKVCache(shape, 13)
    expected.data.view(torch.uint8).random_(generator=torch.Generator().manual_seed(0))
    found.data.view(torch.uint8).copy_(expected.data.view(torch.uint8))
    return make(found), TorchOperations(expected)


def assert_same_bytes(found: KVOperations, expected: KVOperations) -> None:
    differ = found.cache.data.view(torch.uint8).cpu() != expected.cache.data.view(torch.uint8)
    assert not differ.any(), f"{int(differ.sum())} of {differ.numel()} bytes differ"


def store(target: Target, shape: CacheShape, make: MakeOperations) -> None:
    """Vectors of every size, from views of a wider tensor, codes and scales bit for bit."""
    pair = operations(target, shape, make)
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(24, 2 * shape.num_kv_heads, shape.head_dim, generator=generator)
    vectors *= torch.logspace(-3, 3, 24)[:, None, None]
    vectors[1], vectors[2] = 0, -2.5
    slots = torch.randperm(13 * shape.block_size, generator=generator)[:24]
    slots[7] = -1
    for each in pair:
        device = each.cache.data.device
        keys, values = vectors.to(device, shape.dtype).chunk(2, dim=1)
        each.store(0, keys, values, slots.to(device))
    assert_same_bytes(*pair)


def move(target: Target, shape: CacheShape, make: MakeOperations) -> None:
    """Copies of blocks and compactions, in place and out of place, move codes with their scales."""
    pair, size = operations(target, shape, make), shape.block_size
    sources = torch.tensor([[11, 3, 7], [0, 6, 99]])  # the second has two blocks
    kept = random_kept(1, [3 * size, 2 * size], shape.num_kv_heads, [2 * size - 1, size], ragged=True)
    for each in pair:
        device = each.cache.data.device
        each.copy_blocks(torch.tensor([2, 2, 8], device=device), torch.tensor([5, 10, 1], device=device))
        for destinations in (sources[:, :2].contiguous(), torch.tensor([[4, 2], [9, -1]])):
            each.compact(*(ids.to(device) for ids in (kept, sources, destinations)))
    assert_same_bytes(*pair)
