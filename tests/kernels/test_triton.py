"""The Triton kernels without a GPU: their results in Triton's interpreter.

The interpreter must be chosen before Triton is first imported, which other tests do. So all checks run in one process
of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.attention.base import AttentionBatch
from kvllm.attention.layer import PLAIN, LayerAttention
from kvllm.attention.registry import make_backend
from kvllm.compression import mass
from kvllm.compression.methods import keydiff
from kvllm.compression.paged_keys import PagedKeys
from kvllm.compression.registry import METHODS
from kvllm.errors import ConfigError
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.ops.base import KVOperations
from kvllm.kvcache.ops.plain import TorchOperations
from kvllm.lora.product import NO_ADAPTER, AdapterRows, add_plainly
from kvllm.models import elementwise as torch_forms
from kvllm.models.quantized_matrix import IntegerGroups, QuantizedMatrix
from kvllm.worker.features.attention_mass import AttentionMass
from tests.helpers import attention_cases, recurrent_checks
from tests.helpers.caches import literal_compaction, random_cache, random_kept
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.compressions import paper_compression
from tests.helpers.literal_kara import dense_scores, window_tensors
from tests.helpers.processes import run_python
from tests.helpers.strict_interpreter import print_failures
from tests.helpers.tensors import assert_same_rounding, bits_of, cos_sin_table, randn

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton, which is not installed")

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


# Results


LONG = ("the_engine_generates_the_same_tokens", "the_engine_scores_keys_in_blocks")
"""Engines in the interpreter, of which tests/worker/test_cuda_path.py runs others."""


def run_checks(*, long: bool) -> None:
    print_failures({name: function for name, function in CHECKS.items() if long or name not in LONG})


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest) -> dict[str, str]:
    return run_python(f"run_checks(long={request.config.getoption('long')})", __name__, TRITON_INTERPRET="1")


def assert_matches_dense(case: attention_cases.AttentionCase) -> None:
    tolerance = {torch.float32: 3e-6, torch.float16: 3e-3}[case.queries.dtype]
    expected = attention_cases.dense_attention(case)
    torch.testing.assert_close(case.run("triton").double(), expected, atol=tolerance, rtol=tolerance)


@check
def attention_matches_dense() -> None:
    """Decodes and chunks side by side, in every shape of head, and what no sequence holds is NaN."""
    for head_dim, group, block_size, dtype in (
        (64, 4, 16, torch.float32),
        (96, 1, 64, torch.float32),
        (128, 8, 16, torch.float16),
        (256, 3, 256, torch.float32),
        (16, 20, 32, torch.float16),
    ):
        options = {"head_dim": head_dim, "group": group, "block_size": block_size, "dtype": dtype}
        assert_matches_dense(attention_cases.make_case(attention_cases.MIXED, **options))


@check
def wide_heads_match_dense() -> None:
    """Heads of 512, and latents: channels of two parts, query heads of several tiles, whose segments are longer. The
    query tokens are beside the ends of tiles and of segments."""
    rows = [[64], [0], list(range(40, 47)), [530], list(range(505, 515)), [1030]]
    for head_dim, group, block_size, dtype in (
        (512, 3, 32, torch.float16),
        (512, 8, 256, torch.float32),
        (528, 70, 16, torch.float16),
        (576, 20, 16, torch.float16),
        (576, 36, 64, torch.float32),
    ):
        options = {"head_dim": head_dim, "group": group, "block_size": block_size, "dtype": dtype}
        assert_matches_dense(attention_cases.make_case(rows, shared=head_dim > 512, **options))


@check
def edges_of_tiles_and_segments() -> None:
    assert_matches_dense(attention_cases.make_case(attention_cases.EDGES, head_dim=16, group=3))


@check
def programs_share_segments() -> None:
    """However many programs there are for a sequence, its segments are the same."""
    from kvllm.kernels import decode

    case = attention_cases.make_case([[1600], [3], [511]], head_dim=16)
    expected = case.run("triton")
    for programs in (1, 2 * 6):  # one and two for each head of a sequence, which has up to seven segments
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decode, "_PROGRAMS", programs)
            assert torch.equal(case.run("triton"), expected)


@check
def long_sequences_have_larger_segments() -> None:
    """Whole and with holes; the segments of a decode are counted, those of chunks are not."""
    from kvllm.kernels import decode, layer_shape

    case = attention_cases.make_case([[1600], [3], list(range(5, 9)), [1023], [1024]], head_dim=16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_shape, "_MAX_SEGMENTS", 2)
        assert_matches_dense(case)
        assert_matches_dense(attention_cases.make_ragged_case(head_dim=16))
        partials = decode.Partials.of(case.batch.query_start_loc, case.batch.last_kv_index, 4, 2048, 16, 2)
    assert partials.first_segments.tolist() == [0, 2, 3, 3, 5, 7]
    assert partials.sequences[:7].tolist() == [0, 0, 1, 3, 3, 4, 4]
    assert partials.total.shape == (5, 4, 2)
    assert layer_shape.segments(20) == (256, 64)
    assert layer_shape.segments(128) == (1024, 16)


@check
def decodes_alone() -> None:
    """The prefill kernel is not started at all. In most of the small caches, block 0 is one of those that are NaN."""
    assert_matches_dense(attention_cases.make_case([[64], [0], [700]], head_dim=32))
    for seed in range(4):
        assert_matches_dense(attention_cases.make_case([[3]], head_dim=16, seed=seed))


@check
def holes_are_not_attended() -> None:
    assert_matches_dense(attention_cases.make_ragged_case(head_dim=16, group=2))
    assert_matches_dense(attention_cases.make_ragged_case(head_dim=64, group=1, block_size=64, dtype=torch.float16))
    assert_matches_dense(attention_cases.make_ragged_case(head_dim=576, group=3, dtype=torch.float16, shared=True))


@check
def options_of_a_layer() -> None:
    """Windows within tiles and over segments, soft caps and learned scores, of decodes and chunks side by side."""
    rows = [[64], [0], list(range(40, 59)), list(range(7, 80, 9)), [600], list(range(505, 520))]
    for name in ("window 5", "window 64", "window 513", "sinks", "all"):
        options = attention_cases.OPTIONS[name]
        dtype = torch.float32 if name != "all" else torch.float16
        case = attention_cases.make_case(rows, head_dim=16, group=3, dtype=dtype)
        assert_matches_dense(attention_cases.with_options(case, options))


@check
def tiles_of_keys_in_one_copy() -> None:
    """Blocks of whole tiles in 16 bits: chunks that begin and end beside the ends of tiles, with tiles that all query
    tokens attend before them, and a channel beyond the head's last one; a window's borders within a tile, and apart."""
    rows = [list(range(380, 388)), [500], list(range(3)), list(range(250, 262))]
    cases = ((96, 3, "plain"), (256, 2, "all"), (16, 20, "window 100"), (32, 4, "window 5"), (64, 4, "latents"))
    for head_dim, group, layer in cases:
        shape = {"head_dim": head_dim, "group": group, "block_size": 256, "dtype": torch.float16}
        case = attention_cases.make_case(rows, shared=layer == "latents", seed=head_dim, **shape)
        case = attention_cases.with_options(case, attention_cases.OPTIONS.get(layer, PLAIN))
        assert case.backend("triton").plan(case.batch).tiles.boxes
        assert_matches_dense(case)
        case.queries *= 100
        expected = attention_cases.dense_attention(case)
        torch.testing.assert_close(case.run("triton").double(), expected, atol=1e-2, rtol=1e-2)


@check
def bits_of_16_bits_do_not_depend_on_masks() -> None:
    """Tiles that a chunk masks for its earlier tokens are not masked for its later ones alone."""
    for block_size in (16, 256):
        case = attention_cases.make_case(
            [list(range(200, 270))], head_dim=16, block_size=block_size, dtype=torch.float16
        )
        case = replace(case, queries=case.queries[:, :2])  # a tile has all the tokens
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(np, "matmul", lambda a, b, dtype: (a[:, :, None] * b[None]).astype(dtype).sum(1))
            together = case.run("triton")
            assert torch.equal(part(case, 0, slice(60, 70)).run("triton"), together[60:])


@check
def tiles_with_the_most_kv_pairs_first() -> None:
    from kvllm.kernels.prefill_tiles import longest_first

    case = attention_cases.make_case([[64], list(range(35)), [0], list(range(700, 740)), [5, 9]], head_dim=16)
    starts, index = case.batch.query_start_loc, case.batch.last_kv_index
    order = longest_first(starts, index, 8)
    tiles = [(sequence, begin) for sequence, begin in order.tolist() if sequence >= 0]
    expected = [(s, b) for s in (1, 3, 4) for b in range(int(starts[s]), int(starts[s + 1]), 8)]
    assert sorted(tiles) == expected
    assert order[len(tiles) :, 0].eq(-1).all()
    lengths = [int(index[min(begin + 8, int(starts[sequence + 1])) - 1]) for sequence, begin in tiles]
    assert lengths == sorted(lengths, reverse=True)


@check
def each_layer_has_its_own_holes() -> None:
    attention_cases.assert_each_layer_has_its_own_holes("triton")


def run_observed(case: attention_cases.AttentionCase, mass: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Run the only layer, which adds to `mass` `[1, table rows, kv_heads, entries]`."""
    table_slots = torch.tensor(rows, dtype=torch.int32, device=mass.device)
    return replace(case, batch=replace(case.batch, table_slots=table_slots, mass=mass)).run("triton")


