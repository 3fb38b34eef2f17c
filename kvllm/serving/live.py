"""What the live page shows: samples twice a second, kept for a quarter of an hour, and sent to all who look."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator
from itertools import takewhile
from operator import methodcaller
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from kvllm.config import CompressionConfig
from kvllm.core.snapshot import EngineSnapshot, SequenceRow
from kvllm.errors import EngineDeadError
from kvllm.serving.errors import unavailable
from kvllm.serving.latencies import Latencies
from kvllm.serving.live_sample import Sample, make_sample
from kvllm.serving.live_warnings import WINDOW_SECONDS, find_warnings
from kvllm.serving.sse import event

if TYPE_CHECKING:
    from kvllm.async_llm import AsyncLLM
    from kvllm.serving.state import ServerState

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 0.5
HISTORY = int(15 * 60 / PERIOD_SECONDS)
MOST_VIEWERS = 64


class Info(Struct):
    """Facts that do not change while the server runs.

    compression: the settings, one line; "" without compression.
    has_chat_template: whether the model takes conversations; else it completes text.
    kept_option: the field of a request's `compression` that says how much is kept; "" without compression.
    kept_default: the engine's own value of it.
    key: the name of the viewer's key; "" if the server needs none.
    """

    model: str
    max_model_len: int
    block_size: int
    max_num_seqs: int
    compression: str
    has_chat_template: bool
    kept_option: str
    kept_default: int
    needs_key: bool
    key: str


class Start(Struct, tag="start"):
    """The first event of a stream. columns: names of the fields of each sample in `history`, oldest first."""

    info: Info
    columns: tuple[str, ...]
    history: list[Sample]


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
        self._viewers = 0
        self._collector: asyncio.Task[None] | None = None
        self._event = b""
        self._ticked = asyncio.Event()

    def start(self, state: ServerState) -> None:
        """Take samples from now on, as long as the event loop runs. Only the first call does something."""
        self._collector = self._collector or asyncio.create_task(self._collect(state))

    async def events(self, state: ServerState, key: str) -> AsyncGenerator[bytes, None]:
        """The stream of one viewer, whose key has the name `key`. A slow one misses ticks. Raises ApiError."""
        if self._viewers >= MOST_VIEWERS:
            raise unavailable(f"{MOST_VIEWERS} pages are open, which is the most: close one")
        self._viewers += 1
        self.start(state)  # where the application runs in another server than ours
        try:
            yield event(msgspec.json.encode(Start(make_info(state, key), Sample.__struct_fields__, list(self.history))))
            while not (state.admission.is_draining and state.admission.in_flight == 0):
                await self._ticked.wait()
                yield self._event
        finally:
            self._viewers -= 1

    async def _collect(self, state: ServerState) -> None:
        while True:
            begin = time.monotonic()
            try:
                self._publish(state, await _snapshot(state.llm))
            except EngineDeadError:
                self._publish_failure()
            except Exception:
                logger.exception("a sample for the live page could not be taken")
            await asyncio.sleep(max(0.0, begin + PERIOD_SECONDS - time.monotonic()))

    def _publish(self, state: ServerState, snapshot: EngineSnapshot) -> None:
        sample = make_sample(time.time(), snapshot, self.first_tokens.end_period(), self.gaps.end_period())
        self.history.append(sample)
        newest_first = takewhile(lambda each: sample.time - each.time <= WINDOW_SECONDS, reversed(self.history))
        recent = list(newest_first)[::-1]
        warnings = find_warnings(recent, snapshot.waiting_for, snapshot.waiting_of)
        if state.admission.is_draining:
            count = state.admission.in_flight
            warnings.insert(0, f"The server drains: it takes no new requests and ends behind the {count} in flight.")
        self._send(Tick(sample, snapshot.rows, snapshot.waiting_for, warnings))

    def _publish_failure(self) -> None:
        if self.history:
            warning = "The engine has failed and is being started again: requests get status 503 meanwhile."
            self._send(Tick(self.history[-1], [], "", [warning]))

    def _send(self, tick: Tick) -> None:
        """Wake the viewers that wait now."""
        if not self._viewers:
            return
        self._event = event(msgspec.json.encode(tick))
        self._ticked.set()
        self._ticked = asyncio.Event()


async def _snapshot(llm: AsyncLLM) -> EngineSnapshot:
    return await llm.inspect(methodcaller("snapshot", time.monotonic()))


def make_info(state: ServerState, key: str) -> Info:
    config = state.llm.config
    compression = config.active_compression
    kept_option, kept_default = _kept_option(compression)
    return Info(
        state.model_name,
        config.max_model_len,
        config.block_size,
        config.max_num_seqs,
        _describe(compression),
        state.chat_template.exists,
        kept_option,
        kept_default,
        bool(state.options.keys),
        key,
    )


def _kept_option(compression: CompressionConfig | None) -> tuple[str, int]:
    if compression is None:
        return "", 0
    if compression.budget_tokens is not None:
        return "budget_tokens", compression.budget_tokens
    return "retain_blocks", compression.retain_blocks


def _describe(compression: CompressionConfig | None) -> str:
    """The settings of a compression in one line."""
    if compression is None:
        return ""
    name = f"{compression.method}, {compression.policy}"
    if compression.policy == "threshold":
        return f"{name}: at {compression.threshold_tokens} KV pairs {compression.budget_tokens} are kept"
    tokens = compression.retain_tokens
    kept = f"{compression.retain_blocks} blocks" if tokens is None else f"{tokens} KV pairs"
    if compression.named_groups:
        by_group = sorted({group.retain_blocks for group in compression.named_groups})
        kept = f"{' or '.join(map(str, by_group))} blocks, by layer,"
    return f"{name}: of a window of {compression.window_blocks} blocks, {kept} are kept"
