"""Quantized KV pairs: the formulas against literal ones and golden vectors, and where their bytes lie."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvllm._extension import operator
from kvllm.core.block_manager import BlockManager
from kvllm.core.sequence import Sequence, ServiceClass
from kvllm.errors import ConfigError
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS, kv_format_of
from kvllm.kvcache.ops.base import KVOperations
from kvllm.kvcache.ops.cpu import CpuOperations
from kvllm.kvcache.ops.plain import TorchOperations
from kvllm.kvcache.ops.registry import make_operations
from kvllm.kvcache.quantize import CODECS
from kvllm.sampling_params import SamplingParams
from tests.helpers.caches import head_dim_for, literal_compaction, random_kept
from tests.helpers.tensors import randn

MakeOperations = Callable[[PagedKVCache], KVOperations]

FORMATS = pytest.mark.parametrize("name", list(KV_FORMATS))
OPERATIONS = pytest.mark.parametrize("make", [CpuOperations, TorchOperations], ids=["cpu", "torch"])


def through(name: str, vectors: torch.Tensor) -> torch.Tensor:
    """Vectors, quantized and read again."""
    return CODECS[name].dequantize(*CODECS[name].quantize(vectors))


def edge_vectors() -> torch.Tensor:
    """Zeros, a constant, one large channel, tiny and huge ones, and random vectors of several sizes."""
    vectors = randn(40, 16) * torch.logspace(-3, 3, 40)[:, None]
    vectors[0], vectors[1] = 0, 3.5
    vectors[2, 5] = 1e4
    vectors[3] *= 1e-20
    vectors[4] += 100
    return vectors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_int8_is_its_formula(dtype: torch.dtype) -> None:
    vectors = edge_vectors().to(dtype)
    codes, words = CODECS["int8"].quantize(vectors)
    x = vectors.double().numpy()
    scale = (np.maximum(np.abs(x).max(-1, keepdims=True), 1e-8) / 127).astype(np.float32)
    expected = np.clip(np.rint(x.astype(np.float32) / scale), -127, 127)
    np.testing.assert_allclose(words.view(torch.float32).numpy(), scale, rtol=1e-7)
    assert (codes.view(torch.int8).numpy() == expected).mean() > 0.999  # one in a thousand may lie at a half
    assert (np.abs(through("int8", vectors).double().numpy() - x) <= scale * 0.5001).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_int6_is_its_formula(dtype: torch.dtype) -> None:
    """Channel by channel: the low 4 bits of all codes, two in a byte, and then their high 2 bits, four in a byte."""
    vectors = edge_vectors().to(dtype)
    codes, words = CODECS["int6"].quantize(vectors)
    found = through("int6", vectors)
    assert codes.shape == (40, 12)
    for row, x in enumerate(vectors.float()):
        scale = max(x.abs().max(), torch.tensor(1e-8)) / 31
        assert words[row].view(torch.float32).item() == scale
        for channel, value in enumerate(x):
            code = max(-31, min(31, round((value / scale).item())))
            low = int(codes[row, channel // 2]) >> 4 * (channel % 2) & 15
            high = int(codes[row, 8 + channel // 4]) >> 2 * (channel % 4) & 3
            assert low | high << 4 == code + 32
            assert found[row, channel] == code * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_int4_is_its_formula(dtype: torch.dtype) -> None:
    vectors = edge_vectors().to(dtype)
    codes, words = CODECS["int4"].quantize(vectors)
    parameters = words.view(torch.bfloat16)
    found = through("int4", vectors)
    for row, x in enumerate(vectors.float()):
        low, high = x.min(), x.max()
        scale = ((high - low) / 15).bfloat16() if high > low else torch.tensor(1.0).bfloat16()
        zero = low.bfloat16()
        assert parameters[row].tolist() == [scale.item(), zero.item()]
        for channel, value in enumerate(x):
            code = round(max(0.0, min(15.0, ((value - zero.float()) / scale.float()).item())))
            assert int(codes[row, channel // 2]) >> 4 * (channel % 2) & 15 == code
            assert found[row, channel] == code * scale.float() + zero.float()


@pytest.mark.parametrize("plain", ["int4", "int6"])
def test_rotated_codes_are_those_of_vectors_times_a_hadamard_matrix(plain: str) -> None:
    """The matrix is written out: its entries are 1, or -1 where row and column have an odd number of bits in common."""
    for size in (16, 128, 256):
        signs = [[(-1) ** (row & column).bit_count() for column in range(size)] for row in range(size)]
        matrix = torch.tensor(signs).double() / size**0.5
        torch.testing.assert_close(matrix @ matrix, torch.eye(size).double())
        vectors = randn(40, size) * torch.logspace(-3, 3, 40)[:, None]
        vectors[2, 5] = 1e4
        codes, words = CODECS[f"{plain}_hadamard"].quantize(vectors)
        expected, expected_words = CODECS[plain].quantize((vectors.double() @ matrix).float())
        assert (codes == expected).float().mean() > 0.995
        parameters = torch.bfloat16 if plain == "int4" else torch.float32
        torch.testing.assert_close(words.view(parameters), expected_words.view(parameters), rtol=1e-2, atol=1e-30)
        found = CODECS[f"{plain}_hadamard"].dequantize(codes, words).double()
        expected = CODECS[plain].dequantize(codes, words).double() @ matrix
        assert ((found - expected).norm(dim=-1) <= 1e-6 * expected.norm(dim=-1)).all()


def test_fp8_is_its_formula() -> None:
    """Every code is the number of float8 that is nearest to x / s, by a search among all of them."""
    vectors = edge_vectors()
    codes, words = CODECS["fp8_e4m3"].quantize(vectors)
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    finite = numbers[numbers.isfinite()]
    scale = vectors.double().abs().amax(-1, keepdim=True).clamp(min=1e-8) / 448
    torch.testing.assert_close(words.view(torch.float32).double(), scale, rtol=1e-7, atol=0)
    target = vectors.double() / scale
    nearest = (target[..., None] - finite).abs().amin(-1)
    distance = (codes.view(torch.float8_e4m3fn).double() - target).abs()
    assert (distance <= nearest * (1 + 1e-3) + 1e-4).all()


def test_int8_golden(load_vectors: Callable) -> None:
    arrays, _ = load_vectors("int8_kv")
    codes, words = CODECS["int8"].quantize(torch.from_numpy(arrays["x"]))
    assert (codes.view(torch.int8).numpy() == arrays["q"]).all()
    np.testing.assert_allclose(words.view(torch.float32).squeeze(-1).numpy(), arrays["scale"].squeeze(), rtol=1e-6)


@pytest.mark.parametrize("case", [0, 1])
def test_int4_golden(case: int, load_vectors: Callable) -> None:
    """The vectors are groups of 32 or 64 channels with parameters in full precision: those of bfloat16 lose no more
    than their rounding."""
    arrays, meta = load_vectors("int4_kv")
    group = meta["cases"][case]["group"]
    x = torch.from_numpy(arrays[f"c{case}_x"]).unflatten(-1, (-1, group))
    expected = torch.from_numpy(arrays[f"c{case}_dequant"]).double().view(x.shape)
    scale = torch.from_numpy(arrays[f"c{case}_scale"]).double().view(*x.shape[:-1], 1)
    codes, _ = CODECS["int4"].quantize(x)
    packed = torch.from_numpy(arrays[f"c{case}_packed"]).view(codes.shape)
    assert (codes == packed).float().mean() > 0.8
    found = through("int4", x).double()
    assert ((found - x.double()).abs() <= 0.6 * scale).all()
    assert (found - x.double()).norm() < 1.01 * (expected - x.double()).norm()


@pytest.mark.parametrize("name", CODECS)
def test_what_a_vector_loses(name: str) -> None:
    """Of normal channels: the error of a vector relative to its size."""
    vectors = randn(2000, 128)
    error = (through(name, vectors) - vectors).norm() / vectors.norm()
    low, high = {
        "int8": (0.005, 0.02),
        "int6": (0.02, 0.08),
        "int6_hadamard": (0.02, 0.08),
        "fp8_e4m3": (0.02, 0.06),
    }.get(name, (0.08, 0.24))
    assert low < error * 2 < high


@FORMATS
def test_capacity_at_128_channels(name: str) -> None:
    plain = CacheShape(2, 4, 128, 16, torch.bfloat16)
    shape = CacheShape(2, 4, 128, 16, torch.bfloat16, kv_format=KV_FORMATS[name])
    cache = PagedKVCache(shape, 3)
    of_format = {"int4": 3.5, "int4_hadamard": 3.5, "int6_int4_hadamard": 3.0, "int6_int4": 3.0}
    assert cache.data.nbytes == 3 * shape.bytes_per_block == sum(part.nbytes for part in cache.parts)
    assert plain.bytes_per_block / shape.bytes_per_block >= of_format.get(name, 1.9)


@FORMATS
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_codes_come_first_in_a_head_of_a_block_and_scales_behind(name: str, block_size: int) -> None:
    shape = CacheShape(2, 3, head_dim_for(name, 8), block_size, torch.float32, kv_format=KV_FORMATS[name])
    cache = PagedKVCache(shape, 4)
    every_byte = cache.data.view(torch.uint8)
    every_byte.copy_(torch.arange(every_byte.numel()).view(every_byte.shape) % 251)
    for plane, stored in zip(cache.planes, (cache.keys(1), cache.values(1)), strict=True):
        codes, words = plane.parts
        of_head, code_bytes = stored.view(torch.uint8)[2, 1].flatten(), codes.shape[-1]
        for offset in range(block_size):
            assert torch.equal(codes[1, 2, 1, offset], of_head[offset * code_bytes : (offset + 1) * code_bytes])
            scale = of_head[block_size * code_bytes + 4 * offset :][:4]
            assert torch.equal(words[1, 2, 1, offset].view(torch.uint8), scale)


def make_cache(
    name: str, *, block_size: int = 4, num_blocks: int = 12, dtype: torch.dtype = torch.float32
) -> PagedKVCache:
    """Any bytes, so that a copy by arithmetic would show."""
    cache = PagedKVCache(CacheShape(2, 3, 32, block_size, dtype, kv_format=KV_FORMATS[name]), num_blocks)
    cache.data.view(torch.uint8).random_(generator=torch.Generator().manual_seed(0))
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@OPERATIONS
@FORMATS
def test_store(make: MakeOperations, name: str, dtype: torch.dtype) -> None:
    cache = make_cache(name, dtype=dtype)
    expected = make_cache(name, dtype=dtype)
    slots = torch.tensor([7, -1, 0, 35, 20])
    qkv = randn(5, 300, dtype=dtype)
    keys, values = qkv[:, 10:106].unflatten(1, (3, 32)), qkv[:, 150:246].unflatten(1, (3, 32))
    keys[2], values[0, 1], values[3, 2] = 0, 2.5, values[3, 2] * 1e4
    formats = KV_FORMATS[name].keys, KV_FORMATS[name].values
    for plane, vectors, each in zip(expected.planes, (keys, values), formats, strict=True):
        for part, rows in zip(plane.parts, CODECS[each.name].quantize(vectors), strict=True):
            for row, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    part[1, slot // 4, :, slot % 4] = rows[row]
    make(cache).store(1, keys, values, slots)
    assert torch.equal(cache.data.view(torch.uint8), expected.data.view(torch.uint8))


@OPERATIONS
@FORMATS
def test_copy_blocks(make: MakeOperations, name: str) -> None:
    cache = make_cache(name)
    expected = make_cache(name)
    for source, destination in ((2, 5), (2, 0), (8, 1)):
        for tensor in expected.tensors:
            stored = tensor.view(torch.uint8)
            stored[:, :, destination] = stored[:, :, source]
    make(cache).copy_blocks(torch.tensor([2, 2, 8]), torch.tensor([5, 0, 1]))
    assert torch.equal(cache.data.view(torch.uint8), expected.data.view(torch.uint8))


@OPERATIONS
@FORMATS
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_compact(make: MakeOperations, name: str, in_place: bool, ragged: bool) -> None:
    cache = make_cache(name)
    sources = torch.tensor([[11, 3, 7], [0, 6, 99]])  # the second region has two blocks
    destinations = sources[:, :2] if in_place else torch.tensor([[5, 2], [9, -1]])
    kept = random_kept(2, [12, 8], 3, [7, 4], ragged=ragged)
    expected = [literal_compaction(part, kept, sources, destinations) for part in cache.parts]
    make(cache).compact(kept, sources, destinations.contiguous())
    assert all(torch.equal(found, part) for found, part in zip(cache.parts, expected, strict=True))


@OPERATIONS
def test_compaction_golden(make: MakeOperations, load_vectors: Callable) -> None:
    """Rows of int8 move with their scales, bit for bit: never dequantized and quantized again."""
    arrays, _ = load_vectors("quant_compaction")
    x, kept = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["kept"]).long()
    pairs, heads, head_dim = x.shape
    cache = PagedKVCache(CacheShape(1, heads, head_dim, pairs, torch.float32, kv_format=KV_FORMATS["int8"]), 2)
    operations = make(cache)
    operations.store(0, x.float(), x.float(), torch.arange(pairs))
    codes, words = (part[0, 0, 0].transpose(0, 1) for part in cache.parts)
    assert (codes.view(torch.int8).numpy() == arrays["int8_codes_before"]).all()
    operations.compact(kept.view(1, 1, heads, -1), torch.tensor([[0]]), torch.tensor([[1]]))
    codes, words = (part[0, 1, 1, :, : kept.shape[-1]] for part in cache.parts)
    assert (codes.view(torch.int8).numpy() == arrays["int8_codes_after"]).all()
    scales = words.contiguous().view(torch.float32).squeeze(-1).numpy()
    np.testing.assert_allclose(scales, arrays["int8_scale_after"].reshape(scales.shape), rtol=1e-6)


@OPERATIONS
@FORMATS
def test_gathered_keys_and_values_are_those_that_attention_sees(make: MakeOperations, name: str) -> None:
    cache = PagedKVCache(CacheShape(1, 3, 32, 4, torch.bfloat16, kv_format=KV_FORMATS[name]), 9)
    keys, values = randn(36, 3, 32, dtype=torch.bfloat16), randn(36, 3, 32, dtype=torch.bfloat16, seed=1)
    operations = make(cache)
    operations.store(0, keys, values, torch.arange(36))
    tables = torch.tensor([[3, 0], [8, 8]], dtype=torch.int32)
    kv_format = KV_FORMATS[name]
    for found, stored, each in (
        (operations.gather_keys([0], tables, 8), keys, kv_format.keys),
        (operations.gather_values([0], tables, 8), values, kv_format.values),
    ):
        assert found.shape == (2, 3, 8, 32) and found.dtype == torch.bfloat16
        expected = through(each.name, stored).bfloat16().unflatten(0, (9, 4))
        assert torch.equal(found, expected[tables.long()].flatten(1, 2).transpose(1, 2))


def test_the_shape_of_a_cache_chooses() -> None:
    for name, head_dim, dtype in (
        ("int8", 32, torch.float32),
        ("int4", 256, torch.bfloat16),
        ("int6_int4_hadamard", 128, torch.bfloat16),
        ("int6_int4", 96, torch.bfloat16),
        ("fp8_e4m3", 64, torch.float32),
    ):
        shape = CacheShape(1, 1, head_dim, 4, dtype, kv_format=KV_FORMATS[name])
        assert isinstance(make_operations(PagedKVCache(shape, 2)), CpuOperations)
    for name, head_dim, dtype in (
        ("int8", 48, torch.float32),
        ("int4", 64, torch.float16),
        ("int6_int4_hadamard", 16, torch.float32),
        ("int6_int4", 48, torch.float32),
    ):
        shape = CacheShape(1, 1, head_dim, 4, dtype, kv_format=KV_FORMATS[name])
        assert isinstance(make_operations(PagedKVCache(shape, 2)), TorchOperations)


def test_the_compiled_operators_refuse_bad_shapes() -> None:
    """They would write beyond a slot."""
    cache = make_cache("int8")
    store, slots = operator("store_kv"), torch.tensor([0])
    for vectors, message in (
        (randn(1, 3, 24), "head_dim is 24: codes"),
        (randn(1, 3, 64), "dimension 3 of key_cache is 36"),
    ):
        with pytest.raises(RuntimeError, match=message):
            store(cache.keys(0), cache.values(0), vectors, vectors, slots)
    with pytest.raises(RuntimeError, match="value_cache has dtype Char, which does not go with key_cache of Byte"):
        store(make_cache("int4").keys(0), cache.values(0), randn(1, 3, 32), randn(1, 3, 32), slots)
    rotated, vectors = make_cache("int6_int4_hadamard"), randn(1, 3, 96)
    with pytest.raises(RuntimeError, match="head_dim is 96: a Hadamard matrix needs a power of two"):
        store(rotated.keys(0), rotated.values(0), vectors, vectors, slots)
    with pytest.raises(
        RuntimeError, match="value_cache has dtype Float4_e2m1fn_x2, which does not go with key_cache of Byte"
    ):
        store(make_cache("int4").keys(0), rotated.values(0), randn(1, 3, 32), randn(1, 3, 32), slots)
    half = randn(1, 3, 32, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="keys has dtype Half"):
        store(cache.keys(0), cache.values(0), half, half, slots)


def test_refusals() -> None:
    assert kv_format_of("auto", "float32", 6) is None and kv_format_of("bfloat16", "bfloat16", 6) is None
    with pytest.raises(ConfigError, match="kv_cache_dtype='bfloat16' with activations of float32"):
        kv_format_of("bfloat16", "float32", 64)
    with pytest.raises(ConfigError, match="kv_cache_dtype='int4' needs a head_dim that is a multiple of 8.*has 12"):
        kv_format_of("int4", "float32", 12)
    with pytest.raises(ConfigError, match="kv_cache_dtype='int6_int4' needs a head_dim that is a multiple of 16.*24"):
        kv_format_of("int6_int4", "float32", 24)
    rotated = "int6_int4_hadamard"
    for head_dim in (80, 96):
        with pytest.raises(ConfigError, match=f"'{rotated}' needs a head_dim that is a power of two.*{head_dim}"):
            kv_format_of(rotated, "float32", head_dim)
    with pytest.raises(ConfigError, match=f"'{rotated}' needs a head_dim that is a multiple of 16.*has 8"):
        kv_format_of(rotated, "float32", 8)


def test_the_dtype_is_a_part_of_the_identity_of_a_block() -> None:
    hashes = []
    for dtype in ("auto", "int8", "int6_int4", "int4", "int6_int4_hadamard", "int4_hadamard"):
        for salt in (None, "a"):
            seq = Sequence(
                0, "0", list(range(8)), SamplingParams(), max_length=20, service_class=ServiceClass(cache_salt=salt)
            )
            BlockManager(4, 4, kv_cache_dtype=dtype)._extend_hashes(seq, 1)
            hashes += seq.block_hashes
    assert len(set(hashes)) == len(hashes) == 12