def dense_mass(case: attention_cases.AttentionCase, sequence: int) -> torch.Tensor:
    """Probabilities summed over the rows and the query heads of a KV head, written out, in float64."""
    keys, rows = case.keys[sequence].double(), case.rows(sequence)
    queries = case.queries[rows].double().unflatten(1, (attention_cases.KV_HEADS, -1))
    scores = torch.einsum("thgd,ehd->thge", queries, keys) * case.scale
    if case.options.soft_cap is not None:
        scores = case.options.soft_cap * (scores / case.options.soft_cap).tanh()
    later = torch.arange(len(keys)) > case.batch.last_kv_index[rows, None]
    scores.masked_fill_(later[:, None, None], -torch.inf)
    if case.sinks is not None:
        sinks = case.sinks.double().view(1, attention_cases.KV_HEADS, -1, 1)
        scores = torch.cat((scores, sinks.expand(len(scores), -1, -1, -1)), dim=-1)
    return scores.softmax(-1)[..., : len(keys)].sum((0, 2))


@check
def attention_mass() -> None:
    """Added to what is there, for decodes and chunks, long and short; attention itself has the same bits."""
    for head_dim, group, block_size, dtype, layer in (
        (96, 3, 16, torch.float32, "plain"),
        (64, 4, 64, torch.float16, "soft cap"),
        (16, 1, 256, torch.float32, "sinks"),
        (576, 20, 16, torch.float16, "plain"),
    ):
        options = {"head_dim": head_dim, "group": group, "block_size": block_size, "dtype": dtype}
        options["shared"] = head_dim > 512
        case = attention_cases.make_case([[64], [0], list(range(35)), list(range(40, 59)), [600]], **options)
        case = attention_cases.with_options(case, attention_cases.OPTIONS[layer])
        mass = torch.rand(1, 7, attention_cases.KV_HEADS, 700)
        before, rows = mass.clone(), [4, 0, 6, 2, 1]
        assert torch.equal(run_observed(case, mass, rows), case.run("triton"))
        for sequence, row in enumerate(rows):
            expected = dense_mass(case, sequence)
            before[0, row, :, : expected.shape[1]] += expected
        torch.testing.assert_close(mass, before, atol=2e-5, rtol=1e-5)


