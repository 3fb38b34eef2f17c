"""A server under requests that no client should send, and what they do to a well-behaved neighbour: nothing.

Broken HTTP, bodies whose fields have random values, rules of structured outputs that explode, readers that do not read,
and connections that are dropped. A neighbour with a key of its own asks for the same completion all the time. Right is:
no status of 500 or above but 503, the neighbour's text as it is without the others, no exception in the log, and an
engine at rest, with no file left open, at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from msgspec import structs

from kvllm.client.scrape import parse
from kvllm.serving.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.helpers.server import ServerProcess
from tests.helpers.waiting import wait_until

# Bytes to a server and back

STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
KEY = b"sk-crowd"
"""Of the requests that harm."""
RESET = struct.pack("ii", 1, 0)
"""A linger time of 0: the connection ends with a reset."""


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(url)
    return await asyncio.open_connection(address.hostname, address.port)


async def exchange(url: str, data: bytes, seconds: float) -> bytes:
    """Send bytes, and return what came until the server closed the connection, or until so many seconds have passed."""
    reader, writer = await connect(url)
    content = bytearray()
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(seconds):
            writer.write(data)
            while part := await reader.read(1 << 16):
                content += part
    await close(writer)
    return bytes(content)


async def close(writer: asyncio.StreamWriter, *, reset: bool = False) -> None:
    if reset:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def post(path: str, body: bytes) -> bytes:
    """A request whose answer ends with the connection."""
    return head(path) + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def head(path: str) -> bytes:
    """The beginning of a request with a JSON body, without the body's length."""
    fields = b"Host: x\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\n" % KEY
    return b"POST %s HTTP/1.1\r\n" % path.encode() + fields


def count_statuses(statuses: Counter[str], content: bytes) -> None:
    """Count the answers in what a server has sent; "no answer" if there is none."""
    found = [status.decode() for status in STATUS.findall(content)]
    statuses.update(found or ["no answer"])


# Random requests: broken HTTP, and bodies of wrong types and absurd sizes

ROUTES = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "AB=", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "AB="}], "max_tokens": 3},
    "/tokenize": {"prompt": "AB="},
    "/detokenize": {"tokens": [3, 4]},
}
EXPLODING: tuple[dict[str, Any], ...] = (
    {"structured_outputs": {"regex": "(((a?){30}){30}){30}"}},
    {"structured_outputs": {"regex": "(a|aa|aaa)*" * 200}},
    {"structured_outputs": {"choice": ["x" * 5000] * 200}},
    {"structured_outputs": {"grammar": "start: " + " ".join(f"r{i}" for i in range(3000))}},
    {"structured_outputs": {"json": {"type": "string", "pattern": "(((a?){30}){30}){30}"}}},
    {"structured_outputs": {"json": {"type": "array", "maxItems": 10**9, "items": {"enum": list(range(5000))}}}},
    {"structured_outputs": {"json": {"$ref": "#"}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"allOf": [{"$ref": "#"}] * 50}}}},
)
"""Rules whose automata, or whose compilation, grow without an end."""


def wire(rng: random.Random) -> bytes:
    """Bytes of a request that is broken somewhere, or of none at all."""
    path = rng.choice(list(VALID))
    body = json.dumps(VALID[path]).encode()
    begin = head(path)
    whole = begin + b"Content-Length: %d\r\n\r\n" % len(body) + body
    kinds = (
        lambda: rng.randbytes(rng.randint(1, 2000)),
        lambda: whole[: rng.randrange(len(whole))],
        lambda: _mutated(rng, whole),
        lambda: begin + b"Content-Length: %d\r\n\r\n" % rng.choice((0, 1, len(body) - 3, len(body) + 50)) + body,
        lambda: begin + b"Content-Length: %s\r\n\r\n" % rng.choice((b"-1", b"x", b"9" * 30, b"1e3", b"")) + body,
        lambda: begin + b"Content-Length: 5\r\nContent-Length: 9\r\n\r\n" + body,
        lambda: begin + b"Transfer-Encoding: chunked\r\n\r\n" + _chunks(rng, body),
        lambda: begin + b"Transfer-Encoding: %s\r\n\r\n" % rng.choice((b"gzip", b"x, chunked", b"chunked, x")) + body,
        lambda: begin + b"Content-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n" + body,
        lambda: begin + b"X: " + b"a" * rng.choice((60_000, 70_000, 400_000)) + b"\r\n\r\n",
        lambda: begin + b"X: y\r\n" * rng.choice((1000, 30_000)) + b"\r\n",
        lambda: b"GET /" + rng.randbytes(rng.randint(1, 300)).hex().encode() * 50 + b" HTTP/1.1\r\n\r\n",
        lambda: (
            b"%s / HTTP/%s\r\nHost: x\r\n\r\n" % (rng.choice((b"GET", b"PRI", b"\xff")), rng.choice((b"0.9", b"7")))
        ),
        lambda: begin.replace(b"\r\n", b"\n") + b"\n" + body,
        lambda: begin + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body) + body,
        lambda: b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + rng.randbytes(50),
        lambda: whole * rng.randint(2, 20),
        lambda: b"\x16\x03\x01" + rng.randbytes(300),
    )
    return rng.choice(kinds)()


