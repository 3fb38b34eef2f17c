"""What a compression event does with operators: it gathers, compares keys, and chooses; test_instruction_sets has more
of it."""

from __future__ import annotations

import pytest
import torch

from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.kvcache.ops.cpu import CpuOperations
from tests.helpers.event_checks import assert_gathered, assert_key_resemblance

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def test_key_resemblance_through_torch() -> None:
    assert_key_resemblance(torch.float16)


@DTYPES
@pytest.mark.parametrize("name", [None, *KV_FORMATS])
@pytest.mark.parametrize("block_size, size", [(16, 50), (1, 3), (4, 16)])
def test_gathered_slots(name: str | None, dtype: torch.dtype, block_size: int, size: int) -> None:
    assert_gathered(name, dtype, block_size, size)


def test_blocks_beyond_the_cache_are_refused() -> None:
    operations = CpuOperations(PagedKVCache(CacheShape(1, 2, 32, 4, torch.float32), 9))
    operations.gather_keys([0], torch.tensor([[8, 9]], dtype=torch.int32), 4)  # does not reach block 9
    for tables, size, message in (([[8, 9]], 5, "block 9 of tables"), ([[-1]], 1, "block -1"), ([[0]], 5, "size is 5")):
        with pytest.raises(RuntimeError, match=message):
            operations.gather_keys([0], torch.tensor(tables, dtype=torch.int32), size)