@check
def attention_mass_of_decodes_alone() -> None:
    case = attention_cases.make_case([[600], [3], [0]], head_dim=16)
    mass = torch.zeros(1, 3, attention_cases.KV_HEADS, 601)
    run_observed(case, mass, [2, 1, 0])
    for sequence, row in enumerate([2, 1, 0]):
        expected = dense_mass(case, sequence)
        torch.testing.assert_close(mass[0, row, :, : expected.shape[1]].double(), expected, atol=1e-6, rtol=1e-5)
        assert not mass[0, row, :, expected.shape[1] :].any()


@check
def observed_scores() -> None:
    attention_cases.assert_scores("triton", short=True)


@check
def observed_scores_of_a_layer_with_options() -> None:
    layer = LayerAttention(soft_cap=0.5, sinks=True)
    case = attention_cases.make_scored_case([(16, 16), (95, 16), (160, 0)])
    case = attention_cases.with_options(case, layer)
    expected = attention_cases.dense_scores(case)
    case.run("triton")
    torch.testing.assert_close(case.cache.scores.double(), expected, atol=2e-6, rtol=2e-6)


@check
def bits_of_attention_mass_do_not_depend_on_the_batch() -> None:
    case = attention_cases.make_case([[600], list(range(90)), list(range(7, 40, 3))], head_dim=16, group=3)
    together = torch.zeros(1, 3, attention_cases.KV_HEADS, 700)
    run_observed(case, together, [0, 1, 2])
    for sequence in range(3):
        alone = torch.zeros(1, 1, attention_cases.KV_HEADS, 700)
        run_observed(part(case, sequence, case.rows(sequence)), alone, [0])
        assert torch.equal(alone[0, 0], together[0, sequence])


@check
def scores_far_apart() -> None:
    case = attention_cases.make_case([[600], list(range(70))], head_dim=32)
    case.queries *= 300
    torch.testing.assert_close(case.run("triton").double(), attention_cases.dense_attention(case), atol=1e-3, rtol=1e-3)


@check
def queries_may_be_a_view_of_wider_rows() -> None:
    case = attention_cases.make_case([[64], list(range(40, 59))], head_dim=32)
    wide = torch.full((len(case.queries), 700), float("nan"))
    wide[:, 100:356] = case.queries.flatten(1)
    view = wide[:, 100:356].unflatten(1, case.queries.shape[1:])
    assert torch.equal(replace(case, queries=view).run("triton"), case.run("triton"))


def part(case: attention_cases.AttentionCase, sequence: int, rows: slice) -> attention_cases.AttentionCase:
    """Some rows of one sequence, without the rest of the batch."""
    batch = AttentionBatch(
        torch.tensor([0, rows.stop - rows.start], dtype=torch.int32),
        case.batch.last_kv_index[rows],
        case.batch.block_tables[sequence : sequence + 1],
    )
    return replace(case, queries=case.queries[rows], batch=batch)