def _mutated(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _chunks(rng: random.Random, body: bytes) -> bytes:
    length = rng.choice((b"%x" % len(body), b"%x" % (len(body) + 9), b"-1", b"zz", b"f" * 40, b"0" * 5000 + b"1"))
    return length + b"\r\n" + body + rng.choice((b"\r\n0\r\n\r\n", b"0\r\n", b"", b"\r\n1\r\n"))


def body(rng: random.Random) -> tuple[str, bytes]:
    """A route, and a body for it in which some fields have random values, of the right type or of wrong ones."""
    path = rng.choice(list(ROUTES))
    fields = [field.encode_name for field in structs.fields(ROUTES[path])]
    content = dict(VALID[path])
    for name in rng.sample(fields, min(len(fields), rng.choice((1, 1, 1, 2, 4)))):
        content[name] = _value(rng, depth=3)
    return path, json.dumps(content, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")


def _value(rng: random.Random, depth: int) -> Any:
    scalars = (
        *(None, True, False, 0, 1, -1, 2, 3, 20, 128, 1000, 2**31, 2**63, -(2**63), 10**40, 0.5, -0.0, 1e308, 1e-308),
        *(float("nan"), float("inf"), "", "a", "auto", "none", "json_object", "text", "json_schema", "user", "system"),
        *("\x00", "\ud800", "é" * 50, "🙂" * 9, "{{ 7*7 }}", "{% for x in range(10**9) %}{% endfor %}", "../../etc"),
        *("a" * 20_000, "1" * 5000, "http://localhost/x", "%s%n", "'; --", "\u202e", "<|im_start|>", "(a+)+$"),
    )
    if depth == 0 or rng.random() < 0.6:
        return rng.choice(scalars)
    names = ("type", "json", "regex", "choice", "grammar", "role", "content", "function", "name", "schema", "1", "-1")
    if rng.random() < 0.5:
        return {rng.choice(names): _value(rng, depth - 1) for _ in range(rng.randint(0, 4))}
    return [_value(rng, depth - 1) for _ in range(rng.choice((0, 1, 2, 5, 300 if depth == 1 else 9)))]


# The parts

FLAGS = (
    *("--block-size", "16", "--num-gpu-blocks-override", "256", "--max-model-len", "512", "--max-num-seqs", "32"),
    *("--max-num-queued-reqs", "256", "--compression", "policy=pressure,window_blocks=3,retain_blocks=2,buffer=8"),
)
NEIGHBOUR_KEY, CROWD_KEY = "sk-neighbour", KEY.decode()
AT_ONCE = 24
GONE = 32
NEIGHBOUR = {
    "prompt": "words: d3,f9,Y0,x9\n#>d+f=k\nk>k-Y=Q\nQ>?Q,k,f\n",
    "max_tokens": 60,
    "temperature": 0,
    "ignore_eos": True,
    "compression": {"compress": False},
}
LONG = {"prompt": "A", "max_tokens": 400, "n": 2, "logprobs": 10, "stream": True, "ignore_eos": True}

One = Callable[[int, Counter[str]], Awaitable[None]]
"""Sends the request of a number, and counts its status."""


class Faults:
    """Runs parts against one server."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.rng = random.Random(0)

    async def run(self, count: int, one: One, at_once: int = AT_ONCE) -> Counter[str]:
        """Call `one` so many times, some at once, beside the neighbour."""
        statuses: Counter[str] = Counter()
        numbers = iter(range(count))

        async def work() -> None:
            for number in numbers:
                await one(number, statuses)

        async with self._neighbour():
            await asyncio.gather(*(work() for _ in range(min(at_once, count))))
        assert not {status for status in statuses if status[0] == "5" and status != "503"}
        return statuses

    @contextlib.asynccontextmanager
    async def _neighbour(self) -> AsyncIterator[None]:
        """Completions of the neighbour, one after the other, until the block ends."""
        expected, found, ended = await self._completion(), [], False

        async def complete() -> None:
            while not ended:
                found.append(await self._completion())

        task = asyncio.create_task(complete())
        try:
            yield
        finally:
            ended = True
            await task
        assert set(found) == {expected}

    async def _completion(self) -> str:
        headers = {"Authorization": f"Bearer {NEIGHBOUR_KEY}"}
        status, answer = await asyncio.to_thread(self.server.json, "/v1/completions", NEIGHBOUR, headers)
        assert status == 200, answer
        return answer["choices"][0]["text"]

    async def broken_http(self, number: int, statuses: Counter[str]) -> None:
        count_statuses(statuses, await exchange(self.server.url, wire(self.rng), 1))

    async def random_body(self, number: int, statuses: Counter[str]) -> None:
        count_statuses(statuses, await exchange(self.server.url, post(*body(self.rng)), 60))

    async def exploding_rule(self, number: int, statuses: Counter[str]) -> None:
        body = {**VALID["/v1/completions"], **EXPLODING[number % len(EXPLODING)]}
        data = post("/v1/completions", json.dumps(body).encode())
        count_statuses(statuses, await exchange(self.server.url, data, 60))

    async def slow_reader(self, number: int, statuses: Counter[str]) -> None:
        """The answer is not read for a while; then all of it is, or the client goes away."""
        reader, writer = await connect(self.server.url)
        writer.write(post("/v1/completions", json.dumps(LONG).encode()))
        await asyncio.sleep(self.rng.uniform(1, 4))
        if number % 2:
            await close(writer, reset=True)
            statuses["client gone"] += 1
            return
        content = await reader.read(-1)
        statuses["200, whole" if content.rstrip(b"0\r\n").endswith(b"[DONE]") else f"ended with {content[-40:]}"] += 1
        await close(writer)

    async def dropped(self, number: int, statuses: Counter[str]) -> None:
        """A connection that ends before its request, within it, or before the answer."""
        _, writer = await connect(self.server.url)
        data = post("/v1/completions", json.dumps(LONG if number % 50 == 0 else VALID["/v1/completions"]).encode())
        writer.write(data[: self.rng.choice((0, 0, 20, len(data) - 5, len(data)))])
        await close(writer, reset=number % 2 == 1)
        statuses["dropped"] += 1

    async def clients_gone(self) -> None:
        """The clients of many streams go, and the engine gives their blocks back."""
        data = post("/v1/completions", json.dumps({**LONG, "n": 1}).encode())
        connections = [await connect(self.server.url) for _ in range(GONE)]
        for _, writer in connections:
            writer.write(data)
        await asyncio.gather(*(reader.readuntil(b"data: ") for reader, _ in connections))
        for _, writer in connections:
            writer.close()
        await asyncio.to_thread(self.wait_for_rest)

    def wait_for_rest(self) -> None:
        """Until no sequence runs and no block is in use."""
        wait_until(lambda: self._in_use() == (0, 0), "an engine at rest", state=self._in_use)

    def _in_use(self) -> tuple[float, float]:
        """Sequences and blocks in use."""
        headers = {"Authorization": f"Bearer {CROWD_KEY}"}
        values = parse(self.server.request("/metrics", headers=headers)[2].decode()).values
        return values["vllm:num_requests_running"], values["kvllm:blocks_in_use"]

    @property
    def files(self) -> int:
        """Open file descriptors of the server."""
        return psutil.Process(self.server.process.pid).num_fds()


@pytest.fixture
def faults() -> Iterator[Faults]:
    server = ServerProcess(*FLAGS, environment={"KVLLM_API_KEY": f"{NEIGHBOUR_KEY},{CROWD_KEY}"})
    try:
        yield Faults(server)
        assert server.tracebacks == []
    finally:
        code = server.stop()
    assert code == 0


def test_no_fault_of_a_client_harms_the_server_or_its_neighbour(faults: Faults) -> None:
    async def all_parts() -> None:
        await faults.run(1, lambda number, statuses: asyncio.sleep(1))
        files = faults.files
        assert (await faults.run(85, faults.broken_http))["400"] > 10
        assert (await faults.run(85, faults.random_body))["400"] > 38
        assert await faults.run(8, faults.exploding_rule, at_once=4) == {"400": 8}
        assert set(await faults.run(4, faults.slow_reader)) == {"200, whole", "client gone"}
        await faults.run(100, faults.dropped, at_once=100)
        for _ in range(3):
            await faults.clients_gone()
        await asyncio.to_thread(wait_until, lambda: faults.files <= files + 4, "the end of connections")

    asyncio.run(all_parts())
