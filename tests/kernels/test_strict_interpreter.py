"""The Triton kernels in an interpreter that forgives nothing (`strict_interpreter`): random shapes, and caches and
queries of more than 2**31 elements. Slots that no sequence holds are NaN."""

from __future__ import annotations

import json
import mmap
import traceback
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, is_hypothesis_test, settings
from hypothesis import strategies as st

from kvllm.attention.base import AttentionBatch
from kvllm.attention.layer import PLAIN, LayerAttention
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS
from tests.helpers import attention_cases
from tests.helpers.caches import literal_compaction, random_cache, random_kept
from tests.helpers.literal_kara import dense_scores, window_tensors
from tests.helpers.processes import run_python
from tests.helpers.strict_interpreter import strict_interpreter
from tests.helpers.tensors import bits_of, randn

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton, which is not installed")

EXAMPLES = {False: 5, True: 50}
"""Random shapes of each check, by whether long tests are run."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
TOKENS = st.one_of(
    st.integers(0, 700).map(lambda index: [index]),
    st.tuples(st.integers(0, 600), st.integers(2, 20), st.integers(1, 3)).map(
        lambda chunk: list(range(chunk[0], chunk[0] + chunk[1] * chunk[2], chunk[2]))
    ),
)
LAYERS = st.builds(
    LayerAttention,
    window=st.none() | st.integers(1, 600),
    soft_cap=st.none() | st.just(0.5),
    sinks=st.booleans(),
)


@given(
    rows=st.lists(TOKENS, min_size=1, max_size=4),
    shape=st.fixed_dictionaries(
        {
            "head_dim": st.sampled_from([16, 48, 80, 128]),
            "group": st.integers(1, 9),
            "block_size": st.sampled_from([16, 64, 256]),
            "dtype": st.sampled_from([torch.float32, torch.float16]),
            "kv_cache_dtype": st.sampled_from(["auto", "auto", *KV_FORMATS]),
            "seed": st.integers(0, 1000),
        }
    ),
    layer=LAYERS,
    capability=st.sampled_from([80, 90]),
)
@example(
    [[70], list(range(60, 80))],
    {"head_dim": 256, "group": 1, "block_size": 64, "dtype": torch.float16, "kv_cache_dtype": "int8"},
    LayerAttention(window=66, soft_cap=0.5, sinks=True),
    80,
)
@example([list(range(130, 140))], {"head_dim": 128, "group": 2, "block_size": 256, "dtype": torch.float16}, PLAIN, 80)
@example([list(range(130, 140))], {"head_dim": 128, "group": 2, "block_size": 256, "dtype": torch.float16}, PLAIN, 90)
@example(
    [[270], list(range(60, 64))],
    {"head_dim": 576, "group": 20, "block_size": 16, "dtype": torch.float16, "shared": True},
    PLAIN,
    80,
)
@example(
    [[70], list(range(60, 64))], {"head_dim": 512, "group": 2, "block_size": 16, "dtype": torch.float16}, PLAIN, 80
)
def attention(rows: list[list[int]], shape: dict, layer: LayerAttention, capability: int) -> None:
    """Decodes and chunks, with the tiles of two kinds of devices: narrower ones of wide codes and of 16 bits on one,
    whole ones in one copy on the other."""
    from kvllm.kernels import capability as device

    case = attention_cases.with_options(attention_cases.make_case(rows, **shape), layer)
    with patch.object(device, "capability", lambda: capability), strict_interpreter(shape.get("seed", 0)):
        attention_cases.assert_matches_dense(case, "triton", TOLERANCE[shape["dtype"]])


@given(
    heads=st.tuples(st.integers(1, 3), st.integers(1, 5)),
    window=st.integers(20, 100),
    head_dim=st.sampled_from([16, 24, 64]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 1000),
)
@example((1, 1), 70, 256, torch.float16, 0)
@example((1, 3), 40, 576, torch.float16, 0)
def scores_of_windows(heads: tuple[int, int], window: int, head_dim: int, dtype: torch.dtype, seed: int) -> None:
    """With the tiles of devices that have little memory, which are other ones for wide heads."""
    from kvllm.kernels import capability as device
    from kvllm.kernels.scores import window_scores

    kv_heads, group = heads
    queries, keys = window_tensors(seed, 2, kv_heads * group, kv_heads, window, head_dim, dtype)
    scored, buffer = window - window // 8, window // 8
    with patch.object(device, "capability", lambda: 80), strict_interpreter(seed):
        found = window_scores(queries, keys, scored, head_dim**-0.5)
    torch.testing.assert_close(found.double(), dense_scores(queries, keys, buffer), rtol=1e-4, atol=1e-6)


@given(lengths=st.lists(st.integers(1, 64), min_size=2, max_size=2), ragged=st.booleans(), seed=st.integers(0, 1000))
def moves(lengths: list[int], ragged: bool, seed: int) -> None:
    from kvllm.kernels.compact import compact

    cache, blocks = random_cache(torch.float16), torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    sources, destinations = blocks[:8].view(2, 4), blocks[:8].view(2, 4)[:, :3].contiguous()
    counts = [max(6, min(length, 48)) for length in lengths]
    kept = random_kept(2, [64, 64], 3, counts, ragged=ragged)
    expected = literal_compaction(cache.data, kept, sources, destinations)
    with strict_interpreter(seed):
        for part in cache.parts:
            compact(part, kept, sources, destinations)
    assert torch.equal(bits_of(cache.data), bits_of(expected))


def reserved(num_bytes: int) -> torch.Tensor:
    """Addresses of zeros; memory is taken for what is written alone."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)


