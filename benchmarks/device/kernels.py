"""The time of each kernel at the serving shapes, against its floor: bytes over bandwidth, operations over the peak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from benchmarks.device import ceilings
from benchmarks.device.ceilings import Ceilings
from benchmarks.device.log import Figures, LeftOut, Log
from benchmarks.device.movers import MakeOperations, movers
from benchmarks.device.target import Target
from benchmarks.device.timing import Call, input_sets, seconds_in_graph, seconds_with_host
from kvllm import SamplingParams
from kvllm.attention.base import AttentionBackend, AttentionBatch
from kvllm.attention.registry import BACKENDS, make_backend
from kvllm.compression.methods import kara
from kvllm.compression.registry import METHODS
from kvllm.errors import ConfigError
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS, KVFormat
from kvllm.models import elementwise
from kvllm.worker.sample_row import SampleRow
from kvllm.worker.sampler import SampleRows, sample


@dataclass(frozen=True)
class Shape:
    """The sizes of the model whose kernels are timed. dtype: in a dry run, one that Triton's interpreter computes."""

    layers: int
    hidden: int
    intermediate: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16

    def cache(self, layers: int, block_size: int = 256, kv_format: KVFormat | None = None) -> CacheShape:
        return CacheShape(layers, self.kv_heads, self.head_dim, block_size, self.dtype, kv_format=kv_format)


LLAMA_8B = Shape(32, 4096, 14336, 128256, 32, 8, 128)
TINY = Shape(2, 64, 96, 300, 4, 2, 16, torch.float32)


class Clock:
    """Times calls on the target and writes them down beside their floors."""

    def __init__(self, target: Target, log: Log) -> None:
        self.target = target
        self.log = log
        self.ceilings: Ceilings = ceilings.measure(target)

    def time(
        self, name: str, prepare: Callable[[], Sequence[Call]], num_bytes: float, flops: float = 0, host: bool = False
    ) -> None:
        """prepare: makes the inputs, and returns calls that do the same on different ones. host: a call cannot be
        captured in a graph, or is so long that it need not."""
        self.log.measure(name, partial(self._figures, prepare, num_bytes, flops, host))

    def _figures(self, prepare: Callable[[], Sequence[Call]], num_bytes: float, flops: float, host: bool) -> Figures:
        seconds = (seconds_with_host if host else seconds_in_graph)(self.target, prepare())
        floor = self.ceilings.floor(num_bytes, flops)
        return {
            "kernel_seconds": seconds,
            "kernel_floor_seconds": floor,
            "limited_by": "bytes" if floor == self.ceilings.floor(num_bytes) else "operations",
            "of_floor": floor / seconds,
            "bytes_per_s": num_bytes / seconds,
            "flops_per_s": flops / seconds,
        }


def run(target: Target, log: Log) -> None:
    clock, shape = Clock(target, log), target.size(LLAMA_8B, TINY)
    for name in BACKENDS:
        time_backend(clock, shape, name)
    for name, make in movers(target).items():
        time_movement(clock, shape, name, make)
    for kv_format in KV_FORMATS.values():
        time_quantized(clock, shape, kv_format)
    time_compression(clock, shape)
    time_elementwise(clock, shape)
    time_sampling(clock, shape)


# Attention and the cache


