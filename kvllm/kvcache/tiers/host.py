"""The mover between the KV pool and host memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from kvllm.kvcache.cache import CacheShape, PagedKVCache
from kvllm.kvcache.formats import KVFormat
from kvllm.kvcache.tiers.disk import DiskStore
from kvllm.kvcache.tiers.disk_mover import DiskMover
from kvllm.kvcache.tiers.queue import Ticket, make_queue
from kvllm.kvcache.tiers.records import LostBlocksError, RecordLayout, Records
from kvllm.kvcache.tiers.staging import Staging

logger = logging.getLogger(__name__)


class Ended(NamedTuple):
    """What has ended since it was last asked.

    loaded, lost: numbers of loads. num_blocks, seconds: of all transfers both ways that succeeded.
    """

    loaded: list[int]
    lost: list[int]
    num_blocks: int
    seconds: float


class HostStore:
    """A rank's part of the blocks in host memory. Who holds what is the caller's business: it names host blocks, from
    0 to `num_blocks - 1`, as it names those of the pool.

    Blocks go both ways in the order of the calls, beside the steps: `store` takes a copy on the device, after which
    the blocks may be written over at once, and the rest happens on a thread (CPU) or a stream (CUDA, pinned memory).
    On CUDA, copies are in memory that is there from the start; those that it has no room for wait, on the device, until
    others have left it. So a host block may be read by a `load` and written by a `store` after it. `load` may not be
    given blocks that others still read or write, nor may these be used before the load is reported.

    Each load has a number, and is reported once: as loaded, or as lost where a host block does not hold what was to be
    stored in it, because that failed. Nothing of a lost load may be used.

    kv_format: keys and values are quantized to it on their way out. disk: where blocks with a digest go, too.
    """

    def __init__(
        self,
        shape: CacheShape,
        num_blocks: int,
        device: torch.device,
        kv_format: KVFormat | None = None,
        disk: DiskStore | None = None,
    ) -> None:
        self.layout = RecordLayout(shape, kv_format)
        self.disk = DiskMover(self.layout, disk, device) if disk else None
        self.num_blocks = num_blocks
        self.device = device
        self.records = self.layout.allocate(num_blocks, pinned=device.type == "cuda")
        self.outgoing, self._incoming = Staging(self.layout, device), Staging(self.layout, device)
        self.held: set[int] = set()
        """Host blocks that hold what was stored in them."""
        self._queue = make_queue(device)
        self._loads: dict[int, tuple[list[Ticket], int]] = {}  # those not reported, and how many blocks the host has
        self._stores: list[tuple[Ticket, int, float]] = []  # with the seconds that their copies took
        self._cancelled: list[int] = []

    def store(
        self, cache: PagedKVCache, blocks: list[int], host_blocks: list[int], digests: Sequence[bytes] = ()
    ) -> None:
        """Copy blocks of a cache on the store's device to host blocks. Those of a negative number go to none of these;
        those with a digest that is not empty go to the disk, too."""
        for piece in self.outgoing.pieces(len(blocks)):
            begin = time.perf_counter()
            records = self.outgoing.take(len(blocks[piece]))
            self.layout.pack(cache, self._ids(blocks[piece]), records)
            seconds = time.perf_counter() - begin
            held = [(i, host_block) for i, host_block in enumerate(host_blocks[piece]) if host_block >= 0]
            if held:
                ticket = self._queue.submit(partial(self._write, records, held))
                self.outgoing.hold(ticket)
                self._stores.append((ticket, len(held), seconds))
            if self.disk and any(digests[piece]) and (ticket := self.disk.put(records, digests[piece])):
                self.outgoing.hold(ticket)

    def load(
        self, number: int, host_blocks: list[int], cache: PagedKVCache, blocks: list[int], digests: Sequence[bytes] = ()
    ) -> None:
        """Copy host blocks to blocks of a cache on the store's device; those of a negative number come from the disk,
        by their digests."""
        places = list(zip(blocks, host_blocks, strict=True))
        held = [(block, host_block) for block, host_block in places if host_block >= 0]

        tickets = [self._queue.submit(partial(self._read, held, cache))]
        if len(held) < len(blocks):
            absent = [(block, digest) for (block, i), digest in zip(places, digests, strict=True) if i < 0]
            if self.disk is None:
                raise ValueError("there is no disk to load from")
            tickets.append(self.disk.get(cache, [block for block, _ in absent], [digest for _, digest in absent]))
        self._loads[number] = tickets, len(held)

    def cancel(self, numbers: list[int]) -> None:
        """Return when loads write nothing any more. Those not reported yet are reported as lost."""
        for number in numbers:
            if number in self._loads:
                _cancel(self._loads.pop(number)[0])
                self._cancelled.append(number)

    def ended(self, *, wait: bool = False) -> Ended:
        """What has ended since the last call. wait: for all loads."""
        loaded, lost, self._cancelled = list[int](), self._cancelled, []
        num_blocks, seconds = self._ended_stores()
        for number, (tickets, count) in list(self._loads.items()):
            if not (wait or all(ticket.done() for ticket in tickets)):
                continue
            del self._loads[number]
            for ticket in tickets:  # all: no one may still write when a load is reported
                ticket.wait()
            try:
                seconds += tickets[0].seconds()
                for ticket in tickets[1:]:
                    ticket.seconds()
            except Exception as error:
                logger.warning("KV blocks are not in host memory any more, and computed again (%r)", error)
                lost.append(number)
            else:
                loaded.append(number)
                num_blocks += count
        return Ended(loaded, lost, num_blocks, seconds)

    def clear(self) -> None:
        """Forget all loads. Returns when none writes any more."""
        for tickets, _ in self._loads.values():
            _cancel(tickets)
        self._loads.clear()
        self._cancelled.clear()

    def _ended_stores(self) -> tuple[int, float]:
        """Blocks that have arrived on the host since the last call, and how long they took."""
        ended = [store for store in self._stores if store[0].done()]
        self._stores = [store for store in self._stores if store not in ended]
        num_blocks, seconds = 0, 0.0
        for ticket, count, copy_seconds in ended:
            try:
                seconds += ticket.seconds() + copy_seconds
            except Exception as error:  # the blocks are not held
                logger.warning("KV blocks could not be kept in host memory (%r)", error)
            else:
                num_blocks += count
        return num_blocks, seconds

    def _write(self, records: Records, held: list[tuple[int, int]]) -> None:
        """Copy some of the records to host blocks."""
        self.held.difference_update(host_block for _, host_block in held)
        for part, source in zip(self.records, records, strict=True):
            for i, host_block in held:
                part[host_block].copy_(source[i], non_blocking=True)
        self.held.update(host_block for _, host_block in held)

    def _read(self, held: list[tuple[int, int]], cache: PagedKVCache) -> None:
        """Copy to blocks of the pool what host blocks hold."""
        if not self.held.issuperset(host_block for _, host_block in held):
            raise LostBlocksError("not held")
        for piece in self._incoming.pieces(len(held)):
            records = self._incoming.take(len(held[piece]))
            for part, source in zip(records, self.records, strict=True):
                for i, (_, host_block) in enumerate(held[piece]):
                    part[i].copy_(source[host_block], non_blocking=True)
            self.layout.unpack(records, cache, self._ids([block for block, _ in held[piece]]))

    def _ids(self, blocks: list[int]) -> torch.Tensor:
        ids = torch.tensor(blocks)
        return ids.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else ids


def _cancel(tickets: list[Ticket]) -> None:
    for ticket in tickets:
        ticket.cancel()
