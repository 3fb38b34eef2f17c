"""The mover between a cache and a disk, on a thread of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvllm.kvcache.cache import PagedKVCache
from kvllm.kvcache.tiers.disk import DiskStore
from kvllm.kvcache.tiers.queue import ThreadQueue, Ticket
from kvllm.kvcache.tiers.records import LostBlocksError, RecordLayout, Records

MOST_WAITING_BYTES = 256 << 20
"""Of blocks that wait to be written. Where a disk is slower than that, blocks are left out."""


class DiskMover:
    """Writes records to a store and reads them back, in the order of the calls."""

    def __init__(self, layout: RecordLayout, store: DiskStore, device: torch.device) -> None:
        self.layout = layout
        self.store = store
        self.device = device
        self._queue = ThreadQueue()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._waiting: list[tuple[Ticket, int]] = []

    def put(self, records: Records, digests: Sequence[bytes]) -> None:
        """Write those of some records that have a digest. The records may not change any more."""
        chosen = [i for i, digest in enumerate(digests) if digest]
        self._waiting = [each for each in self._waiting if not each[0].done()]
        if sum(num_bytes for _, num_bytes in self._waiting) > MOST_WAITING_BYTES:
            return

        def write() -> None:
            parts = [part.cpu() for part in records]
            self.store.put({digests[i]: self.layout.to_bytes(parts, i) for i in chosen})

        self._waiting.append((self._queue.submit(write), len(chosen) * self.layout.record_bytes))

    def get(self, cache: PagedKVCache, blocks: list[int], digests: list[bytes]) -> Ticket:
        """Read records into blocks of a cache, after what was launched on the device so far."""
        launched = torch.cuda.Event() if self._stream else None
        if launched:
            launched.record()

        def read() -> None:
            found = [self.store.get(digest) for digest in digests]
            if any(content is None or len(content) != self.layout.record_bytes for content in found):
                raise LostBlocksError("not on the disk")
            records = self.layout.from_bytes([content for content in found if content is not None])
            if self._stream is None or launched is None:
                self.layout.unpack(records, cache, torch.tensor(blocks))
                return
            with torch.cuda.stream(self._stream):
                launched.wait()
                on_device = tuple(part.to(self.device) for part in records)
                self.layout.unpack(on_device, cache, torch.tensor(blocks, device=self.device))
            self._stream.synchronize()

        return self._queue.submit(read)

    def digests(self) -> list[bytes]:
        """Of all that the disk has. Waits for what is written before."""
        found: list[bytes] = []
        self._queue.submit(lambda: found.extend(self.store.digests())).wait()
        return found

    def wait(self) -> None:
        """Return when all that was put is written."""
        for ticket, _ in self._waiting:
            ticket.wait()

    def close(self) -> None:
        """Return when all that was put is written."""
        self._queue.submit(self.store.close).wait()