@check
def bits_of_a_row_do_not_depend_on_the_batch() -> None:
    rows_of = [[600], [0], list(range(35)), list(range(505, 540)), list(range(7, 80, 9))]
    for dtype in (torch.float32, torch.float16):
        case = attention_cases.make_case(rows_of, head_dim=16, group=3, dtype=dtype)
        together = case.run("triton")
        for sequence in range(len(rows_of)):
            rows = case.rows(sequence)
            assert torch.equal(part(case, sequence, rows).run("triton"), together[rows])


@check
def bits_of_a_float32_row_do_not_depend_on_the_chunk() -> None:
    """Every chunk from one row, which is a decode, to all of them, across the end of a segment."""
    case = attention_cases.make_case([list(range(507, 517))], head_dim=16, group=3)
    latents = attention_cases.make_case([list(range(255, 258))], head_dim=576, group=20, shared=True)
    with pytest.MonkeyPatch.context() as patch:
        # The interpreter multiplies with BLAS, whose order of summation depends on a row's place in the matrix.
        patch.setattr(np, "matmul", lambda a, b, dtype: (a[:, :, None] * b[None]).astype(dtype).sum(1))
        together = case.run("triton")
        for size in (1, 4, 9):
            for start in range(0, 10, size):
                rows = slice(start, min(10, start + size))
                assert torch.equal(part(case, 0, rows).run("triton"), together[rows])
        assert torch.equal(part(latents, 0, slice(1, 2)).run("triton"), latents.run("triton")[1:2])


