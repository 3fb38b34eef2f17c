"""Transfers between a GPU and the host on a stand-in: what is stored comes back, and each access is ordered by an event
or a wait. Whichever of these is left out, the stand-in finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.kvcache.tiers import staging
from kvllm.kvcache.tiers.disk import DiskStore
from kvllm.kvcache.tiers.disk_mover import DiskMover
from kvllm.kvcache.tiers.host import HostStore
from kvllm.kvcache.tiers.queue import StreamTicket
from tests.helpers.cuda_stand_in import stand_in
from tests.helpers.device_streams import Event, Stream
from tests.kvcache.test_host_store import SHAPES, random_cache

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton, which is not installed")

DIGESTS = [bytes([i]) * 16 for i in range(5)]


@contextmanager
def small_staging(shape: CacheShape) -> Iterator[None]:
    """With room for two blocks."""
    with patch.object(staging, "STAGING_BYTES", 2 * shape.bytes_per_block):
        yield


def copy_on(device: str, cache: PagedKVCache) -> PagedKVCache:
    copy = PagedKVCache(cache.shape, cache.num_blocks, device)
    for target, source in ((copy.data, cache.data), (copy.scores, cache.scores)):
        if target is not None and source is not None:
            target.view(torch.uint8).copy_(source.view(torch.uint8))
    return copy


def there_and_back(cache: PagedKVCache, store: HostStore) -> None:
    """Blocks 0 to 4 go to the host, 1 and 3 of them to the disk alone, and are written over at once. They come back in
    5 to 9, while others are stored."""
    store.store(cache, [0, 1, 2, 3, 4], [2, -1, 0, -1, 1], [b"", DIGESTS[1], DIGESTS[2], DIGESTS[3], b""])
    for tensor in cache.tensors:
        tensor[:, :, :5].view(torch.uint8).zero_()
    store.load(0, [2, -1, 0, -1, 1], cache, [5, 6, 7, 8, 9], [b"", DIGESTS[1], b"", DIGESTS[3], b""])
    store.store(cache, [0, 1, 2], [3, 4, 0])
    assert store.ended(wait=True).loaded == [0]


def bytes_from(cache: PagedKVCache, first: int) -> list[torch.Tensor]:
    """Of five blocks, on the host."""
    found = [tensor.view(torch.uint8)[:, :, first : first + 5].cpu() for tensor in cache.tensors]
    return found if cache.scores is None else [*found, cache.scores.view(torch.uint8)[:, first : first + 5].cpu()]


CASES: dict[str, tuple[CacheShape, str | None]] = {
    **{name: (shape, None) for name, shape in SHAPES.items()},
    "int4_hadamard on the host": (CacheShape(2, 2, 16, 4, torch.bfloat16, scored=True), "int4_hadamard"),
}


@pytest.mark.parametrize(("shape", "offloaded"), CASES.values(), ids=list(CASES))
def test_blocks_come_back_in_pieces(shape: CacheShape, offloaded: str | None, tmp_path: Path) -> None:
    """As they do on the CPU, bit for bit, with blocks of a disk among them."""
    source, found, expected = random_cache(shape, 10), [], []
    if offloaded:
        source.data.normal_()
    for place in ("cpu", "cuda"):
        with stand_in() if place == "cuda" else nullcontext(), small_staging(shape):
            cache, disk = copy_on(place, source), DiskStore(tmp_path / place, 1 << 20)
            store = HostStore(shape, 5, torch.device(place), KV_FORMATS.get(offloaded or ""), disk)
            expected = bytes_from(cache, 0)
            there_and_back(cache, store)
            found.append(bytes_from(cache, 5))
    for on_cpu, on_gpu, before in zip(*found, expected, strict=True):
        assert torch.equal(on_cpu, on_gpu)
        assert offloaded or torch.equal(on_gpu, before)


def nothing(*_: Any) -> None:
    """In place of a wait."""


BROKEN: dict[str, Callable[[], Any]] = {
    "a piece does not wait for the one before it": lambda: patch.object(StreamTicket, "precede", nothing),
    "copies do not wait for what was launched before": lambda: patch.object(Stream, "wait_stream", nothing),
    "a load is reported before its end": lambda: patch.object(Event, "synchronize", nothing),
    "staging is given back while the disk reads it": lambda: patch.object(
        DiskMover, "put", lambda *args, put=DiskMover.put: put(*args) and None
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_wait_that_is_left_out_is_found(name: str, tmp_path: Path) -> None:
    shape = SHAPES["bfloat16"]
    with pytest.raises(AssertionError, match="nothing orders them"), stand_in() as device, small_staging(shape):
        cache = copy_on("cuda", random_cache(shape, 10))
        store = HostStore(shape, 5, torch.device("cuda"), disk=DiskStore(tmp_path, 1 << 20))
        assert not device.streams.races
        with BROKEN[name]():
            there_and_back(cache, store)
            bytes_from(cache, 5)
