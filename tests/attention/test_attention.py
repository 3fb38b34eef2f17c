"""Both attention backends against a literal dense attention in float64, and the promises about bits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from kvllm.attention.base import AttentionBackend, AttentionBatch
from kvllm.attention.registry import make_backend
from kvllm.errors import ConfigError
from kvllm.kvcache.cache import CacheShape, PagedKVCache

KV_HEADS = 2
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The matrices are small: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass
class Case:
    """A cache with a few sequences in it, and query rows over them."""

    cache: PagedKVCache
    keys: list[torch.Tensor]  # per sequence [entries, kv_heads, head_dim]
    values: list[torch.Tensor]
    queries: torch.Tensor
    batch: AttentionBatch

    @property
    def scale(self) -> float:
        return self.cache.shape.head_dim**-0.5

    def backend(self, name: str) -> AttentionBackend:
        return make_backend(name, self.cache, self.queries.shape[1], self.scale)

    def run(self, name: str = "cpu") -> torch.Tensor:
        backend = self.backend(name)
        return backend.run(0, self.queries, backend.plan(self.batch))

    def rows(self, sequence: int) -> slice:
        return slice(*self.batch.query_start_loc[sequence : sequence + 2].tolist())


def make_case(
    last_kv_index: list[list[int]],
    *,
    block_size: int = 16,
    head_dim: int = 64,
    group: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """One sequence per list in `last_kv_index`. Slots that hold no entry are NaN, unused table columns invalid."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    lengths = [rows[-1] + 1 for rows in last_kv_index]
    num_blocks = [-(-length // block_size) for length in lengths]
    cache = PagedKVCache(CacheShape(1, KV_HEADS, head_dim, block_size, dtype), sum(num_blocks) + 3)
    cache.data.fill_(float("nan"))
    free = torch.randperm(cache.num_blocks, generator=generator).tolist()
    tables = torch.full((len(lengths), max(num_blocks) + 2), -7, dtype=torch.int32)
    keys, values = [], []
    for sequence, (length, count) in enumerate(zip(lengths, num_blocks, strict=True)):
        blocks = torch.tensor([free.pop() for _ in range(count)])
        tables[sequence, :count] = blocks
        keys.append(randn(length, KV_HEADS, head_dim))
        values.append(randn(length, KV_HEADS, head_dim))
        entries = torch.arange(length)
        cache.keys(0)[blocks[entries // block_size], :, entries % block_size] = keys[-1]
        cache.values(0)[blocks[entries // block_size], :, entries % block_size] = values[-1]
    index = torch.tensor([i for rows in last_kv_index for i in rows], dtype=torch.int32)
    starts = torch.tensor([0] + [len(rows) for rows in last_kv_index]).cumsum(0).int()
    return Case(
        cache, keys, values, randn(len(index), KV_HEADS * group, head_dim), AttentionBatch(starts, index, tables)
    )


def dense_attention(case: Case) -> torch.Tensor:
    """Softmax attention of every row over its own entries, written out, in float64."""
    output = torch.empty(case.queries.shape, dtype=torch.float64)
    group = case.queries.shape[1] // KV_HEADS
    for sequence, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        rows = case.rows(sequence)
        later = torch.arange(len(keys)) > case.batch.last_kv_index[rows, None]
        for head in range(case.queries.shape[1]):
            hidden = later | hole(case.batch, sequence, head // group, len(keys))
            scores = case.queries[rows, head].double() @ keys[:, head // group].double().T * case.scale
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            output[rows, head] = weights @ values[:, head // group].double()
    return output


def hole(batch: AttentionBatch, sequence: int, kv_head: int, length: int) -> torch.Tensor:
    """bool `[length]`, the entries that a head of layer 0 lacks."""
    if batch.packed_len is None or batch.head_lengths is None:
        return torch.zeros(length, dtype=torch.bool)
    entries = torch.arange(length)
    return (entries >= batch.head_lengths[0, sequence, kv_head]) & (entries < batch.packed_len[sequence])


# A decode, a first token, a whole prompt, a chunk behind cached entries, a recomputation with stride 3, a long decode.
MIXED = [[64], [0], list(range(35)), list(range(40, 59)), list(range(7, 80, 3)), [600]]
# Ends of tiles (64 entries) and of segments (512), one row each, and a chunk across both.
EDGES = [[62], [63], [64], [511], [512], [513], [1023], list(range(505, 580))]


def assert_matches_dense(case: Case, name: str, tolerance: float | None = None) -> None:
    tolerance = tolerance or TOLERANCE[case.queries.dtype]
    torch.testing.assert_close(case.run(name).double(), dense_attention(case), atol=tolerance, rtol=tolerance)


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


# Heads that hold different numbers of entries: the rows of a sequence, `packed_len`, and the lengths of both heads.
HOLES = [
    ([64], 50, (50, 31)),  # one head has none
    ([64], 64, (0, 10)),  # one head has nothing but the row's own entry
    (list(range(40, 59)), 40, (17, 0)),  # a chunk right behind the packed part
    (list(range(23, 80, 3)), 20, (3, 20)),  # a recomputation with stride 3
    (list(range(35)), 0, (0, 0)),  # a prompt
    ([600], 0, (7, 99)),  # never compressed: the lengths mean nothing
    ([700], 650, (5, 649)),  # across tiles and segments, and a hole of one entry
    (list(range(1100, 1130)), 1090, (64, 513)),
    ([300], 256, (256, 256)),  # compressed, and no hole
]


def make_holes(**options) -> Case:
    """A case of HOLES; a hole is NaN."""
    case = make_case([rows for rows, _, _ in HOLES], **options)
    batch = replace(
        case.batch,
        packed_len=torch.tensor([packed_len for _, packed_len, _ in HOLES], dtype=torch.int32),
        head_lengths=torch.tensor([[lengths for _, _, lengths in HOLES]], dtype=torch.int32),
    )
    block_size = case.cache.shape.block_size
    for sequence, values in enumerate(case.values):
        for head in range(KV_HEADS):
            (entries,) = hole(batch, sequence, head, len(values)).nonzero(as_tuple=True)
            blocks = batch.block_tables[sequence].long()[entries // block_size]
            case.cache.data[0, :, blocks, head, entries % block_size] = float("nan")
    return replace(case, batch=batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_holes_are_not_attended(name: str, block_size: int, dtype: torch.dtype) -> None:
    assert_matches_dense(make_holes(block_size=block_size, head_dim=16, dtype=dtype), name)


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("head_dim", [4, 48, 128])
def test_holes_in_any_shape_of_head(head_dim: int, group: int) -> None:
    for block_size in (1, 3, 16, 256):
        assert_matches_dense(make_holes(block_size=block_size, head_dim=head_dim, group=group), "cpu")


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_each_layer_has_its_own_holes(name: str) -> None:
    """The same entries in two layers, with the lengths of the heads exchanged."""
    case = make_case([[40]], head_dim=16)
    shape = replace(case.cache.shape, num_layers=2)
    cache = PagedKVCache(shape, case.cache.num_blocks)
    cache.data.copy_(case.cache.data.expand_as(cache.data))
    lengths = torch.tensor([[[9, 25]], [[25, 9]]], dtype=torch.int32)
    batch = replace(case.batch, packed_len=torch.tensor([30], dtype=torch.int32), head_lengths=lengths)
    backend = make_backend(name, cache, case.queries.shape[1], case.scale)
    for layer in range(2):
        found = backend.run(layer, case.queries, backend.plan(batch))
        one = replace(case, batch=replace(batch, head_lengths=lengths[layer : layer + 1]))
        torch.testing.assert_close(found.double(), dense_attention(one), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_bits_of_a_row_beside_holes_do_not_depend_on_the_batch(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    case = make_holes(dtype=torch.bfloat16)
    together = case.run()
    for sequence in range(len(HOLES)):
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 3, 4])
def test_bits_of_a_row_do_not_depend_on_the_batch(group: int, dtype: torch.dtype) -> None:
    case = make_case(MIXED + EDGES, group=group, dtype=dtype)
    together = case.run()
    for sequence in range(len(case.keys)):
        rows = case.rows(sequence)
        for row in range(rows.start, rows.stop):
            alone = replace(
                case,
                queries=case.queries[row : row + 1],
                batch=AttentionBatch(
                    torch.tensor([0, 1], dtype=torch.int32),
                    case.batch.last_kv_index[row : row + 1],
                    case.batch.block_tables[sequence : sequence + 1],
                ),
            )
            assert torch.equal(alone.run()[0], together[row])


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_later_entries_of_the_same_sequence_stay_hidden(dtype: torch.dtype) -> None:
    case = make_case([list(range(100))], dtype=dtype, group=2)
    before = case.run()
    blocks = case.batch.block_tables[0].long()
    for first_hidden in (99, 70, 64, 31):
        entries = torch.arange(first_hidden, 100)
        case.cache.data[0, :, blocks[entries // 16], :, entries % 16] = float("nan")
        after = case.run()
        assert torch.equal(after[:first_hidden], before[:first_hidden])
        assert after[first_hidden:].isnan().all()


def check_every_kernel() -> None:
    """Run in a process of its own by test_every_instruction_set."""
    for dtype in (torch.float32, torch.bfloat16):
        for head_dim, group, block_size in ((4, 3, 3), (48, 2, 16), (64, 4, 16), (80, 1, 256), (128, 8, 16)):
            case = make_case(MIXED, head_dim=head_dim, group=group, block_size=block_size, dtype=dtype)
            assert_matches_dense(case, "cpu")
            evicted_mask = make_holes(head_dim=head_dim, group=group, block_size=block_size, dtype=dtype)
            assert_matches_dense(evicted_mask, "cpu")
        for group in (1, 3, 4):
            test_bits_of_a_row_do_not_depend_on_the_batch(group, dtype)
        test_later_entries_of_the_same_sequence_stay_hidden(dtype)


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512", "avx512_bf16"])
def test_every_instruction_set(isa: str) -> None:
    script = (
        "import torch\n"
        "from kvllm._extension import operator\n"
        "from tests.attention import test_attention, test_cpu_ops\n"
        "test_attention.check_every_kernel()\n"
        "test_cpu_ops.check_every_kernel()\n"
        "print(operator('cpu_isa')())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "KVLLM_CPU_ISA": isa, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    if result.stdout.strip() != isa:
        pytest.skip(f"this processor stops at {result.stdout.strip()}")


def test_unknown_instruction_set() -> None:
    script = "from kvllm._extension import operator; operator('cpu_isa')()"
    environment = {**os.environ, "KVLLM_CPU_ISA": "sse9"}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert result.returncode != 0
    assert "KVLLM_CPU_ISA is 'sse9': use baseline, avx2, avx512 or avx512_bf16" in result.stderr


def replaced(case: Case, **fields: torch.Tensor) -> Case:
    return replace(case, batch=replace(case.batch, **fields))


def test_operator_refuses_bad_batches() -> None:
    case = make_case([[40], [3, 5]], head_dim=16)
    tables = case.batch.block_tables.clone()
    tables[0, 2] = case.cache.num_blocks
    bad = {
        "block .* of sequence 0 is not in the cache": replaced(case, block_tables=tables),
        "is beyond a table of": replaced(case, last_kv_index=torch.tensor([4000, 3, 5], dtype=torch.int32)),
        "negative or descends": replaced(case, last_kv_index=torch.tensor([40, 5, 3], dtype=torch.int32)),
        "sequence 0 has no rows": replaced(case, query_start_loc=torch.tensor([0, 0, 3], dtype=torch.int32)),
        "not from 0 to the number of rows": replaced(case, query_start_loc=torch.tensor([0, 1, 2], dtype=torch.int32)),
        "last_kv_index has dtype Long": replaced(case, last_kv_index=case.batch.last_kv_index.long()),
        "dtype Half": replace(case, queries=case.queries.half()),
        "not contiguous": replace(case, queries=case.queries.transpose(0, 1).contiguous().transpose(0, 1)),
    }
    packed_len = torch.tensor([40, 4], dtype=torch.int32)
    lengths = torch.tensor([[[40, 40], [4, 4]]], dtype=torch.int32)
    bad |= {
        "sequence 1 has 4 packed entries, and queries among them": replaced(
            case, packed_len=packed_len, head_lengths=lengths
        ),
        "packed and head_lengths go together": replaced(case, packed_len=packed_len),
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


def test_make_backend() -> None:
    cache = PagedKVCache(CacheShape(1, 2, 16, 4, torch.float32), 4)
    assert make_backend("auto", cache, 4, 1.0).name == "cpu"
    assert make_backend("reference", cache, 4, 1.0).name == "reference"
    with pytest.raises(ConfigError, match="unknown attention backend 'flash'.*'auto' or one of cpu, flash_attn"):
        make_backend("flash", cache, 4, 1.0)
    half = PagedKVCache(CacheShape(1, 2, 16, 4, torch.float16), 4)
    with pytest.raises(ConfigError, match="float32 or bfloat16 with an even head_dim, not torch.float16"):
        make_backend("cpu", half, 4, 1.0)
