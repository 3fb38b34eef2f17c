"""The operators of compression events against float64, and against the same in torch."""

from __future__ import annotations

import torch

from kvllm.compression.methods import keydiff, rkv, token2chunk
from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.kvcache.ops.cpu import CpuOperations
from kvllm.kvcache.ops.plain import TorchOperations
from tests.helpers.tensors import bits_of, randn


def assert_choices(count: int, levels: int) -> None:
    """As torch chooses in float64, where the rewards of whole numbers are the same. Few levels: almost all tie."""
    scores = torch.randint(-levels, levels, (2, 3, count), generator=torch.Generator().manual_seed(count)).float()
    for total in (0, 1, count // 3, count - 1, count, count + 1):
        assert torch.equal(token2chunk.top_indices(scores, total), token2chunk.top_indices(scores.double(), total))
        for chunk_budget, max_chunk in ((0, 3), (1, 3), (count // 4, 3), (count // 4, 6), (3, 2 * count + 3)):
            found = token2chunk.expand(scores, total, chunk_budget, max_chunk)
            assert torch.equal(found, token2chunk.expand(scores.double(), total, chunk_budget, max_chunk))


def assert_order_of_special_scores() -> None:
    """Zeros of both signs tie, and what is not a number is the highest, as where torch sorts."""
    scores = torch.tensor([0.0, -0.0, 1e-45, -1e-45, torch.inf, -torch.inf, torch.nan, -torch.nan, 0.0, 3e38, -3e38])
    for count in range(len(scores) + 1):
        assert torch.equal(token2chunk.top_indices(scores, count), token2chunk.top_indices(scores.double(), count))


def literal_differences(keys: torch.Tensor) -> torch.Tensor:
    """The negative cosine of each key to the mean of all unit keys, in float64."""
    unit = keys.double() / keys.double().norm(dim=-1, keepdim=True).clamp(min=1e-12)
    mean = unit.mean(dim=2, keepdim=True)
    return -(unit * mean).sum(-1) / mean.norm(dim=-1).clamp(min=1e-12)


def assert_key_differences(dtype: torch.dtype) -> None:
    for num_keys, head_dim in ((1, 7), (33, 24), (96, 64), (203, 128), (5, 80)):
        keys = randn(3, 2, num_keys, head_dim, dtype=dtype)
        keys[1, :, -1] = keys[1, :, 0]
        keys[2, 0, 0] = 0
        found = keydiff.scores(keys)
        torch.testing.assert_close(found.double(), literal_differences(keys), rtol=0, atol=3e-6)
        assert torch.equal(found[1, :, -1], found[1, :, 0])
        assert torch.equal(found[1:2], keydiff.scores(keys[1:2]))


def literal_resemblance(keys: torch.Tensor, threshold: float, strict_public: bool) -> torch.Tensor:
    """The cosines of each key to the others, without the last near one of each row, in float64."""
    unit = keys.double() / (keys.double().norm(dim=-1, keepdim=True) + 1e-8)
    cosines = unit @ unit.mT
    cosines.diagonal(dim1=-2, dim2=-1).zero_()
    for row in cosines.flatten(0, 1):
        near = (row > threshold).nonzero().flatten().tolist()
        if near or strict_public:
            row[near[-1] if near else 0] = 0
    return cosines.sum(dim=1)


def assert_key_resemblance(dtype: torch.dtype) -> None:
    """Of keys that are unlike each other, and of some of which many are near."""
    for num_keys, head_dim in ((1, 7), (2, 64), (64, 80), (66, 24), (203, 128)):
        for likeness in (0.0, 0.8):
            keys = randn(2, num_keys, head_dim, dtype=dtype) + likeness * randn(2, 1, head_dim, dtype=dtype, seed=1)
            for threshold, strict_public in ((0.5, False), (0.5, True), (-2.0, True)):
                found = rkv.resemblance(keys, threshold, strict_public)
                expected = literal_resemblance(keys, threshold, strict_public)
                torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=1e-5)
                assert torch.equal(found[1:], rkv.resemblance(keys[1:], threshold, strict_public))


def assert_gathered(name: str | None, dtype: torch.dtype, block_size: int, size: int) -> None:
    """Keys, values and scores of two layers of three, the last block of a table in part, as torch gathers them.

    name: of the cache's format, None for vectors of the dtype.
    """
    shape = CacheShape(3, 2, 32, block_size, dtype, scored=True, kv_format=KV_FORMATS[name] if name else None)
    cache = PagedKVCache(shape, 9)
    assert cache.scores is not None
    cache.scores.copy_(randn(*cache.scores.shape))
    plain, operations = TorchOperations(cache), CpuOperations(cache)
    slots = torch.arange(9 * block_size)
    for layer in range(3):
        plain.store(layer, *(randn(len(slots), 2, 32, dtype=dtype, seed=2 * layer + i) for i in range(2)), slots)
    tables = torch.tensor([[5, 0, 7, 8], [2, 6, 6, 1]], dtype=torch.int32)
    for layers in ([1, 2], [0]):
        keys = operations.gather_keys(layers, tables, size)
        assert keys.shape == (2 * len(layers), 2, size, 32) and keys.is_contiguous()
        assert torch.equal(bits_of(keys), bits_of(plain.gather_keys(layers, tables, size)))
        values = operations.gather_values(layers, tables, size)
        assert torch.equal(bits_of(values), bits_of(plain.gather_values(layers, tables, size)))
        assert torch.equal(operations.gather_scores(layers, tables, size), plain.gather_scores(layers, tables, size))
        of_layers = [cache.scores[layer][tables.long()].transpose(1, 2).flatten(2)[..., :size] for layer in layers]
        assert torch.equal(operations.gather_scores(layers, tables, size), torch.cat(of_layers))