def time_backend(clock: Clock, shape: Shape, name: str) -> None:
    target = clock.target
    if not target.dry_run and name in ("cpu", "reference"):
        return  # these do not serve on a GPU
    try:
        capturable = over(name, PagedKVCache(shape.cache(1, target.size(256, 16)), 1, target.device), shape).capturable
    except LeftOut as reason:
        clock.log.left_out(f"all kernels of {name}", str(reason))
        return
    for batch, context, block_size in target.size(
        ((128, 4096, 256), (128, 4096, 16), (128, 1024, 256), (32, 4096, 256), (1, 4096, 256), (256, 1024, 256)),
        ((2, 40, 16),),
    ):
        title = f"{name}: decode, {batch} x {context}, blocks of {block_size}"
        time_attention(clock, shape, name, title, [[context - 1]] * batch, block_size, host=not capturable)
    longest, others, context, block_size = target.size((131072, 255, 1024, 256), (60, 2, 20, 16))
    title = f"{name}: decode, 1 x {longest} among {others} x {context}, blocks of {block_size}"
    lengths = [[longest - 1], *[[context - 1]] * others]
    time_attention(clock, shape, name, title, lengths, block_size, host=not capturable)
    chunk, context, window = target.size((2048, 4096, 768), (8, 24, 12))
    cases = {
        f"prompt chunk of {chunk}": [list(range(chunk))],
        f"the same behind {context}": [list(range(context, context + chunk))],
    }
    count = max(1, chunk // window)  # a pass of a compression event, as large as the chunk
    cases[f"recompute {count} x {window} tokens at {context}"] = [list(range(context - window, context))] * count
    for title, last_kv_index in cases.items():
        time_attention(clock, shape, name, f"{name}: {title}", last_kv_index, target.size(256, 16), host=True)


def time_quantized(clock: Clock, shape: Shape, kv_format: KVFormat) -> None:
    """Triton is the one that writes and reads such a cache on a GPU."""
    for name, make in movers(clock.target).items():
        if name == "Triton kernels":
            time_store(clock, shape, name, make, kv_format)
    for batch, context, block_size in clock.target.size(((128, 4096, 256), (128, 1024, 256)), ((2, 40, 16),)):
        title = f"triton: decode, {batch} x {context}, blocks of {block_size}, {kv_format.name}"
        rows = [[context - 1]] * batch
        time_attention(clock, shape, "triton", title, rows, block_size, host=False, kv_format=kv_format)


def time_attention(
    clock: Clock,
    shape: Shape,
    name: str,
    title: str,
    last_kv_index: list[list[int]],
    block_size: int,
    host: bool,
    kv_format: KVFormat | None = None,
) -> None:
    """last_kv_index: by sequence, the KV pair up to which each of its query tokens attends."""
    kv_pairs = sum(indices[-1] + 1 for indices in last_kv_index)
    attended = sum(index + 1 for indices in last_kv_index for index in indices)
    num_tokens = sum(map(len, last_kv_index))
    kv_bytes = kv_pairs * shape.kv_heads * shape.cache(1, block_size, kv_format).pair_bytes
    num_bytes = kv_bytes + 2 * num_tokens * shape.heads * shape.head_dim * shape.dtype.itemsize
    flops = 4 * attended * shape.heads * shape.head_dim
    prepare = partial(attention_calls, clock.target, shape, name, last_kv_index, block_size, kv_bytes, kv_format)
    clock.time(title, prepare, num_bytes, flops, host)


def attention_calls(
    target: Target,
    shape: Shape,
    name: str,
    last_kv_index: list[list[int]],
    block_size: int,
    kv_bytes: int,
    kv_format: KVFormat | None,
) -> list[Call]:
    """A call for each layer of a cache that is larger than the device's own; the blocks of a sequence lie anywhere."""
    num_blocks = [-(-(indices[-1] + 1) // block_size) for indices in last_kv_index]
    layers = input_sets(target, kv_bytes)
    cache = PagedKVCache(shape.cache(layers, block_size, kv_format), sum(num_blocks), target.device)
    backend = over(name, cache, shape)
    fill(target, cache)
    order = torch.randperm(cache.num_blocks, generator=torch.Generator().manual_seed(0)).int()
    tables = torch.zeros(len(last_kv_index), max(num_blocks), dtype=torch.int32)
    for row, blocks in zip(tables, order.split(num_blocks), strict=True):
        row[: len(blocks)] = blocks
    starts = [0, *accumulate(map(len, last_kv_index))]
    index = [i for indices in last_kv_index for i in indices]
    batch = AttentionBatch(
        torch.tensor(starts, dtype=torch.int32, device=target.device),
        torch.tensor(index, dtype=torch.int32, device=target.device),
        tables.to(target.device),
    )
    plan = backend.plan(batch)
    queries = target.randn(len(index), shape.heads, shape.head_dim, dtype=shape.dtype)
    return [partial(backend.run, layer, queries, plan) for layer in range(layers)]


def fill(target: Target, cache: PagedKVCache) -> None:
    """Random numbers; in a quantized cache, codes with scales of one."""
    if cache.shape.kv_format is None:
        cache.data.normal_(generator=target.generator())
    else:
        for plane in cache.planes:
            codes, words = plane.parts
            codes.random_(0, 100, generator=target.generator())  # none of which is a NaN in float8
            words.fill_(0x3F803F80)


def over(name: str, cache: PagedKVCache, shape: Shape) -> AttentionBackend:
    try:
        return make_backend(name, cache, shape.heads, shape.head_dim**-0.5)
    except ConfigError as error:
        raise LeftOut(str(error)) from error


def time_movement(clock: Clock, shape: Shape, name: str, make: MakeOperations) -> None:
    """Stores of one layer's new tokens; then moves of all layers at once, too long to need a graph."""
    target = clock.target
    if not target.dry_run and name == "torch":
        return  # these do not serve on a GPU
    time_store(clock, shape, name, make)
    count, windows = target.size((16, 30), (2, 2))
    of_block = shape.cache(shape.layers, target.size(256, 16)).bytes_per_block
    prepare = partial(copy_calls, target, shape, make, count)
    clock.time(f"{name}: copy {count} blocks, all layers", prepare, 2 * count * of_block, host=True)
    prepare = partial(compact_calls, target, shape, make, windows)
    title = f"{name}: compact {windows} windows, 1 of 3 blocks, all layers"
    clock.time(title, prepare, 2 * windows * of_block, host=True)


def time_store(clock: Clock, shape: Shape, name: str, make: MakeOperations, kv_format: KVFormat | None = None) -> None:
    stored = f" in {kv_format.name}" if kv_format else ""
    of_pair = 2 * shape.head_dim * shape.dtype.itemsize + shape.cache(1, 16, kv_format).pair_bytes
    for tokens in clock.target.size((128, 2048), (4,)):
        prepare = partial(store_calls, clock.target, shape, make, tokens, kv_format)
        num_bytes = tokens * shape.kv_heads * of_pair
        clock.time(f"{name}: store {tokens} tokens{stored}", prepare, num_bytes, host=name == "torch")


def store_calls(
    target: Target, shape: Shape, make: MakeOperations, tokens: int, kv_format: KVFormat | None
) -> list[Call]:
    layers = input_sets(target, 4 * tokens * shape.kv_heads * shape.head_dim * shape.dtype.itemsize)
    cache = PagedKVCache(shape.cache(layers, 16, kv_format), -(-tokens // 16), target.device)
    operations = make(cache)
    slots = torch.randperm(tokens, generator=torch.Generator().manual_seed(0)).to(target.device)
    keys, values = (
        target.randn(layers, tokens, shape.kv_heads, shape.head_dim, dtype=shape.dtype, seed=seed) for seed in (0, 1)
    )
    return [partial(operations.store, layer, keys[layer], values[layer], slots) for layer in range(layers)]


def copy_calls(target: Target, shape: Shape, make: MakeOperations, count: int) -> list[Call]:
    cache = PagedKVCache(shape.cache(shape.layers, target.size(256, 16)), 2 * count, target.device)
    cache.data.normal_(generator=target.generator())
    ids = torch.randperm(2 * count, generator=torch.Generator().manual_seed(0)).to(target.device)
    return [partial(make(cache).copy_blocks, ids[:count], ids[count:])]


def compact_calls(target: Target, shape: Shape, make: MakeOperations, windows: int) -> list[Call]:
    """In place, with other survivors in each layer and head."""
    size = target.size(256, 16)
    cache = PagedKVCache(shape.cache(shape.layers, size), 3 * windows, target.device)
    cache.data.normal_(generator=target.generator())
    chances = torch.rand(
        shape.layers, windows, shape.kv_heads, 3 * size, device=target.device, generator=target.generator()
    )
    kept = chances.argsort(-1)[..., :size].sort(-1).values
    sources = torch.randperm(3 * windows, generator=torch.Generator().manual_seed(0)).view(windows, 3).to(target.device)
    return [partial(make(cache).compact, kept, sources, sources[:, :1].contiguous())]


# Compression


def time_compression(clock: Clock, shape: Shape) -> None:
    """Scores need one product of queries and keys; that two passes compute it twice is not in the floor."""
    target = clock.target
    windows, size, buffer = target.size((30, 768, 32), (2, 24, 4))
    title = f"{windows} windows of {size}"
    queries = target.randn(windows, size, shape.heads, shape.head_dim, dtype=shape.dtype).transpose(1, 2)
    keys = target.randn(windows, shape.kv_heads, size, shape.head_dim, dtype=shape.dtype, seed=1)
    num_bytes = (queries.numel() + keys.numel()) * shape.dtype.itemsize
    flops = 2 * queries.numel() * (size - buffer)
    score = partial(kara.scores, queries, keys, buffer)
    clock.time(f"scores: {title}", lambda: [score], num_bytes, flops, host=True)
    options: dict[str, Any] = {"retain": size // 3, "buffer": buffer, "chunk_budget": buffer, "max_chunk": 8}
    select = partial(METHODS["kara"], queries, keys, **options)
    clock.time(f"scores and selection: {title}", lambda: [select], num_bytes, flops, host=True)


# Between the matrix products


def time_elementwise(clock: Clock, shape: Shape) -> None:
    target = clock.target
    wide = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    turned = (shape.heads + shape.kv_heads) * shape.head_dim
    weight, small = (target.randn(size, dtype=shape.dtype) for size in (shape.hidden, shape.head_dim))
    table = torch.rand(4096, shape.head_dim, device=target.device)

    def sets(rows: int, width: int) -> list[torch.Tensor]:
        count = input_sets(target, rows * width * shape.dtype.itemsize)
        return [target.randn(rows, width, dtype=shape.dtype, seed=seed) for seed in range(count)]

    for rows in target.size((128, 2048), (4,)):
        positions = torch.arange(rows, device=target.device)
        heads = (positions, table, shape.heads, shape.kv_heads, shape.head_dim)
        calls: dict[str, tuple[Callable[[], list[Call]], int]] = {
            "rms_norm": (
                lambda n=rows: [partial(elementwise.rms_norm, x, weight, 1e-6) for x in sets(n, shape.hidden)],
                2 * shape.hidden,
            ),
            "add_rms_norm": (
                lambda n=rows: [
                    partial(elementwise.add_rms_norm, torch.zeros_like(x), x, weight, 1e-6)
                    for x in sets(n, shape.hidden)
                ],
                4 * shape.hidden,
            ),
            "silu_mul": (
                lambda n=rows: [partial(elementwise.silu_mul, x) for x in sets(n, 2 * shape.intermediate)],
                3 * shape.intermediate,
            ),
            "rotary": (
                lambda n=rows, heads=heads: [partial(elementwise.rotary, x, *heads) for x in sets(n, wide)],
                2 * turned,
            ),
            "rotary with q/k norm": (
                lambda n=rows, heads=heads: [
                    partial(elementwise.rotary, x, *heads, small, small) for x in sets(n, wide)
                ],
                2 * turned,
            ),
        }
        for name, (prepare, numbers) in calls.items():
            clock.time(f"{name}, {rows} rows", prepare, rows * numbers * shape.dtype.itemsize)


def time_sampling(clock: Clock, shape: Shape) -> None:
    """The floor is reading the logits once."""
    rows = clock.target.size(128, 4)
    logits = clock.target.randn(rows, shape.vocab, dtype=torch.float32)
    for title, params in {
        "greedy": SamplingParams(temperature=0),
        "temperature 0.6, top-p 0.95": SamplingParams(temperature=0.6, top_p=0.95),
    }.items():
        sample_rows = SampleRows([SampleRow(params, seed, [1], []) for seed in range(rows)])
        call = partial(sample, logits, sample_rows)
        clock.time(f"sampling, {rows} rows, {title}", lambda call=call: [call], logits.nbytes, host=True)
