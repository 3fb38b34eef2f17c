"""The request for huge pages reaches the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.memory_pages import use_huge_pages

SMAPS = Path("/proc/self/smaps")
pytestmark = pytest.mark.skipif(
    not SMAPS.exists() or not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="this kernel has no such pages",
)


def asked_for_huge_pages(address: int) -> bool:
    """Whether the mapping of an address has the flag "hg"."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(bound, 16) for bound in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return "hg" in line.split()
    raise AssertionError(f"{address:x} is not mapped")


def test_the_cache_asks_for_huge_pages() -> None:
    cache = PagedKVCache(CacheShape(2, 2, 64, 16, torch.float32), num_blocks=1024)
    assert cache.data.nbytes == 32 << 20
    assert asked_for_huge_pages(cache.data.data_ptr() + cache.data.nbytes // 2)
    plain = torch.empty(128 << 20, dtype=torch.uint8)  # a mapping of its own, for malloc keeps smaller ones
    assert not asked_for_huge_pages(plain.data_ptr() + plain.nbytes // 2)


def test_small_and_absent_tensors_stay_as_they_are() -> None:
    small = torch.arange(3)
    assert use_huge_pages(small) is small and small.tolist() == [0, 1, 2]
    assert use_huge_pages(torch.empty(1 << 22, device="meta")).is_meta
