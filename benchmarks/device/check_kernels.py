"""Every kernel of the target against float64: what it computes up to rounding, what it moves bit for bit.

All memory that torch allocates here begins as NaN, outputs too, and so does every slot of a cache without a KV pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from benchmarks.device.log import Figures, LeftOut, Log, within
from benchmarks.device.movers import MakeOperations, movers
from benchmarks.device.target import Target
from kvllm.attention.registry import BACKENDS, make_backend
from kvllm.compression import mass
from kvllm.compression.methods import kara, token2chunk
from kvllm.errors import ConfigError
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.models import elementwise
from tests.helpers import attention_cases as attention
from tests.helpers.caches import literal_compaction, random_kept
from tests.helpers.literal_kara import dense_scores, window_tensors
from tests.helpers.tensors import bits_of, cos_sin_table

# ‖found − expected‖ / ‖expected‖. All sums are in float32; operands and results are rounded to the dtype.
ALLOWED = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# head_dim, query heads of a KV head, block size, dtype: those that serve first, then all that a kernel must do.
SHAPES = (
    (128, 4, 256, torch.bfloat16),
    (128, 2, 16, torch.bfloat16),
    (128, 4, 16, torch.float32),
    (64, 8, 32, torch.bfloat16),
    (64, 1, 16, torch.float16),
    (96, 3, 64, torch.bfloat16),
    (256, 4, 256, torch.bfloat16),
    (128, 8, 128, torch.float16),
    (32, 5, 16, torch.float32),
)
TINY_SHAPES = ((16, 2, 16, torch.float32), (32, 3, 32, torch.float16))
# One sequence of more segments than a kernel cuts one into, among short ones.
UNEVEN = [[40_000], *[[index] for index in range(0, 600, 37)]]
TINY_UNEVEN = [[70], [0], [3]]
TINY_ROWS = [[20], [0], list(range(12)), list(range(14, 23))]
SIXTEEN_BITS = (torch.float16, torch.bfloat16)
EPS = 1e-6


def run(target: Target, log: Log) -> None:
    with poisoned():
        first, *others = target.size(SHAPES, TINY_SHAPES)
        check_shape(target, log, *first)
        check_compression(target, log)
        check_elementwise(target, log)
        for shape in others:  # last: under compute-sanitizer there may be time for little more than one
            check_shape(target, log, *shape)


def check_shape(target: Target, log: Log, head_dim: int, group: int, block_size: int, dtype: torch.dtype) -> None:
    for name in BACKENDS:
        check_backend(target, log, name, head_dim, group, block_size, dtype)
    for name, make in movers(target).items():
        check_movement(target, log, name, CacheShape(2, 3, head_dim, block_size, dtype), make)


@contextmanager
def poisoned() -> Iterator[None]:
    """Everything that torch allocates without initializing it is NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖found − expected‖ / ‖expected‖ in float64; NaN if anything is."""
    expected = expected.cpu().double()
    return float((found.cpu().double() - expected).norm() / expected.norm())


# Attention backends


def check_backend(
    target: Target, log: Log, name: str, head_dim: int, group: int, block_size: int, dtype: torch.dtype
) -> None:
    title = f"{name}, head_dim {head_dim}, group {group}, blocks of {block_size}, {name_of(dtype)}"
    shape = CacheShape(1, attention.KV_HEADS, head_dim, block_size, dtype)
    try:
        make_backend(name, PagedKVCache(shape, 1, target.device), attention.KV_HEADS * group, 1.0)
    except ConfigError as error:
        log.left_out(title, str(error))
        return
    options = {"head_dim": head_dim, "group": group, "block_size": block_size, "dtype": dtype}
    for what, rows in {
        "decodes and chunks": target.size(attention.MIXED, TINY_ROWS),
        "decodes alone": target.size([[600], [0], [1023]], [[20], [0]]),
        "decodes of very different lengths": target.size(UNEVEN, TINY_UNEVEN),
    }.items():
        log.check(f"{what}: {title}", lambda rows=rows: attend(target, name, attention.make_case(rows, **options)))
    if target.dry_run and name == "triton":
        log.left_out(f"heads of different lengths: {title}", "takes minutes in Triton's interpreter")
    else:
        log.check(
            f"heads of different lengths: {title}", lambda: attend(target, name, attention.make_ragged_case(**options))
        )


def attend(target: Target, name: str, case: attention.Case, allowed: float | None = None) -> Figures:
    expected, case = attention.dense_attention(case), on_target(target, case)
    ragged = case.batch.packed_len is not None
    try:
        backend = make_backend(name, case.cache, case.queries.shape[1], case.scale, ragged=ragged)
    except ConfigError as error:
        raise LeftOut(str(error)) from error
    found = backend.run(0, case.queries, backend.plan(case.batch))
    return within(error_of(found, expected), allowed or ALLOWED[case.queries.dtype])


def on_target(target: Target, case: attention.Case) -> attention.Case:
    """The case with a cache, queries and a batch that are on the target."""
    cache = PagedKVCache(case.cache.shape, case.cache.num_blocks, target.device)
    cache.data.view(torch.uint8).copy_(case.cache.data.view(torch.uint8))
    cache.scores = None if case.cache.scores is None else case.cache.scores.to(target.device, copy=True)
    tensors = {field: value for field, value in vars(case.batch).items() if isinstance(value, torch.Tensor)}
    batch = replace(case.batch, **{field: value.to(target.device) for field, value in tensors.items()})
    return replace(case, cache=cache, queries=case.queries.to(target.device), batch=batch)


# Movement of KV pairs


def check_movement(target: Target, log: Log, name: str, shape: CacheShape, make: MakeOperations) -> None:
    title = f"{name}, head_dim {shape.head_dim}, blocks of {shape.block_size}, {name_of(shape.dtype)}"
    log.check(f"store: {title}", partial(store, target, shape, make))
    log.check(f"copy blocks: {title}", partial(copy_blocks, target, shape, make))
    log.check(f"compact: {title}", partial(compact, target, shape, make))


def random_bits(target: Target, shape: CacheShape) -> tuple[PagedKVCache, torch.Tensor]:
    """A cache of any bits, NaNs among them, and a copy of these bits on the CPU."""
    cache = PagedKVCache(shape, 13, target.device)
    bits = bits_of(cache.data)
    limits = torch.iinfo(bits.dtype)
    bits.random_(limits.min, limits.max, generator=target.generator())
    return cache, bits.cpu()


def store(target: Target, shape: CacheShape, make: MakeOperations) -> None:
    cache, expected = random_bits(target, shape)
    size, block_size = shape.num_kv_heads * shape.head_dim, shape.block_size
    qkv = target.randn(5, 3 * size + 20, dtype=shape.dtype)
    keys, values = (qkv[:, begin : begin + size].unflatten(1, (-1, shape.head_dim)) for begin in (10, 20 + size))
    slots = [block_size + 1, -1, 0, 12 * block_size - 1, 100]
    for row, slot in enumerate(slots):
        if slot >= 0:
            for plane, rows in enumerate((keys, values)):
                expected[1, plane, slot // block_size, :, slot % block_size] = bits_of(rows[row].contiguous()).cpu()
    make(cache).store(1, keys, values, torch.tensor(slots, device=target.device))
    assert torch.equal(bits_of(cache.data).cpu(), expected)


def copy_blocks(target: Target, shape: CacheShape, make: MakeOperations) -> None:
    cache, expected = random_bits(target, shape)
    sources, destinations = torch.tensor([2, 2, 8]), torch.tensor([5, 0, 12])
    expected[:, :, destinations] = expected[:, :, sources]
    make(cache).copy_blocks(sources.to(target.device), destinations.to(target.device))
    assert torch.equal(bits_of(cache.data).cpu(), expected)


def compact(target: Target, shape: CacheShape, make: MakeOperations) -> None:
    """In place and to other blocks, all heads alike and ragged, and two sequences that share their blocks."""
    size = shape.block_size
    regions = torch.tensor([[11, 3, 7], [0, 6, 99]])  # the second has two blocks
    shared = torch.tensor([[0, 1, 2], [0, 1, 2]])
    for sources, destinations in (
        (regions, regions[:, :2]),
        (regions, torch.tensor([[5, 2], [9, -1]])),
        (shared, torch.tensor([[5, 4], [0, 1]])),  # the first moves out, then the second compacts in place
    ):
        for ragged in (False, True):
            cache, bits = random_bits(target, shape)
            kept = random_kept(2, [3 * size, 2 * size], 3, [2 * size - 1, size], ragged=ragged)
            expected = literal_compaction(bits, kept, sources, destinations)
            make(cache).compact(*(ids.contiguous().to(target.device) for ids in (kept, sources, destinations)))
            assert torch.equal(bits_of(cache.data).cpu(), expected), f"ragged: {ragged}, to {destinations}"


# Compression


def check_compression(target: Target, log: Log) -> None:
    for heads, kv_heads, window, head_dim, dtype in target.size(
        (
            (32, 8, 768, 128, torch.bfloat16),
            (32, 8, 768, 128, torch.float32),
            (16, 8, 90, 64, torch.bfloat16),
            (6, 2, 501, 96, torch.float16),
        ),
        ((4, 2, 48, 16, torch.float32),),
    ):
        title = f"{heads} on {kv_heads} heads, window {window}, head_dim {head_dim}, {name_of(dtype)}"
        shape = (heads, kv_heads, window, head_dim, dtype)
        log.check(f"scores by every query: {title}", partial(scores, target, *shape, num_queries=window))
        log.check(f"scores by the buffer's queries: {title}", partial(scores, target, *shape, num_queries=window // 8))
    log.check("token2chunk", partial(chunks, target))
    for squared in (False, True):
        log.check(f"attention mass{', squared' if squared else ''}", partial(attention_mass, target, squared=squared))


def scores(
    target: Target, heads: int, kv_heads: int, window: int, head_dim: int, dtype: torch.dtype, *, num_queries: int
) -> Figures:
    queries, keys = window_tensors(0, 2, heads, kv_heads, window, head_dim, dtype)
    buffer = window // 8
    expected = dense_scores(queries[:, :, -num_queries:], keys, buffer)
    # Query tokens as in a pass: those of a sequence one after the other, each with all of its heads.
    rows = queries[:, :, -num_queries:].transpose(1, 2).contiguous().to(target.device).transpose(1, 2)
    return within(error_of(kara.scores(rows, keys.to(target.device), buffer), expected), 1e-4)


def chunks(target: Target) -> None:
    """The same choice as on the CPU, which the golden vectors hold. Few levels of scores: almost everything ties."""
    generator = torch.Generator().manual_seed(0)
    for levels in (3, 1 << 20):
        of_keys = torch.randint(levels, (6, 736), generator=generator).float()
        for total, budget, longest in ((225, 32, 8), (225, 0, 8), (700, 64, 3)):
            found = token2chunk.expand(of_keys.to(target.device), total, budget, longest)
            assert torch.equal(found.cpu(), token2chunk.expand(of_keys, total, budget, longest))


def attention_mass(target: Target, *, squared: bool) -> Figures:
    """Causal, as H2O and `kara_sharp` add it up."""
    queries, keys = window_tensors(2, 1, 4, 2, 200, 64)
    logits = queries.double() @ keys.double().repeat_interleave(2, dim=1).mT / 8
    later = torch.ones(200, 200).triu(1).bool()
    probabilities = logits.masked_fill(later, -torch.inf).softmax(-1)
    expected = probabilities.pow(2 if squared else 1).view(1, 2, -1, 200).sum(2)
    last_kv_index = torch.arange(200, device=target.device)
    rows, keys = queries.to(target.device), keys.to(target.device)
    return within(
        error_of(mass.batched_attention_mass(rows, keys, 200, last_kv_index, squared=squared), expected), 1e-5
    )


# Element-wise work


def check_elementwise(target: Target, log: Log) -> None:
    dtypes = target.size((torch.float32, *SIXTEEN_BITS), (torch.float32, torch.bfloat16))
    for rows, width in target.size(((1, 4096), (300, 1024), (7, 1027)), ((3, 40),)):
        for dtype in dtypes:
            title = f"{rows} x {width}, {name_of(dtype)}"
            log.check(f"rms_norm: {title}", partial(rms_norm, target, rows, width, dtype))
            log.check(f"silu_mul: {title}", partial(silu_mul, target, rows, width, dtype))
    for head_dim in target.size((64, 96, 128, 256), (16,)):
        for dtype in dtypes:
            for norm in (False, True):
                title = f"head_dim {head_dim}, {'q/k norm, ' if norm else ''}{name_of(dtype)}"
                log.check(f"rotary: {title}", partial(rotary, target, head_dim, norm, dtype))


def rms_norm(target: Target, rows: int, width: int, dtype: torch.dtype) -> Figures:
    """Alone, and with the addition before it, whose sum must be the rounded one."""
    x, residual, weight = (target.randn(*size, dtype=dtype) for size in ((rows, width), (rows, width), (width,)))
    residual = residual.roll(1, 1)
    added = residual + x
    errors = [error_of(elementwise.rms_norm(x, weight, EPS), normalized(x, weight))]
    errors.append(error_of(elementwise.add_rms_norm(residual, x, weight, EPS), normalized(added, weight)))
    assert torch.equal(residual, added)
    return within(max(errors), ALLOWED[dtype])


def normalized(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def silu_mul(target: Target, rows: int, width: int, dtype: torch.dtype) -> Figures:
    gate_up = 4 * target.randn(rows, 2 * width, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    return within(error_of(elementwise.silu_mul(gate_up), gate * gate.sigmoid() * up), ALLOWED[dtype])


def rotary(target: Target, head_dim: int, norm: bool, dtype: torch.dtype) -> Figures:
    """6 query heads, 2 KV heads, and values behind them that must stay."""
    qkv = target.randn(40, 10 * head_dim, dtype=dtype)
    q_weight, k_weight = (target.randn(head_dim, dtype=dtype, seed=seed) if norm else None for seed in (1, 2))
    positions = torch.arange(40, device=target.device) * 2
    table = cos_sin_table(head_dim).to(target.device)
    cos, sin = table.double()[positions].unsqueeze(1).chunk(2, dim=-1)
    parts = []
    for heads, weight in zip(
        qkv.unflatten(1, (10, head_dim)).split((6, 2, 2), dim=1), (q_weight, k_weight, None), strict=True
    ):
        x = heads.double() if weight is None else normalized(heads, weight)
        low, high = x.chunk(2, dim=-1)
        turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
        parts.append(x if len(parts) == 2 else turned)
    values = qkv[:, 8 * head_dim :].clone()
    elementwise.rotary(qkv, positions, table, 6, 2, head_dim, q_weight, k_weight, EPS)
    assert torch.equal(qkv[:, 8 * head_dim :], values)
    return within(error_of(qkv, torch.cat(parts, dim=1).flatten(1)), ALLOWED[dtype])
