"""The mover between a cache and a disk, on a thread of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvllm.kvcache.cache import PagedKVCache
from kvllm.kvcache.tiers.disk import DiskStore
from kvllm.kvcache.tiers.queue import ThreadQueue, Ticket, make_queue
from kvllm.kvcache.tiers.records import LostBlocksError, RecordLayout, Records
from kvllm.kvcache.tiers.staging import Staging

MOST_WAITING_BYTES = 256 << 20
"""Of blocks that wait to be written. Where a disk is slower than that, blocks are left out."""


class DiskMover:
    """Writes records to a store and reads them back, in the order of the calls. Copies from and to a GPU run beside the
    steps, on a stream of their own."""

    def __init__(self, layout: RecordLayout, store: DiskStore, device: torch.device) -> None:
        self.layout = layout
        self.store = store
        self.device = device
        self._queue = ThreadQueue()
        self._copies = make_queue(device)
        self._incoming = Staging(layout, device)
        self._waiting: list[tuple[Ticket, int]] = []

    def put(self, records: Records, digests: Sequence[bytes]) -> Ticket | None:
        """Write those of some records that have a digest. They may not change before the end of what is returned."""
        chosen = [i for i, digest in enumerate(digests) if digest]
        self._waiting = [each for each in self._waiting if not each[0].done()]
        if sum(num_bytes for _, num_bytes in self._waiting) > MOST_WAITING_BYTES:
            return None
        on_host = self.layout.allocate(len(chosen), pinned=self.device.type == "cuda")

        def copy() -> None:
            for part, source in zip(on_host, records, strict=True):
                for to, i in enumerate(chosen):
                    part[to].copy_(source[i], non_blocking=True)

        copied = self._copies.submit(copy)

        def write() -> None:
            copied.seconds()
            self.store.put({digests[i]: self.layout.to_bytes(on_host, to) for to, i in enumerate(chosen)})

        self._waiting.append((self._queue.submit(write), len(chosen) * self.layout.record_bytes))
        return copied

    def get(self, cache: PagedKVCache, blocks: list[int], digests: list[bytes]) -> Ticket:
        """Read records into blocks of a cache, after what was launched on the device so far."""

        def read() -> None:
            found = [self.store.get(digest) for digest in digests]
            if any(content is None or len(content) != self.layout.record_bytes for content in found):
                raise LostBlocksError("not on the disk")
            records = self.layout.from_bytes([content for content in found if content is not None])
            self._copies.submit(lambda: self._unpack(records, cache, torch.tensor(blocks))).seconds()

        return self._queue.submit(read)

    def _unpack(self, records: Records, cache: PagedKVCache, blocks: torch.Tensor) -> None:
        """Write records on the host to blocks of a cache."""
        for piece in self._incoming.pieces(len(blocks)):
            room = self._incoming.take(len(blocks[piece]))
            for part, source in zip(room, records, strict=True):
                part.copy_(source[piece])
            self.layout.unpack(room, cache, blocks[piece].to(self.device))

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
