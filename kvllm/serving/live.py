"""The live page's stream: a sample of the engine twice a second, sent to all who look."""

from __future__ import annotations

import asyncio
import logging
import time
from itertools import takewhile
from operator import methodcaller

import msgspec
from msgspec import Struct

from kvllm.core.snapshot import EngineSnapshot
from kvllm.errors import EngineDeadError
from kvllm.serving.errors import unavailable
from kvllm.serving.live_feed import PERIOD_SECONDS, WINDOW_SECONDS, Sample, Tick, find_warnings, make_sample
from kvllm.serving.live_info import Info, make_info
from kvllm.serving.sse import Write, event, write_out
from kvllm.serving.state import ServerState

logger = logging.getLogger(__name__)

MOST_VIEWERS = 64


class Start(Struct, tag="start"):
    """The first event of a stream. columns: names of the fields of each sample in `history`, oldest first."""

    info: Info
    columns: tuple[str, ...]
    history: list[Sample]


def start(state: ServerState) -> None:
    """Take samples from now on, as long as the event loop runs. Only the first call does something."""
    state.live.collector = state.live.collector or asyncio.create_task(_collect(state))


async def write_events(state: ServerState, key: str, write: Write) -> None:
    """The stream of one viewer, whose key has the name `key`. A slow one misses ticks. Raises ApiError."""
    feed = state.live
    if feed.viewers >= MOST_VIEWERS:
        raise unavailable(f"{MOST_VIEWERS} pages are open, which is the most: close one")
    feed.viewers += 1
    start(state)  # where the application runs in another server than ours
    try:
        first = Start(make_info(state, key), Sample.__struct_fields__, list(feed.history))
        await write_out(write, event(msgspec.json.encode(first)))
        while not (state.admission.is_draining and state.admission.in_flight == 0):
            await feed.ticked.wait()
            await write_out(write, feed.event)
    finally:
        feed.viewers -= 1


async def _collect(state: ServerState) -> None:
    while True:
        begin = time.monotonic()
        try:
            _publish(state, await state.llm.inspect(methodcaller("snapshot", time.monotonic())))
        except EngineDeadError:
            if state.live.history:
                warning = "The engine has failed and is being started again: requests get status 503 meanwhile."
                state.live.send(Tick(state.live.history[-1], [], "", [warning], list(state.live.refused)))
        except Exception:
            logger.exception("a sample for the live page could not be taken")
        await asyncio.sleep(max(0.0, begin + PERIOD_SECONDS - time.monotonic()))


def _publish(state: ServerState, snapshot: EngineSnapshot) -> None:
    feed = state.live
    sample = make_sample(time.time(), snapshot, feed.first_tokens.end_period(), feed.gaps.end_period())
    feed.history.append(sample)
    newest_first = takewhile(lambda each: sample.time - each.time <= WINDOW_SECONDS, reversed(feed.history))
    recent = list(newest_first)[::-1]
    warnings = find_warnings(recent, snapshot.waiting_for, snapshot.waiting_of)
    if state.admission.is_draining:
        count = state.admission.in_flight
        warnings.insert(0, f"The server drains: it takes no new requests and ends after the {count} in flight.")
    feed.send(Tick(sample, snapshot.rows, snapshot.waiting_for, warnings, list(feed.refused)))