@check
def an_empty_batch_is_fine() -> None:
    case = attention_cases.make_case([[3]], head_dim=16)
    starts, index = torch.zeros(1, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    batch = AttentionBatch(starts, index, torch.empty(0, 4, dtype=torch.int32))
    assert replace(case, queries=case.queries[:0], batch=batch).run("triton").shape == (0, 8, 16)


@check
def store() -> None:
    from kvllm.kernels.store import store_kv

    for dtype in (torch.float32, torch.bfloat16):
        cache, rows = random_cache(dtype), random_cache(dtype, num_blocks=1).data.flatten()
        qkv = rows[: 5 * 900].view(5, 900)
        keys, values = qkv[:, 10:154].unflatten(1, (3, 48)), qkv[:, 400:544].unflatten(1, (3, 48))
        expected = cache.data.clone()
        slots = torch.tensor([17, -1, 0, 12 * 16 - 1, 100])
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[1, 0, slot // 16, :, slot % 16] = keys[row]
                expected[1, 1, slot // 16, :, slot % 16] = values[row]
        store_kv(cache.keys(1), cache.values(1), keys, values, slots)
        assert torch.equal(bits_of(cache.data), bits_of(expected))
    cache = random_cache(torch.bfloat16, head_dim=576, shared=True)
    expected, latents = cache.data.clone(), random_cache(torch.bfloat16, head_dim=576).data[0, 0, :2, :, 3].contiguous()
    expected[1, 0, 2, :, 5], expected[1, 0, 11, :, 0] = latents
    store_kv(cache.keys(1), cache.values(1), latents, latents, torch.tensor([2 * 16 + 5, 11 * 16]))
    assert torch.equal(bits_of(cache.data), bits_of(expected))


@check
def copies_of_blocks() -> None:
    from kvllm.kernels.copy_blocks import copy_blocks

    for dtype, head_dim in ((torch.float32, 48), (torch.bfloat16, 96)):  # a block of less and of more than a chunk
        cache = random_cache(dtype, head_dim=head_dim)
        expected = cache.data.clone()
        expected[:, :, torch.tensor([5, 0, 1])] = cache.data[:, :, torch.tensor([2, 2, 8])]
        copy_blocks(cache.data, torch.tensor([2, 2, 8]), torch.tensor([5, 0, 1]))
        assert torch.equal(bits_of(cache.data), bits_of(expected))


@check
def compaction() -> None:
    """In place and out of place, more rows than a tile, and regions that end early."""
    from kvllm.kernels.compact import compact

    sources = torch.tensor([[11, 3, 7, 1, 8, 2], [0, 6, 99, 99, 99, 99]])
    for dtype in (torch.float32, torch.bfloat16):
        for destinations in (sources[:, :5].contiguous(), torch.tensor([[10, 4, 9, 5, 12], [7, -1, -1, -1, -1]])):
            for ragged in (False, True):
                latents = ragged and dtype == torch.bfloat16
                cache = random_cache(dtype, num_blocks=13, head_dim=576 if latents else 48, shared=latents)
                kept = random_kept(2, [96, 32], 3, [75, 16], ragged=ragged)
                expected = literal_compaction(bits_of(cache.data), kept, sources, destinations)
                compact(cache.data, kept, sources, destinations)
                assert torch.equal(bits_of(cache.data), expected)


@check
def compaction_takes_sequences_in_order() -> None:
    """Two sequences share their blocks: one moves its survivors out, then the other compacts in place."""
    from kvllm.kvcache.ops.gpu import GpuOperations

    cache = random_cache(torch.float32)
    reference = PagedKVCache(cache.shape, cache.num_blocks)
    reference.data.copy_(cache.data)
    sources, destinations = torch.tensor([[0, 1, 2], [0, 1, 2]]), torch.tensor([[5], [0]])
    generator = torch.Generator().manual_seed(1)
    kept = torch.rand(2, 2, 3, 48, generator=generator).argsort(-1)[..., :16].sort(-1).values
    GpuOperations(cache, compiled=False).compact(kept, sources, destinations)
    TorchOperations(reference).compact(kept, sources, destinations)
    assert torch.equal(bits_of(cache.data), bits_of(reference.data))


@check
def scores_of_a_window() -> None:
    from kvllm.kernels.scores import window_scores

    for head_dim, heads, kv_heads, window, dtype in (
        (64, 4, 2, 70, torch.float32),
        (96, 3, 3, 150, torch.float16),  # two tiles of keys and of rows
        (4, 8, 1, 50, torch.float32),
        (576, 5, 1, 70, torch.float16),
        (576, 5, 1, 40, torch.float32),
    ):
        queries, keys = window_tensors(0, 2, heads, kv_heads, window, head_dim, dtype)
        found = window_scores(queries, keys, window - 13, head_dim**-0.5)
        expected = dense_scores(queries, keys, 13)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)
        alone = window_scores(queries[1:], keys[1:], window - 13, head_dim**-0.5)
        assert torch.equal(found[1:], alone)


@check
def scores_of_rows_that_see_no_later_key() -> None:
    from kvllm.kernels.scores import window_scores

    queries, keys = window_tensors(2, 2, 4, 2, 90, 64)
    last_kv_index = torch.tensor([0, 5, *range(31, 66, 3), 76, 77, 89])
    rows = queries[:, :, last_kv_index]
    sinks = torch.linspace(-2, 2, 4)
    for squared, softmax in itertools.product((False, True), (mass.Softmax(), mass.Softmax(0.2, 1.5, sinks))):
        options = {"squared": squared, "soft_cap": softmax.soft_cap, "sinks": softmax.sinks}
        found = window_scores(rows, keys, 77, softmax.scale_of(64), last_kv_index, **options)
        sequences = zip(rows, keys[:, :, :77], strict=True)
        expected = [mass.attention_mass(*each, last_kv_index, squared=squared, softmax=softmax) for each in sequences]
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-6)
    for squared in (False, True):
        found = window_scores(rows, keys, 77, 0.125, last_kv_index, squared=squared)
        assert torch.equal(window_scores(rows[1:], keys[1:], 77, 0.125, last_kv_index, squared=squared), found[1:])


@check
def scores_from_rows_of_a_step() -> None:
    """Queries as the recomputation has them, every third row; keys after the scored ones may be anything."""
    from kvllm.kernels.scores import window_scores

    queries, keys = window_tensors(1, 2, 4, 2, 70, 16)
    expected = window_scores(queries[:, :, ::3].contiguous(), keys, 40, 0.25)
    step = queries[:, :, ::3].transpose(1, 2).flatten(0, 1).contiguous()
    keys[:, :, 40:] = float("nan")
    found = window_scores(step.view(2, -1, 4, 16).transpose(1, 2), keys, 40, 0.25)
    assert torch.equal(found, expected)


@check
def methods_choose_the_same_from_keys_in_blocks() -> None:
    """As from copies of them, in two layers at once where no queries say otherwise; the cache has NaNs everywhere else,
    and the last block of a window is not full."""
    for head_dim, block_size, dtype in ((64, 16, torch.float32), (96, 32, torch.float16), (576, 32, torch.float16)):
        cache = PagedKVCache(CacheShape(2, 2, head_dim, block_size, dtype), 12)
        cache.data.fill_(float("nan"))
        tables = torch.tensor([[7, 0, 3, 11, 5, 1], [9, 4, 2, 10, 6, 8]], dtype=torch.int32)[:, : 96 // block_size]
        for layer in range(2):
            cache.keys(layer)[tables.long()] = randn(
                2, 96 // block_size, 2, block_size, head_dim, dtype=dtype, seed=layer
            )
        operations, blocks = TorchOperations(cache), [cache.keys(layer) for layer in range(2)]
        gathered = [operations.gather_keys([layer], tables, 90) for layer in range(2)]
        queries = randn(2, 6, 10, head_dim, dtype=dtype)
        for name, method in METHODS.items():
            if method.spec.keys != "paged" and not method.spec.reselects:
                continue
            layers = 1 if method.spec.queries != "none" else 2
            options = {"retain": 32, "buffer": 8, "chunk_budget": 6, "max_chunk": 4}
            paged = PagedKeys(blocks[:layers], tables, 90, head_dim, dtype)
            copies = torch.cat(gathered[:layers])
            given = queries if layers == 1 else None
            if method.spec.reselects:  # which reads no keys
                sums = {"observed": randn(4, 2, 82).square(), "ages": torch.full((4, 90), 9.0)}
                options |= sums | {"value_norms": copies.float().norm(dim=-1)}
            assert torch.equal(method(given, paged, **options), method(given, copies, **options)), name
        found = keydiff.scores(PagedKeys(blocks, tables, 90, head_dim, dtype))
        torch.testing.assert_close(found, keydiff.scores(torch.cat(gathered)), rtol=1e-5, atol=1e-6)
        alone = keydiff.scores(PagedKeys(blocks[1:], tables[1:], 90, head_dim, dtype))
        assert torch.equal(alone, found[3:])


def both_dtypes(rows: int, width: int) -> list[torch.Tensor]:
    """Not bfloat16: the interpreter truncates where it should round."""
    return [randn(rows, width, dtype=dtype) for dtype in (torch.float32, torch.float16)]


@check
def norms() -> None:
    from kvllm.kernels import elementwise

    for x in (*both_dtypes(3, 1027), *both_dtypes(1, 64)):
        for dtype in {x.dtype, torch.float32}:
            weight = randn(x.shape[1], dtype=dtype, seed=1)
            expected = torch_forms.torch_rms_norm(x.to(dtype), weight, 1e-6).to(x.dtype)
            assert_same_rounding(elementwise.rms_norm(x, weight, 1e-6), expected)
            residual = randn(*x.shape, dtype=x.dtype, seed=2)
            total = residual + x
            normalized = elementwise.add_rms_norm(residual, x, weight, 1e-6)
            assert torch.equal(residual, total)
            expected = torch_forms.torch_rms_norm(total.to(dtype), weight, 1e-6).to(x.dtype)
            assert_same_rounding(normalized, expected)


@check
def gated_activation() -> None:
    from kvllm.kernels import elementwise

    for gate_up in both_dtypes(2, 2 * 1100):
        expected = torch_forms.torch_silu_mul(4 * gate_up)
        assert_same_rounding(elementwise.silu_mul(4 * gate_up), expected)


@check
def recurrent_layers() -> None:
    from kvllm.kernels import gated_delta

    recurrent_checks.assert_convolves(gated_delta.short_convolution, 300, 4, torch.bfloat16)
    recurrent_checks.assert_convolves(gated_delta.short_convolution, 40, 3, torch.float32, silu=False)
    rule = gated_delta.gated_delta_rule
    recurrent_checks.assert_follows_rule(rule, 1, 3, 8, 12, torch.float32)
    recurrent_checks.assert_follows_rule(rule, 2, 2, 16, 40, torch.float16)
    recurrent_checks.assert_follows_rule(rule, 2, 2, 16, 40, torch.bfloat16, [1] * 5)
    recurrent_checks.assert_follows_rule(rule, 1, 2, 130, 12, torch.float32)  # of which no chunks are made
    # Where chunks end, and where they begin to be used: sequences that begin inside of others' chunks.
    recurrent_checks.assert_follows_rule(rule, 2, 4, 72, 40, torch.float32, (17, 64, 16, 33, 96))


@check
def products_of_experts() -> None:
    """Experts without rows, with a part of a tile and with several; sizes that no tile divides."""
    from kvllm.kernels.grouped_linear import grouped_linear

    for counts, depth, width in (((0, 5, 0, 17, 1), 72, 40), ((100, 0, 3), 130, 96), ((0, 0, 0, 1), 16, 70)):
        ends = torch.tensor(counts).cumsum(0)
        experts = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        for dtype, tolerance in ((torch.float32, 2e-6), (torch.float16, 2e-3)):
            x = randn(len(experts), depth, dtype=dtype)
            weight = randn(len(counts), width + 3, depth, dtype=dtype, seed=1)[:, :width]
            bias = randn(len(counts), width, dtype=dtype, seed=2)
            exact = (weight[experts].double() @ x.double()[:, :, None])[:, :, 0]
            for added in (None, bias):
                expected = exact if added is None else exact + added[experts].double()
                found = grouped_linear(x, weight, added, ends)
                torch.testing.assert_close(found.double(), expected, atol=30 * tolerance, rtol=tolerance)


@check
def products_of_integers() -> None:
    """Few rows, whose channels are shared out, and many; groups larger and smaller than what is read at a time, and of
    a whole row; some rows of a matrix, and experts, with a stride that is no multiple of a tile."""
    cases = (
        (4, 32, False, 1, 224, 96, 0),
        (4, 128, True, 20, 1280, 70, 0),
        (4, 8, True, 70, 72, 33, 0),
        (8, 16, True, 3, 144, 130, 0),
        (8, 300, False, 17, 300, 40, 0),
        (4, 64, False, 40, 320, 48, 3),
        (8, 32, True, 200, 96, 20, 2),
    )
    for bits, group, shifted, num_rows, depth, width, experts in cases:
        for dtype, tolerance in ((torch.float32, 2e-6), (torch.float16, 2e-3)):
            stride = width + 3
            shape, integers = (stride * max(1, experts), depth), IntegerGroups(bits, group, shifted)
            matrix = QuantizedMatrix.of(shape, integers, torch.device("cpu"))
            values = randn(*shape).mul(3).round().clamp(-8, 7).to(torch.int8) + matrix.excess
            scales, shifts = (randn(shape[0], depth // group, seed=seed) / 8 for seed in (1, 2))
            matrix.write(0, values, scales, shifts if shifted else None)
            x = randn(num_rows, depth, dtype=dtype, seed=3)
            of_rows = torch.arange(max(1, experts)).repeat_interleave(-(-num_rows // max(1, experts)))[:num_rows]
            plain = matrix.rows(torch.arange(shape[0])).to(dtype).double().unflatten(0, (-1, stride))[:, :width]
            exact = (plain[of_rows] @ x.double()[:, :, None])[:, :, 0]
            bias = randn(max(1, experts), width, dtype=dtype, seed=4)
            ends = torch.searchsorted(of_rows, torch.arange(experts), right=True)
            of_experts = (experts, stride, ends) if experts else None
            for added in (None, bias):
                expected = exact if added is None else exact + added[of_rows].double()
                found = matrix.multiply(x, added if added is None or experts else added[0], width, of_experts)
                torch.testing.assert_close(found.double(), expected, atol=30 * tolerance, rtol=tolerance)
            part = matrix.part(16, 8) if shape[0] > 24 else matrix.part(0, 8)
            expected = part.rows(torch.arange(8)).to(dtype).double()
            torch.testing.assert_close(
                part.multiply(x, None).double(), x.double() @ expected.T, atol=30 * tolerance, rtol=tolerance
            )


@check
def products_of_adapters() -> None:
    """Of tokens without one, of one without tokens, of one that changes nothing, and of lower ranks, beside which there
    is whatever was; sizes that no tile divides, one and several parts of the channels; a matrix whose first rows alone
    are multiplied."""
    from kvllm.kernels.low_rank import add_low_rank

    for tokens, depth, width, ranks in (
        (21, 2100, 70, (6, 64, 0, 5)),
        (300, 1030, 40, (4, 12, 2)),
        (1, 72, 100, (70, 20)),
        (3, 72, 100, (3,)),
    ):
        most, rank = len(ranks), max(ranks)
        numbers = randn(tokens, seed=5).mul(10).long() % (most + 1)
        numbers[numbers >= most - (most > 3)] = NO_ADAPTER
        rows = AdapterRows(numbers, most)
        for dtype, tolerance in ((torch.float32, 2e-6), (torch.float16, 4e-3)):
            x, product = randn(tokens, depth, dtype=dtype), randn(tokens, width, dtype=dtype, seed=1)
            down, up = randn(most, rank, depth, dtype=dtype, seed=2), randn(most, width + 3, rank, dtype=dtype, seed=3)
            down /= depth**0.5
            exact, held = product.double(), torch.arange(rank) < torch.tensor(ranks)[:, None]
            add_plainly(exact, x.double(), (down * held[..., None]).double(), (up * held[:, None]).double(), numbers)
            add_low_rank(product, x, down, up, torch.tensor(ranks, dtype=torch.int32), *rows.sorted)
            torch.testing.assert_close(product.double(), exact, atol=4 * tolerance, rtol=tolerance)


@check
def rotation() -> None:
    """With q/k norm, by weights of the same type or of float32, and without, 6 query heads and 3 or no KV heads; values
    after them stay."""
    from kvllm.kernels import elementwise

    for head_dim, kv_heads, norm in ((64, 3, True), (96, 3, False), (16, 0, True), (32, 2, torch.float32)):
        for qkv in both_dtypes(4, 12 * head_dim):
            dtype = norm if norm is torch.float32 else qkv.dtype
            weights = [randn(head_dim, dtype=dtype, seed=seed) if norm else None for seed in (1, 2)]
            positions, table = torch.tensor([99, 0, 7, 7]), cos_sin_table(head_dim)
            expected = qkv.clone()
            torch_forms.torch_rotary(expected, positions, table, 6, kv_heads, head_dim, *weights)
            elementwise.rotary(qkv, positions, table, 6, kv_heads, head_dim, *weights)
            assert_same_rounding(qkv, expected)


def generate_tokens(
    path: Path, backend: str, compression: CompressionConfig, *, recorded: bool = False, in_blocks: bool = False
) -> tuple[list[list[int]], AttentionMass | None]:
    """The tokens of an engine that compresses, and the mass that it has added up.

    in_blocks: kernels read the keys of windows from the cache, as on a GPU.
    """
    llm = LLM(
        path,
        dtype="float32",
        max_model_len=64,
        block_size=16,
        num_gpu_blocks_override=12,
        max_num_seqs=4,
        attention_backend=backend,
        compression=compression,
    )
    runner = llm.llm_engine.executor.runner
    if recorded:
        runner.forward_pass.use_graphs(lambda step: step, runner.cache.num_blocks)
    if in_blocks:
        assert runner.compressor
        runner.compressor.selector.copies_keys = False
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    found = llm.generate([list(range(5, 45)), list(range(7, 20)), [9, 8]], params, use_tqdm=False)
    assert llm.stats().compression_events > 0 and bool(runner.forward_pass.graphs) == recorded
    mass = next((feature for feature in runner.features if isinstance(feature, AttentionMass)), None)
    return [request.outputs[0].token_ids for request in found], mass


@check
def the_engine_generates_the_same_tokens() -> None:
    """Prompts, decodes and a compression event. H2O's mass is added up by the kernels, in recorded steps filled up from
    three sequences to four as well; AdaKV leaves heads of different lengths."""
    window = {"period": 4, "window_blocks": 2, "retain_blocks": 1, "buffer": 4, "compress_prompt": True}
    cache = {"policy": "threshold", "threshold_tokens": 32, "budget_tokens": 16, "buffer": 4, "query_window": 4}
    with TemporaryDirectory() as directory:
        path = Path(directory)
        make_checkpoint(path, "qwen3", head_dim=16, num_hidden_layers=2, num_attention_heads=4)
        for options in (
            {"method": "kara", "chunk_budget": 4, **window},
            {"method": "h2o", **window},
            {"method": "adakv", **cache},
        ):
            compression = paper_compression(**options)
            expected, _ = generate_tokens(path, "reference", compression)
            found, mass = generate_tokens(path, "triton", compression)
            assert found == expected, options["method"]
            if mass:
                recorded, recorded_mass = generate_tokens(path, "triton", compression, recorded=True)
                assert recorded == expected and recorded_mass
                assert torch.equal(recorded_mass.mass[:, :-1], mass.mass[:, :-1])  # the last row is no sequence's


@check
def the_engine_scores_keys_in_blocks() -> None:
    """With queries layer by layer, without them two layers at once; and nothing is gathered."""
    window = {"period": 4, "window_blocks": 2, "retain_blocks": 1, "buffer": 4, "compress_prompt": True}
    with TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        path = Path(directory)
        make_checkpoint(path, "qwen3", head_dim=16, num_hidden_layers=2, num_attention_heads=4)
        methods = [paper_compression(method=name, **window) for name in ("kara", "keydiff")]
        expected = [generate_tokens(path, "reference", each) for each in methods]
        patch.delattr(KVOperations, "gather_keys")
        assert [generate_tokens(path, "reference", each, in_blocks=True) for each in methods] == expected


@check
def what_the_backend_refuses() -> None:
    shape = CacheShape(1, 2, 64, 16, torch.float32)
    for message, fields in {
        "bfloat16 in Triton's interpreter.*use 'cpu' or 'reference'": {"dtype": torch.bfloat16},
        "float32, not torch.float64": {"dtype": torch.float64},
        "power of two from 16 on, not 8": {"block_size": 8},
        "power of two from 16 on, not 48": {"block_size": 48},
        "multiple of 16 up to 512, or 576 in latent attention, not 72": {"head_dim": 72},
        "latent attention, not 576": {"head_dim": 576},
        "latent attention, not 592": {"head_dim": 592, "shared": True},
    }.items():
        with pytest.raises(ConfigError, match=message):
            make_backend("triton", PagedKVCache(replace(shape, **fields), 2), 4, 1.0)
    for fields in ({}, {"head_dim": 512}, {"head_dim": 576, "shared": True}):
        assert make_backend("triton", PagedKVCache(replace(shape, **fields), 2), 4, 1.0).name == "triton"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in CHECKS]
)
def test_in_the_interpreter(name: str, failures: dict[str, str]) -> None:
    assert name not in failures, failures[name]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, head_dim, group", [(torch.bfloat16, 128, 4), (torch.float32, 96, 3)])
def test_attention_mass_on_a_device(dtype: torch.dtype, head_dim: int, group: int) -> None:
    rows = [[1100], list(range(300)), [0], list(range(40, 59))]
    case = attention_cases.make_case(rows, head_dim=head_dim, group=group, dtype=dtype)
    mass = torch.zeros(1, 4, attention_cases.KV_HEADS, 1200, device="cuda")
    run_observed(case.to("cuda"), mass, [3, 0, 1, 2])
    for sequence, row in enumerate([3, 0, 1, 2]):
        expected = dense_mass(case, sequence)
        found = mass[0, row, :, : expected.shape[1]].cpu().double()
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_cpu_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cache = PagedKVCache(CacheShape(1, 2, 64, 16, torch.float32), 2)
    with pytest.raises(ConfigError, match="'triton' runs on CUDA devices, not on cpu: use 'cpu' or 'reference'"):
        make_backend("triton", cache, 4, 1.0)
    assert make_backend("auto", cache, 4, 1.0).name == "cpu"
