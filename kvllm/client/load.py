"""The load that `kvllm bench serve` puts on a server, and what each request saw of it.

A request's time stamps are taken where its bytes are read. So the whole client runs in one thread, does as little as
possible for each chunk, and says afterwards how much processor time that took.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from kvllm.client.events import DONE, EventReader, decode_chunk, describe_error, problem_of
from kvllm.errors import ServerError

ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
CONNECT_SECONDS = 30


class Prompt(Struct):
    """One request to send. content: text, token ids, or the messages of a chat.

    num_tokens: of the content where they are known before it is sent, else 0. arrival: seconds from the start.
    """

    content: str | list[int] | list[dict[str, Any]]
    output_len: int
    num_tokens: int = 0
    arrival: float = 0.0


class Outcome(Struct):
    """One request as the client saw it. Times are seconds; `start` counts from the beginning of the run.

    ttft: from sending to the first token. itl: gaps between chunks with tokens. latency: from sending to the last
        token. error: the kind of failure, "" for none. message: what the server said of it.
    """

    start: float
    prompt_len: int
    output_len: int = 0
    ttft: float = 0.0
    itl: list[float] = []
    latency: float = 0.0
    error: str = ""
    message: str = ""

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first; 0 where there is no second."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


class Target(Struct):
    """Where and how requests are sent. extra: further fields of every body."""

    root: str
    route: str
    model: str
    extra: dict[str, Any] = {}

    def body(self, prompt: Prompt) -> bytes:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": prompt.output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.route == ROUTES["chat"]:
            text = isinstance(prompt.content, str)
            body["messages"] = [{"role": "user", "content": prompt.content}] if text else prompt.content
        else:
            body["prompt"] = prompt.content
        return msgspec.json.encode(body | self.extra)


class Run(Struct):
    """What a load measured. cpu_seconds: processor time that the client itself took."""

    outcomes: list[Outcome]
    seconds: float
    cpu_seconds: float
    chunks: int


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds at which requests are sent: gaps from a gamma distribution with mean 1 / rate; infinite: all at once.

    burstiness: the shape of the distribution: 1 is a Poisson process, less comes in bursts, more is more even.
    """
    rng = random.Random(seed)
    gaps = (rng.gammavariate(burstiness, 1 / (rate * burstiness)) if rate < float("inf") else 0.0 for _ in range(count))
    times, now = [], 0.0
    for gap in gaps:
        times.append(now)
        now += gap
    return times


async def send_all(
    session: aiohttp.ClientSession,
    target: Target,
    prompts: Sequence[Prompt],
    max_concurrency: int | None,
    on_end: Callable[[], object],
) -> Run:
    """Send each prompt at its arrival, or later if `max_concurrency` requests are under way.

    on_end: called after each.
    """
    places = asyncio.Semaphore(max_concurrency or len(prompts))
    gc.collect()
    gc.freeze()  # the prompts are many objects, which a collection during the run would walk
    begin, cpu = time.perf_counter(), time.process_time()

    async def send_at_arrival(prompt: Prompt) -> Outcome:
        await asyncio.sleep(begin + prompt.arrival - time.perf_counter())
        async with places:
            outcome = await send(session, target, prompt, begin)
        on_end()
        return outcome

    try:
        outcomes = await asyncio.gather(*map(send_at_arrival, prompts))
    finally:
        gc.unfreeze()
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return Run(outcomes, seconds, cpu, sum(len(outcome.itl) + (outcome.ttft > 0) for outcome in outcomes))


async def send(session: aiohttp.ClientSession, target: Target, prompt: Prompt, begin: float) -> Outcome:
    """Send a request and read its stream to the end. A failure is part of the outcome."""
    body, start = target.body(prompt), time.perf_counter()
    outcome = Outcome(start=start - begin, prompt_len=prompt.num_tokens)
    headers = {"Content-Type": "application/json"}
    try:
        async with session.post(target.root + target.route, data=body, headers=headers) as response:
            if response.status == 200:
                await _read_stream(response, outcome, start)
            else:
                problem = problem_of(await response.read())
                outcome.error = f"HTTP {response.status} {problem.kind}".strip()
                outcome.message = problem.message
    except ServerError as error:
        outcome.error, outcome.message = "malformed chunk", str(error)
    except aiohttp.ClientConnectionError as error:
        lost = isinstance(error, aiohttp.ServerDisconnectedError) or outcome.ttft > 0
        outcome.error, outcome.message = "connection lost" if lost else "no connection", str(error)
    except (aiohttp.ClientError, TimeoutError) as error:
        outcome.error, outcome.message = "connection lost", str(error) or type(error).__name__
    return outcome


async def _read_stream(response: aiohttp.ClientResponse, outcome: Outcome, start: float) -> None:
    reader, last, ended = EventReader(), start, False
    async for data in response.content.iter_any():
        now = time.perf_counter()
        for event in reader.feed(data):
            if event == DONE:
                ended = True
                continue
            chunk = decode_chunk(event)
            if chunk.error:
                problem = describe_error(chunk.error)
                outcome.error, outcome.message = f"error in stream {problem.kind}".strip(), problem.message
                return
            if chunk.usage:
                outcome.prompt_len = chunk.usage.prompt_tokens
                outcome.output_len = chunk.usage.completion_tokens
            if any(choice.has_token for choice in chunk.choices):
                if last == start:
                    outcome.ttft = now - start
                else:
                    outcome.itl.append(now - last)
                last = now
    outcome.latency = last - start
    outcome.output_len = outcome.output_len or len(outcome.itl) + (outcome.ttft > 0)
    if not ended:
        outcome.error, outcome.message = "stream cut", "the server ended the stream without [DONE]"
    elif not outcome.ttft:
        outcome.error, outcome.message = "no token", "the server ended the stream without a token"


def open_session(headers: dict[str, str]) -> aiohttp.ClientSession:
    """A session without a limit of connections, for the server that the user named alone: no proxy, no redirect."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
    return aiohttp.ClientSession(headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
