"""Both attention backends against a literal dense attention in float64, and the promises about bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvllm.attention.base import AttentionBackend, AttentionBatch, ScoredChunk
from kvllm.attention.layer import LayerAttention
from kvllm.attention.registry import make_backend
from kvllm.errors import ConfigError
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.ops.registry import make_operations
from kvllm.worker.features.observed_scores import ChunkScorer, ScoringBackend
from tests.helpers import attention_cases
from tests.helpers.attention_cases import (
    EDGES,
    KV_HEADS,
    MIXED,
    RAGGED,
    AttentionCase,
    assert_bits_of_a_row_do_not_depend_on_the_batch,
    assert_each_layer_has_its_own_holes,
    assert_later_entries_stay_hidden,
    assert_matches_dense,
    hole,
    make_case,
    make_ragged_case,
    with_options,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", [4, 16, 48, 64, 128])
@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
def test_cpu_matches_dense(block_size: int, head_dim: int, group: int, dtype: torch.dtype) -> None:
    case = make_case(MIXED, block_size=block_size, head_dim=head_dim, group=group, dtype=dtype)
    assert_matches_dense(case, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_edges_match_dense(name: str, dtype: torch.dtype) -> None:
    assert_matches_dense(make_case(EDGES, group=3, dtype=dtype), name)


@pytest.mark.parametrize("block_size", [1, 3, 256])
def test_reference_matches_dense(block_size: int) -> None:
    assert_matches_dense(make_case(MIXED[:5], block_size=block_size, head_dim=16), "reference")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_holes_are_not_attended(name: str, block_size: int, dtype: torch.dtype) -> None:
    assert_matches_dense(make_ragged_case(block_size=block_size, head_dim=16, dtype=dtype), name)


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("head_dim", [4, 48, 128])
def test_holes_in_any_shape_of_head(head_dim: int, group: int) -> None:
    for block_size in (1, 3, 16, 256):
        assert_matches_dense(make_ragged_case(block_size=block_size, head_dim=head_dim, group=group), "cpu")


@pytest.mark.parametrize("num_threads", [1, 3])
def test_bits_of_a_row_beside_holes_do_not_depend_on_the_batch(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    case = make_ragged_case(dtype=torch.bfloat16)
    together = case.run()
    for sequence in range(len(RAGGED)):
        rows, one = case.rows(sequence), slice(sequence, sequence + 1)
        batch = AttentionBatch(
            torch.tensor([0, rows.stop - rows.start], dtype=torch.int32),
            case.batch.last_kv_index[rows],
            case.batch.block_tables[one],
            case.batch.packed_len[one],
            case.batch.head_lengths[:, one].contiguous(),
        )
        alone = replace(case, queries=case.queries[rows], batch=batch)
        assert torch.equal(alone.run(), together[rows])
        if not any(hole(batch, 0, head, len(case.keys[sequence])).any() for head in range(KV_HEADS)):
            without = replace(batch, packed_len=None, head_lengths=None)
            assert torch.equal(replace(alone, batch=without).run(), together[rows])


def test_queries_may_be_a_view_of_wider_rows() -> None:
    case = make_case(MIXED)
    wide = torch.full((len(case.queries), 700), float("nan"))
    wide[:, 100:612] = case.queries.flatten(1)
    view = wide[:, 100:612].unflatten(1, case.queries.shape[1:])
    assert torch.equal(replace(case, queries=view).run(), case.run())


def test_many_query_heads_per_kv_head() -> None:
    assert_matches_dense(make_case([[90], list(range(20, 25))], head_dim=16, group=40), "cpu")


def test_scores_far_apart() -> None:
    case = make_case([[300], list(range(100))])
    case.queries *= 300
    assert_matches_dense(case, "cpu", tolerance=1e-3)


@pytest.mark.parametrize("chunk", [1, 7, 64, 129])
def test_bits_of_a_prefill_do_not_depend_on_the_chunk_size(chunk: int) -> None:
    length = 600
    case = make_case([list(range(length))], dtype=torch.bfloat16, head_dim=48)
    pieces = []
    for start in range(0, length, chunk):
        rows = slice(start, min(length, start + chunk))
        starts = torch.tensor([0, rows.stop - start], dtype=torch.int32)
        batch = AttentionBatch(starts, case.batch.last_kv_index[rows], case.batch.block_tables)
        pieces.append(replace(case, queries=case.queries[rows], batch=batch).run())
    assert torch.equal(torch.cat(pieces), case.run())


def test_bits_do_not_depend_on_block_size() -> None:
    reference = make_case(MIXED, block_size=16)
    for block_size in (1, 3, 256):
        case = make_case(MIXED, block_size=block_size)
        for sequence, (keys, values) in enumerate(zip(reference.keys, reference.values, strict=True)):
            entries = torch.arange(len(keys))
            blocks = case.batch.block_tables[sequence].long()[entries // block_size]
            case.cache.keys(0)[blocks, :, entries % block_size] = keys
            case.cache.values(0)[blocks, :, entries % block_size] = values
        assert torch.equal(replace(case, queries=reference.queries).run(), reference.run())


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    decode, long_prefill = make_case([[1500]]), make_case([list(range(300)), [900]])
    outputs = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        outputs.append((decode.run(), long_prefill.run()))
    for output in outputs[1:]:
        assert torch.equal(output[0], outputs[0][0])
        assert torch.equal(output[1], outputs[0][1])


def replaced(case: AttentionCase, **fields: torch.Tensor) -> AttentionCase:
    return replace(case, batch=replace(case.batch, **fields))


def test_operator_refuses_bad_batches() -> None:
    case = make_case([[40], [3, 5]], head_dim=16)
    tables = case.batch.block_tables.clone()
    tables[0, 2] = case.cache.num_blocks
    bad = {
        "block .* of sequence 0 is not in the cache": replaced(case, block_tables=tables),
        "is beyond a table of": replaced(case, last_kv_index=torch.tensor([4000, 3, 5], dtype=torch.int32)),
        "negative or descends": replaced(case, last_kv_index=torch.tensor([40, 5, 3], dtype=torch.int32)),
        "sequence 0 has no query tokens": replaced(case, query_start_loc=torch.tensor([0, 0, 3], dtype=torch.int32)),
        "not from 0 to the number of query tokens": replaced(
            case, query_start_loc=torch.tensor([0, 1, 2], dtype=torch.int32)
        ),
        "last_kv_index has dtype Long": replaced(case, last_kv_index=case.batch.last_kv_index.long()),
        "dtype Half": replace(case, queries=case.queries.half()),
        "not contiguous": replace(case, queries=case.queries.transpose(0, 1).contiguous().transpose(0, 1)),
    }
    packed_len = torch.tensor([40, 4], dtype=torch.int32)
    lengths = torch.tensor([[[40, 40], [4, 4]]], dtype=torch.int32)
    bad |= {
        "sequence 1 has 4 packed KV pairs, and queries among them": replaced(
            case, packed_len=packed_len, head_lengths=lengths
        ),
        "packed_len and head_lengths go together": replaced(case, packed_len=packed_len),
        "sequence 0 has a head of negative length": replaced(
            case, packed_len=packed_len.clamp(max=3), head_lengths=lengths - 41
        ),
    }
    for message, wrong in bad.items():
        with pytest.raises(RuntimeError, match=message):
            wrong.run()


def test_an_empty_batch_is_fine() -> None:
    case = make_case([[3]])
    starts, index = torch.zeros(1, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    batch = AttentionBatch(starts, index, torch.empty(0, 4, dtype=torch.int32))
    assert replace(case, queries=case.queries[:0], batch=batch).run().shape == (0, 8, 64)


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("options", attention_cases.OPTIONS)
@pytest.mark.parametrize("block_size", [3, 16])
def test_options_of_a_layer(name: str, options: str, block_size: int) -> None:
    """What lies outside of a window is not read."""
    case = make_case(MIXED + EDGES[3:], block_size=block_size, head_dim=16, group=3)
    assert_matches_dense(with_options(case, attention_cases.OPTIONS[options]), name)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int6_int4", "int4", "int6_int4_hadamard"])
@pytest.mark.parametrize("options", ["window 5", "window 100", "all"])
def test_windows_over_codes(options: str, kv_cache_dtype: str) -> None:
    """The codes outside of a window, their scales and their zero points do not count."""
    case = make_case(MIXED, head_dim=32, kv_cache_dtype=kv_cache_dtype)
    assert_matches_dense(with_options(case, attention_cases.OPTIONS[options]), "cpu", 1e-4)


@pytest.mark.parametrize("options", ["window 5", "window 100", "all"])
@pytest.mark.parametrize("group", [1, 3])
def test_bits_of_a_row_with_options_do_not_depend_on_the_batch(options: str, group: int) -> None:
    assert_bits_of_a_row_do_not_depend_on_the_batch(group, torch.bfloat16, attention_cases.OPTIONS[options])


@pytest.mark.parametrize("num_threads", [1, 3])
def test_windows_over_several_segments(num_threads: int) -> None:
    """Few sequences, whose segments threads share out; and a window that begins in the middle of one."""
    torch.set_num_threads(num_threads)
    for window in (700, 1000, 1024, 1500):
        case = make_case([[3000], list(range(1490, 1520))], head_dim=32)
        assert_matches_dense(with_options(case, LayerAttention(window=window)), "cpu")


def test_make_backend() -> None:
    cache = PagedKVCache(CacheShape(1, 2, 16, 4, torch.float32), 4)
    assert make_backend("auto", cache, 4, 1.0).name == "cpu"
    assert make_backend("reference", cache, 4, 1.0).name == "reference"
    with pytest.raises(ConfigError, match="unknown attention backend 'flash'.*'auto' or one of cpu, flash_attn"):
        make_backend("flash", cache, 4, 1.0)
    half = PagedKVCache(CacheShape(1, 2, 16, 4, torch.float16), 4)
    with pytest.raises(ConfigError, match="float32 or bfloat16 with an even head_dim, not torch.float16"):
        make_backend("cpu", half, 4, 1.0)


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_each_layer_has_its_own_holes(name: str) -> None:
    assert_each_layer_has_its_own_holes(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 3, 4])
def test_bits_of_a_row_do_not_depend_on_the_batch(group: int, dtype: torch.dtype) -> None:
    assert_bits_of_a_row_do_not_depend_on_the_batch(group, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_later_entries_of_the_same_sequence_stay_hidden(dtype: torch.dtype) -> None:
    assert_later_entries_stay_hidden(dtype)


# Observed scores


@pytest.mark.parametrize("options", ["plain", "soft cap", "sinks"])
def test_observed_scores(options: str) -> None:
    attention_cases.assert_scores("cpu", attention_cases.OPTIONS[options])


@pytest.mark.parametrize("options", ["plain", "soft cap", "sinks"])
def test_chunks_of_query_tokens_add_what_single_ones_do(options: str) -> None:
    """A sequence's tokens one by one through the kernel, and in chunks through the second product."""
    case = make_case([list(range(700))], group=2, head_dim=32)
    case = with_options(case, attention_cases.OPTIONS[options])
    backend, start = case.backend("cpu"), torch.tensor([16], dtype=torch.int32)
    block, offset = case.batch.block_tables[0, torch.arange(16, 700) // 16].long(), torch.arange(16, 700) % 16

    def run(backend: AttentionBackend, begin: int, end: int, scored_from: torch.Tensor | None = None) -> None:
        loc, index = torch.tensor([0, end - begin], dtype=torch.int32), torch.arange(begin, end, dtype=torch.int32)
        chunks = (ScoredChunk(0, 0, end - begin, begin, 16),)
        batch = AttentionBatch(loc, index, case.batch.block_tables, scored_from=scored_from, scored_chunks=chunks)
        backend.run(0, case.queries[begin:end], backend.plan(batch), case.sinks)

    case.cache.scores = torch.full((1, case.cache.num_blocks, 2, 16), torch.nan)
    for i in range(16, 700):
        run(backend, i, i + 1, scored_from=start)
    expected = case.cache.scores[0, block, :, offset]
    scoring = ScoringBackend(backend, ChunkScorer(make_operations(case.cache)), None)
    for chunk in (1, 7, 50, 200, 700):
        case.cache.scores.fill_(torch.nan)
        for begin in range(0, 700, chunk):
            run(scoring, begin, min(begin + chunk, 700))
        found = case.cache.scores[0, block, :, offset]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
