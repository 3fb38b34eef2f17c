"""Scores of queries with the keys of a paged cache: every format, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvllm._extension import operator
from kvllm.kvcache.cache import PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.kvcache.ops.base import KVOperations
from kvllm.kvcache.ops.cpu import CpuOperations
from kvllm.kvcache.ops.plain import TorchOperations
from tests.helpers.key_score_checks import SCALE, TABLES, assert_scores, filled_cache
from tests.helpers.tensors import randn

OPERATIONS = pytest.mark.parametrize("make", [CpuOperations, TorchOperations], ids=["cpu", "torch"])


@OPERATIONS
@pytest.mark.parametrize("name", [None, *KV_FORMATS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(1, 2, 16), (3, 1, 5), (23, 3, 16)], ids=str)  # tokens, group, block size
def test_scores(
    make: Callable[[PagedKVCache], KVOperations], name: str | None, dtype: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    assert_scores(make, name, dtype, *sizes)


def test_what_the_operator_refuses() -> None:
    cache = filled_cache(torch.float32, None, 48, 4)
    queries, last = randn(3, 1, 6, 48), torch.tensor([[3], [1], [0]], dtype=torch.int32)
    score = operator("key_scores")
    with pytest.raises(RuntimeError, match="block 99 of sequence 1 is not in the cache of 9 blocks"):
        score(queries, cache.keys(0), TABLES, torch.tensor([[3], [8], [0]], dtype=torch.int32), SCALE)
    with pytest.raises(RuntimeError, match="last_kv_index 16 of sequence 0 is beyond a table of 4 blocks of 4"):
        score(queries, cache.keys(0), TABLES, last + 13, SCALE)
    with pytest.raises(RuntimeError, match="4 query heads over 3 KV heads"):
        score(queries[:, :, :4].contiguous(), cache.keys(0), TABLES, last, SCALE)
    with pytest.raises(RuntimeError, match="dimension 0 of last_kv_index is 1, not 3"):
        score(queries, cache.keys(0), TABLES, last[:1], SCALE)
