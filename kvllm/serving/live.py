"""What the live page shows: samples twice a second, kept for a quarter of an hour, and sent to all who look."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from itertools import takewhile
from operator import methodcaller

import msgspec
from msgspec import Struct

from kvllm.async_llm import AsyncLLM
from kvllm.config import CompressionConfig
from kvllm.core.policies import Threshold, WindowOptions
from kvllm.core.snapshot import EngineSnapshot
from kvllm.errors import EngineDeadError
from kvllm.serving.errors import unavailable
from kvllm.serving.live_feed import PERIOD_SECONDS, LiveFeed, Tick
from kvllm.serving.live_sample import Sample, make_sample
from kvllm.serving.live_warnings import WINDOW_SECONDS, find_warnings
from kvllm.serving.sse import event
from kvllm.serving.state import ServerState

logger = logging.getLogger(__name__)

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


def start(state: ServerState) -> None:
    """Take samples from now on, as long as the event loop runs. Only the first call does something."""
    state.live.collector = state.live.collector or asyncio.create_task(_collect(state))


async def events(state: ServerState, key: str) -> AsyncGenerator[bytes, None]:
    """The stream of one viewer, whose key has the name `key`. A slow one misses ticks. Raises ApiError."""
    feed = state.live
    if feed.viewers >= MOST_VIEWERS:
        raise unavailable(f"{MOST_VIEWERS} pages are open, which is the most: close one")
    feed.viewers += 1
    start(state)  # where the application runs in another server than ours
    try:
        yield event(msgspec.json.encode(Start(make_info(state, key), Sample.__struct_fields__, list(feed.history))))
        while not (state.admission.is_draining and state.admission.in_flight == 0):
            await feed.ticked.wait()
            yield feed.event
    finally:
        feed.viewers -= 1


async def _collect(state: ServerState) -> None:
    while True:
        begin = time.monotonic()
        try:
            _publish(state, await _snapshot(state.llm))
        except EngineDeadError:
            _publish_failure(state.live)
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
    feed.send(Tick(sample, snapshot.rows, snapshot.waiting_for, warnings))


def _publish_failure(feed: LiveFeed) -> None:
    if feed.history:
        warning = "The engine has failed and is being started again: requests get status 503 meanwhile."
        feed.send(Tick(feed.history[-1], [], "", [warning]))


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
    policy = compression.policy
    if isinstance(policy, Threshold):
        return "budget_tokens", policy.budget_tokens
    return ("retain_blocks", policy.retain_blocks) if isinstance(policy, WindowOptions) else ("", 0)


def _describe(compression: CompressionConfig | None) -> str:
    """The settings of a compression in one line."""
    if compression is None:
        return ""
    policy = compression.policy
    name = f"{compression.method}, {policy.name}"
    if isinstance(policy, Threshold):
        return f"{name}: at {policy.threshold_tokens} KV pairs {policy.budget_tokens} are kept"
    if not isinstance(policy, WindowOptions):
        return name
    tokens = policy.retain_tokens
    kept = f"{policy.retain_blocks} blocks" if tokens is None else f"{tokens} KV pairs"
    if compression.named_groups:
        by_group = sorted({group.retain_blocks for group in compression.named_groups})
        kept = f"{' or '.join(map(str, by_group))} blocks, by layer,"
    return f"{name}: of a window of {policy.window_blocks} blocks, {kept} are kept"
