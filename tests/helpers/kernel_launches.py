"""Calls of every launcher of Triton kernels, of the shapes that engines have, for tests that compile and start none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from kvllm.attention.base import AttentionBatch
from kvllm.attention.layer import LayerAttention
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS

LATENT = 576
"""The head_dim of what one token has in a cache of latents."""
WORST_FORMAT = "int6_int4_hadamard"
"""Keys and values of different widths, of which neither is a byte, and rotated: what kernels do most for."""
INTEGERS = (4, 32, True, torch.float16), (4, 128, True), (4, 32), (8, 16, False, torch.float16), (8, 6144)
"""Of weights as Q4_K, AWQ, Q4_0, Q6_K and `quantization="int8"` have them."""


def launch_few() -> None:
    """Every kernel, each kind of batch, layers with options and float32, once, of one size of heads where it can be."""
    cache, queries = cache_and_queries(torch.bfloat16, 128)
    launch_scores(queries, plain=False)
    launch_paged_keys(*cache_and_rows(torch.bfloat16, 256), ints(1, 3))
    launch_quantized(256, [WORST_FORMAT])
    for kind in ("plain", "holes", "observed", "scores"):
        launch_step(cache, queries, **KINDS[kind](8))
    launch_step(*cache_and_queries(torch.bfloat16, LATENT))
    launch_options(cache, queries, of_two(), 1024)
    launch_operations(cache, queries)
    launch_step(*cache_and_queries(torch.float32, 128))
    launch_elementwise(torch.bfloat16, 3)
    launch_integers(torch.bfloat16, 3, INTEGERS[:1])
    launch_float32_norms(torch.bfloat16, 3)
    launch_draws(3, torch.bfloat16, top_k=True, top_p=True)


def launch_attention(dtype: torch.dtype, head_dim: int) -> None:
    """A batch of a decode and a chunk, with holes and without, and everything else that touches a cache."""
    from kvllm.attention.triton import TritonBackend

    cache, queries = cache_and_queries(dtype, head_dim)
    kv_heads, num_heads = cache.shape.num_kv_heads, queries.shape[1]
    for kind in KINDS if head_dim in (128, LATENT) else ("plain",):
        launch_step(cache, queries, **KINDS[kind](kv_heads))
        if head_dim == 128 and dtype == torch.bfloat16 and kind != "holes":
            launch_options(cache, queries, of_two(**KINDS[kind](kv_heads)), 1024 if kind == "plain" else None)
    alone = AttentionBatch(torch.tensor([0, 33], dtype=torch.int32), ints(33), ints(1, 1))
    backend = TritonBackend(cache, num_heads, head_dim**-0.5)
    backend.run(0, queries, backend.plan(alone))
    launch_operations(cache, queries)
    if head_dim <= 256:
        launch_scores(queries)
    launch_paged_keys(*cache_and_rows(dtype, head_dim), ints(1, 3))


def ints(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32)


KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda _: {},
    "holes": lambda kv_heads: {"packed_len": ints(2), "head_lengths": ints(1, 2, kv_heads)},
    "observed": lambda kv_heads: {"table_slots": ints(2), "mass": torch.zeros(1, 2, kv_heads, 4096)},
    "scores": lambda _: {"scored_from": ints(2)},
}
"""The fields of a batch, by the number of KV heads."""


def of_two(**options: Any) -> AttentionBatch:
    """A decode, and a chunk of 32 query tokens."""
    return AttentionBatch(torch.tensor([0, 1, 33], dtype=torch.int32), ints(33), ints(2, 8), **options)


def cache_and_queries(
    dtype: torch.dtype, head_dim: int, kv_cache_dtype: str = "auto"
) -> tuple[PagedKVCache, torch.Tensor]:
    """Of 8 KV heads and 32 query heads; of one latent and the 128 query heads of DeepSeek-V3."""
    (kv_heads, num_heads), kv_format = (1, 128) if head_dim == LATENT else (8, 32), KV_FORMATS.get(kv_cache_dtype)
    options: dict[str, Any] = {"kv_format": kv_format, "scored": kv_format is None, "shared": head_dim == LATENT}
    cache = PagedKVCache(CacheShape(1, kv_heads, head_dim, 256, dtype, **options), 4)
    return cache, torch.zeros(33, num_heads, head_dim, dtype=dtype)


def cache_and_rows(dtype: torch.dtype, head_dim: int) -> tuple[PagedKVCache, torch.Tensor]:
    """The same queries as those of one window."""
    cache, queries = cache_and_queries(dtype, head_dim)
    return cache, queries[None].transpose(1, 2)


def launch_step(cache: PagedKVCache, queries: torch.Tensor, **options: Any) -> None:
    from kvllm.attention.triton import TritonBackend

    backend = TritonBackend(cache, queries.shape[1], cache.shape.head_dim**-0.5)
    backend.run(0, queries, backend.plan(of_two(**options)))


def launch_operations(cache: PagedKVCache, queries: torch.Tensor) -> None:
    from kvllm.kvcache.ops.gpu import GpuOperations

    operations, kv_heads = GpuOperations(cache, compiled=False), cache.shape.num_kv_heads
    operations.store(0, queries[:, :kv_heads], queries[:, kv_heads : 2 * kv_heads], ints(33).long())
    operations.copy_blocks(ints(1).long(), ints(1).long())
    operations.compact(ints(1, 2, kv_heads, 256).long(), ints(2, 3).long(), ints(2, 1).long())


def launch_scores(queries: torch.Tensor, *, plain: bool = True) -> None:
    """Scores of contiguous keys: of a layer with options; if `plain`, of one without, by all query tokens and some."""
    from kvllm.kernels.scores import window_scores

    keys = torch.zeros(1, 8, 768, queries.shape[-1], dtype=queries.dtype)
    window = queries[None].transpose(1, 2), keys, 736, 0.1
    if plain:
        window_scores(*window)
        window_scores(*window, ints(33).long(), squared=True)
    window_scores(*window, ints(33).long(), soft_cap=50.0, sinks=torch.zeros(32))


def launch_paged_keys(cache: PagedKVCache, queries: torch.Tensor, tables: torch.Tensor) -> None:
    """What reads the keys of windows from a cache; without queries, of all layers at once."""
    from kvllm.kernels.codes import as_kernels_read
    from kvllm.kernels.keydiff import key_differences
    from kvllm.kernels.scores import window_scores

    offsets, size = torch.zeros(queries.shape[2], dtype=torch.int64), tables.shape[1] * cache.shape.block_size - 32
    blocks = as_kernels_read([cache.keys(layer) for layer in range(cache.shape.num_layers)])
    window_scores(queries, blocks[0], size, 0.1, offsets, tables=tables, squared=True)
    key_differences(blocks, tables, size - len(tables), cache.shape.head_dim, cache.shape.dtype)


def launch_quantized(head_dim: int, names: list[str]) -> None:
    """What reads and writes codes: a decode, a chunk whose attention is observed, and moves of both parts of a pair."""
    for name in names:
        cache, queries = cache_and_queries(torch.bfloat16, head_dim, name)
        launch_step(cache, queries, **KINDS["observed"](cache.shape.num_kv_heads))
        launch_operations(cache, queries)
        launch_paged_keys(cache, queries[None].transpose(1, 2), ints(1, 2))


def launch_options(cache: PagedKVCache, queries: torch.Tensor, batch: AttentionBatch, window: int | None) -> None:
    """A layer with a soft cap and learned scores."""
    from kvllm.attention.triton import TritonBackend

    backend = TritonBackend(cache, 32, 0.1, (LayerAttention(window=window, soft_cap=50.0, sinks=True),))
    backend.run(0, queries, backend.plan(batch), torch.zeros(32))


def launch_batch(num_sequences: int) -> None:
    """Decodes alone and beside a chunk, with holes and without, in the second layer of a cache with one KV head: the
    lengths of its heads begin at any number. Then what else depends on the number of sequences or tokens."""
    from kvllm.attention.triton import TritonBackend
    from kvllm.kvcache.ops.gpu import GpuOperations

    def ints(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    holes: dict[str, Any] = {"packed_len": ints(num_sequences), "head_lengths": ints(2, num_sequences, 1)}
    observed: dict[str, Any] = {"table_slots": ints(num_sequences), "mass": torch.zeros(2, num_sequences, 1, 4096)}
    scored: dict[str, Any] = {"scored_from": ints(num_sequences)}
    quantized = ((KV_FORMATS["int8"], ({}, holes)), (KV_FORMATS["int6_int4_hadamard"], ({},)))
    for kv_format, every in ((None, ({}, holes, observed, scored)), *quantized):
        shape = CacheShape(2, 1, 128, 16, torch.bfloat16, kv_format=kv_format, scored=kv_format is None)
        cache = PagedKVCache(shape, 4)
        backend, operations = TritonBackend(cache, 4, 0.1), GpuOperations(cache, compiled=False)
        for num_tokens in (num_sequences, num_sequences + 5):
            queries = torch.zeros(num_tokens, 4, 128, dtype=torch.bfloat16)
            for options in every:
                tables = ints(num_sequences, num_sequences)
                batch = AttentionBatch(ints(num_sequences + 1), ints(num_tokens), tables, **options)
                backend.run(1, queries, backend.plan(batch))
            operations.store(1, queries[:, :1], queries[:, 1:2], ints(num_tokens, dtype=torch.int64))
        blocks = ints(num_sequences, 1 + num_sequences, dtype=torch.int64)
        operations.copy_blocks(blocks[:, 0].contiguous(), blocks[:, 0].contiguous())
        operations.compact(ints(2, num_sequences, 1, 3 + num_sequences, dtype=torch.int64), blocks, blocks)


def launch_rows(number: int) -> None:
    """What depends on how many tokens, rows of logits or windows there are, of a model of 16 bits."""
    launch_elementwise(torch.bfloat16, number)
    launch_draws(number, torch.bfloat16, top_k=True, top_p=True)
    launch_windows(number, 32, 8)


def launch_windows(number: int, heads: int, kv_heads: int) -> None:
    """Scores of as many windows, by as many query tokens and 16, of keys that are contiguous and in a cache."""
    from kvllm.kernels.scores import window_scores

    queries = torch.zeros(number, 16 + number, heads, 128, dtype=torch.bfloat16).transpose(1, 2)
    window_scores(queries, torch.zeros(number, kv_heads, 16 + number, 128, dtype=torch.bfloat16), number, 0.1)
    cache = PagedKVCache(CacheShape(2, kv_heads, 128, 256, torch.bfloat16), 4)
    launch_paged_keys(cache, queries, torch.zeros(number, number, dtype=torch.int32))


def launch_sampling() -> None:
    """Logits of a model of 16 bits; those that were changed, and are of 32, with the filter that most requests have."""
    for top_k, top_p in itertools.product((False, True), repeat=2):
        launch_draws(3, torch.bfloat16, top_k=top_k, top_p=top_p)
    launch_draws(3, torch.float32, top_k=False, top_p=True)


def launch_draws(rows: int, dtype: torch.dtype, **filtered: bool) -> None:
    from kvllm.kernels.sampling import Maxima, draw
    from kvllm.kernels.token_masks import forbid_others

    logits, filters = torch.zeros(rows, 128256, dtype=dtype), torch.zeros(rows, 5, dtype=torch.float64)
    forbid_others(logits, torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, 4008, dtype=torch.int32))
    maxima = Maxima.of(logits)
    maxima.most_likely()
    draw(logits, maxima, torch.zeros(rows, dtype=torch.int64), filters, **filtered)


def launch_elementwise(dtype: torch.dtype, rows: int) -> None:
    """Of a layer, between its products; and the products with its experts, of few rows each and of many."""
    from kvllm.kernels import elementwise
    from kvllm.kernels.grouped_linear import grouped_linear

    x, weight = torch.zeros(rows, 6144, dtype=dtype), torch.zeros(6144, dtype=dtype)
    elementwise.rms_norm(x, weight, 1e-6)
    elementwise.add_rms_norm(x, x, weight, 1e-6)
    elementwise.silu_mul(x)
    experts, bias, ends = (torch.zeros(8, *size, dtype=dtype) for size in ((96, 6144), (96,), ()))
    for of_experts in (x, torch.zeros(300 + rows, 6144, dtype=dtype)):
        grouped_linear(of_experts, experts, bias, ends.long())
        grouped_linear(of_experts, experts, None, ends.long())
    launch_low_rank(dtype, rows)
    launch_recurrent(dtype, rows)
    positions, table = torch.zeros(rows, dtype=torch.int64), torch.zeros(9, 128)
    elementwise.rotary(x, positions, table, 32, 8, 128)
    elementwise.rotary(x, positions, table, 32, 8, 128, weight[:128], weight[:128])


def launch_integers(dtype: torch.dtype, rows: int, kinds: Iterable[tuple[Any, ...]]) -> None:
    """Of matrices, of few rows, of some and of many; and of experts. kinds: arguments of IntegerGroups."""
    from kvllm.models.quantized_matrix import IntegerGroups, QuantizedMatrix

    bias, ends = torch.zeros(8, 96, dtype=dtype), torch.zeros(8, dtype=torch.int64)
    for kind in kinds:
        matrix = QuantizedMatrix.of((768, 6144), IntegerGroups(*kind), torch.device("cpu"))
        for count in (rows, 30 + rows, 300 + rows):
            x = torch.zeros(count, 6144, dtype=dtype)
            matrix.multiply(x, bias.view(-1))
            matrix.multiply(x, bias, 96, (8, 96, ends))


def launch_low_rank(dtype: torch.dtype, rows: int) -> None:
    """Of adapters, of a matrix with one projection and of one with three: of few tokens, and of many."""
    from kvllm.kernels.low_rank import add_low_rank

    for rank, tokens in itertools.product((16, 192), (rows, 300 + rows)):
        x, product = torch.zeros(tokens, 2048, dtype=dtype), torch.zeros(tokens, 2560, dtype=dtype)
        down, up = torch.zeros(4, rank, 2048, dtype=dtype), torch.zeros(4, 2560, rank, dtype=dtype)
        add_low_rank(product, x, down, up, ints(4), ints(tokens).long(), ints(4).long())


def launch_float32_norms(dtype: torch.dtype, rows: int) -> None:
    """Norms whose weights have more bits than what they normalize."""
    from kvllm.kernels import elementwise

    x, weight = torch.zeros(rows, 6144, dtype=dtype), torch.zeros(6144)
    elementwise.add_rms_norm(x, x, weight, 1e-6)
    positions, table = torch.zeros(rows, dtype=torch.int64), torch.zeros(9, 128)
    elementwise.rotary(x, positions, table, 32, 8, 128, weight[:128], weight[:128])


def launch_recurrent(dtype: torch.dtype, rows: int) -> None:
    """Of a layer of Gated DeltaNet, and of a short convolution: sequences that decode, and a prompt."""
    from kvllm.kernels import gated_delta

    taps, inputs, states = (torch.zeros(*size, dtype=dtype) for size in ((4, 6144), (9, 3, 6144), (9, 16, 128, 128)))
    for num_tokens, num_seqs in ((rows, rows), (300 + rows, 1)):
        starts, slots = ints(num_seqs + 1), ints(num_seqs)
        x, controls = torch.zeros(num_tokens, 6144, dtype=dtype), torch.zeros(num_tokens, 16)
        for silu in (True, False):
            gated_delta.short_convolution(x, taps, inputs, starts, slots, silu)
        gated_delta.gated_delta_rule(x, controls, controls, states.float(), starts, slots, 16)