def far_cache(shape: CacheShape, num_blocks: int) -> PagedKVCache:
    def empty(size: tuple[int, ...] | int, dtype: torch.dtype, device: object) -> torch.Tensor:
        numbers = torch.Size((size,) if isinstance(size, int) else size)
        return reserved(numbers.numel() * dtype.itemsize).view(dtype).view(numbers)

    with patch.object(torch, "empty", empty):
        return PagedKVCache(shape, num_blocks)


def of_a_step(
    cache: PagedKVCache, blocks: list[int], wide: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """What the kernels make of two sequences in some blocks; `wide` gives tokens another stride."""
    from kvllm.attention.triton import TritonBackend
    from kvllm.kernels.codes import as_kernels_read
    from kvllm.kernels.keydiff import key_differences
    from kvllm.kernels.scores import window_scores
    from kvllm.kvcache.ops.gpu import GpuOperations

    shape = cache.shape
    operations, table = GpuOperations(cache, compiled=False), torch.tensor(blocks, dtype=torch.int32)
    vectors = [wide(randn(48, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype, seed=i)) for i in range(2)]
    slots = table.long()[:3].repeat_interleave(16) * 16 + torch.arange(48) % 16
    operations.store(0, vectors[0], vectors[1], slots)
    operations.copy_blocks(table[1:2].long(), table[3:4].long())
    tables, index = table[torch.tensor([[0, 3], [1, 2]])], torch.tensor([20, 27, 28, 29, 30, 31], dtype=torch.int32)
    batch = AttentionBatch(torch.tensor([0, 1, 6], dtype=torch.int32), index, tables)
    batch = replace(batch, table_slots=torch.tensor([1, 0], dtype=torch.int32), mass=torch.zeros(1, 2, 2, 32))
    backend = TritonBackend(cache, 4, 0.25)
    queries = wide(randn(6, 4, shape.head_dim, dtype=shape.dtype, seed=2))
    found = [backend.run(0, queries, backend.plan(batch)), batch.mass]
    keys, of_window = as_kernels_read([cache.keys(0)]), queries[:5].transpose(0, 1)[None].expand(2, -1, -1, -1)
    offsets = torch.arange(20, 25)
    found.append(window_scores(of_window, keys[0], 25, 0.25, offsets, tables=tables))
    found.append(key_differences(keys, tables, 30, shape.head_dim, shape.dtype))
    kept = torch.arange(1, 32, 2).expand(1, 1, 2, -1).contiguous()
    operations.compact(kept, tables[:1].long(), table[None, 4:5].long())
    return [*found, *(part[:, :, table.long()].clone() for part in cache.parts)]


def offsets_of_64_bits() -> None:
    """The same bits where the blocks and the tokens lie 2**31 elements further on."""
    for name, head_dim in (("auto", 16), ("int8", 16), ("int6_int4_hadamard", 32)):
        shape = CacheShape(1, 2, head_dim, 16, torch.float16, kv_format=KV_FORMATS.get(name))
        near = PagedKVCache(shape, 8)
        bytes_of_block = near.data.numel() // 8 // (2 if name == "auto" else 1)  # elements of a plane, or bytes of both
        num_blocks = (1 << 31) // bytes_of_block * (1 if name == "auto" else 2) + 8
        far = far_cache(shape, num_blocks)
        near.data.zero_()

        def widely(vectors: torch.Tensor) -> torch.Tensor:
            stride = (1 << 31) // len(vectors) // 16 * 16 + 16 * vectors[0].numel()
            wide = reserved(2 * (stride * len(vectors) + 8)).view(torch.float16)
            view = wide.as_strided(vectors.shape, (stride, vectors.shape[2], 1))
            return view.copy_(vectors)

        with strict_interpreter():
            expected = of_a_step(near, [5, 0, 7, 2, 3], lambda vectors: vectors)
            last = num_blocks - 8
            found = of_a_step(far, [last + 5, last, last + 7, last + 2, last + 3], widely)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name


def what_it_finds() -> None:
    """A kernel that reads its neighbour's number, which the last program does not have, and one that overflows."""
    from tests.helpers import strict_kernels

    x = torch.arange(4.0)
    with strict_interpreter(), pytest.raises(IndexError, match="a load of 1 elements outside"):
        strict_kernels.add_next[(4,)](x)
    with strict_interpreter(), pytest.raises(AssertionError, match="int32 overflow of operation mul"):
        strict_kernels.far_offset[(1,)](x, 1 << 30)


CHECKS: list[Callable[[], None]] = [attention, scores_of_windows, moves, offsets_of_64_bits, what_it_finds]


def run_checks(long: bool) -> None:
    failures = {}
    for check in CHECKS:
        if is_hypothesis_test(check):
            options = {"deadline": None, "derandomize": True, "database": None}
            check = settings(max_examples=EXAMPLES[long], **options)(check)
        try:
            check()
        except Exception:
            failures[check.__name__] = traceback.format_exc()
    print(json.dumps(failures))


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest) -> dict[str, str]:
    return run_python(f"run_checks({request.config.getoption('long')})", __name__, TRITON_INTERPRET="1")


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_in_the_strict_interpreter(name: str, failures: dict[str, str]) -> None:
    """Long: ten times the random shapes."""
    assert name not in failures, failures[name]
