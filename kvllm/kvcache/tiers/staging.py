"""Memory of a GPU that records pass through on their way between its pool and the host."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvllm.kvcache.tiers.queue import Ticket
from kvllm.kvcache.tiers.records import RecordLayout, Records

STAGING_BYTES = 64 << 20
"""Of blocks of the pool, and at least one. What is stored at once beyond that holds up the steps for its copies."""


class Staging:
    """Room for a few records, which is there before anybody measures what memory is left: transfers must not fail for
    want of it when blocks are short. On a CPU nothing is kept, and each use has memory of its own.

    most: records that there is room for.
    """

    def __init__(self, layout: RecordLayout, device: torch.device) -> None:
        self.most = max(1, STAGING_BYTES // max(layout.record_bytes, layout.shape.bytes_per_block))
        self._layout = layout
        self._records = layout.allocate(self.most, device) if device.type == "cuda" else None
        self._users: list[Ticket] = []

    def pieces(self, count: int) -> Iterator[slice]:
        """What there is room for, one after the other, of so many records."""
        return (slice(first, min(first + self.most, count)) for first in range(0, count, self.most))

    def take(self, count: int) -> Records:
        """Room for so many records, which what is launched from now on may write to."""
        if self._records is None:
            return self._layout.allocate(count)
        for ticket in self._users:
            ticket.precede()
        self._users = []
        return tuple(part[:count] for part in self._records)

    def hold(self, ticket: Ticket) -> None:
        """Keep what was written to it until a job has ended."""
        if self._records is not None:
            self._users.append(ticket)
