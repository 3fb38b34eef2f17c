"""The samples of the live page, and what wakes its viewers."""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec
from msgspec import Struct

from kvllm.core.snapshot import SequenceRow
from kvllm.serving.latencies import Latencies
from kvllm.serving.live_sample import Sample
from kvllm.serving.sse import event

PERIOD_SECONDS = 0.5
HISTORY = int(15 * 60 / PERIOD_SECONDS)


class Tick(Struct, tag="tick"):
    """Each later event. waiting_for: see EngineSnapshot."""

    sample: Sample
    requests: list[SequenceRow]
    waiting_for: str
    warnings: list[str]


class LiveFeed:
    """The samples, and what wakes the viewers. All is used on the event loop.

    first_tokens: seconds from requests to their first tokens. gaps: seconds between tokens.
    """

    def __init__(self) -> None:
        self.history: deque[Sample] = deque(maxlen=HISTORY)
        self.first_tokens, self.gaps = Latencies(), Latencies()
        self.viewers = 0
        self.collector: asyncio.Task[None] | None = None
        self.event = b""
        self.ticked = asyncio.Event()

    def send(self, tick: Tick) -> None:
        """Wake the viewers that wait now."""
        if not self.viewers:
            return
        self.event = event(msgspec.json.encode(tick))
        self.ticked.set()
        self.ticked = asyncio.Event()
