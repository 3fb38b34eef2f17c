"""A server under requests that no client should send, and the harm that they do to a well-behaved neighbour.

    python -m benchmarks.serving.faults

Parts: broken HTTP; bodies whose fields have random values; rules of structured outputs that explode; readers that do
not read; writers that send a byte now and then; connections that are opened and dropped. A neighbour with a key of its
own streams the same completion all the time. Right is: no status of 500 or above but 503, the neighbour's tokens as
they are without the others, no exception in the log, and an engine at rest, with no file left open, at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil
from msgspec import Struct, structs

from benchmarks.common import command_line, machine, report
from benchmarks.common.streams import Stream, read_stream
from kvllm.client.scrape import parse
from kvllm.serving.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.helpers.server import ServerProcess

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
REST_SECONDS = 60.0
WRITER_SECONDS = 60.0
"""Time in which the server must have closed the connection of a slow writer."""


class Part(Struct, kw_only=True):
    """One part of the run. statuses: answers by status. resident, files: of the server, behind it.

    neighbours: streams of the neighbour meanwhile. first_token, whole: the longest of them, in seconds.
    """

    name: str
    requests: int
    seconds: float
    statuses: dict[str, int]
    neighbours: int
    first_token: float
    whole: float
    resident: int
    files: int


class Faults:
    """Runs parts against one server, and remembers what was wrong."""

    def __init__(self, server: ServerProcess, seed: int) -> None:
        self.server = server
        self.rng = random.Random(seed)
        self.parts: list[Part] = []
        self.wrong: list[str] = []
        self._expected: list[int] = []

    async def begin(self) -> None:
        """Find the neighbour's tokens, with nobody beside it."""
        self._expected = (await read_stream(self.server.url, NEIGHBOUR, NEIGHBOUR_KEY)).token_ids
        await self.run("nothing beside it", 3, lambda number, statuses: asyncio.sleep(1), at_once=1)

    async def run(
        self, name: str, count: int, one: Callable[[int, Counter[str]], Awaitable[None]], at_once: int = AT_ONCE
    ) -> None:
        """Call `one` so many times, some at once, beside the neighbour. It gets its number, and counts its statuses."""
        statuses: Counter[str] = Counter()
        numbers = iter(range(count))

        async def work() -> None:
            for number in numbers:
                await one(number, statuses)

        begin = time.monotonic()
        async with self._neighbour() as streams:
            await asyncio.gather(*(work() for _ in range(min(at_once, count))))
        process = psutil.Process(self.server.process.pid)
        part = Part(
            name=name,
            requests=count,
            seconds=time.monotonic() - begin,
            statuses=dict(sorted(statuses.items())),
            neighbours=len(streams),
            first_token=max(stream.first_seconds for stream in streams),
            whole=max(stream.seconds for stream in streams),
            resident=process.memory_info().rss,
            files=process.num_fds(),
        )
        self.parts.append(part)
        self.wrong += [f"{name}: status {status}" for status in statuses if status[0] == "5" and status != "503"]
        print(f"{name}: {part.seconds:.0f} s, {part.statuses}", flush=True)

    @contextlib.asynccontextmanager
    async def _neighbour(self) -> AsyncIterator[list[Stream]]:
        """Streams of the neighbour, one after the other, until the block ends."""
        streams: list[Stream] = []
        ended = False

        async def stream() -> None:
            while not ended or not streams:
                streams.append(await read_stream(self.server.url, NEIGHBOUR, NEIGHBOUR_KEY))

        task = asyncio.create_task(stream())
        try:
            yield streams
        finally:
            ended = True
            await task
        if any(stream.token_ids != self._expected or not stream.is_whole for stream in streams):
            self.wrong.append("a stream of the neighbour has other tokens than without the others")

    # One request of a part

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

    async def slow_writer(self, number: int, statuses: Counter[str]) -> None:
        """A byte of the headers now and then, until the server closes the connection."""
        reader, writer = await connect(self.server.url)
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\nX-Header: ")
        end = time.monotonic() + WRITER_SECONDS
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof() and time.monotonic() < end:
                writer.write(b"a")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(100), 1)
        closed = time.monotonic() < end
        statuses["closed by the server" if closed else "still open"] += 1
        if not closed:
            self.wrong.append(f"a connection without a whole head was open for {WRITER_SECONDS:.0f} s")
        await close(writer)

    async def dropped(self, number: int, statuses: Counter[str]) -> None:
        """A connection that ends before its request, within it, or before the answer."""
        _, writer = await connect(self.server.url)
        data = post("/v1/completions", json.dumps(LONG if number % 50 == 0 else VALID["/v1/completions"]).encode())
        writer.write(data[: self.rng.choice((0, 0, 20, len(data) - 5, len(data)))])
        await close(writer, reset=number % 2 == 1)
        statuses["dropped"] += 1

    async def clients_gone(self) -> float:
        """Seconds until the engine is idle and has its blocks back, once the clients of many streams have gone."""
        data = post("/v1/completions", json.dumps({**LONG, "n": 1}).encode())
        connections = [await connect(self.server.url) for _ in range(GONE)]
        for _, writer in connections:
            writer.write(data)
        await asyncio.gather(*(reader.readuntil(b"data: ") for reader, _ in connections))
        begin = time.monotonic()
        for _, writer in connections:
            writer.close()
        while await asyncio.to_thread(self._in_engine) != (0, 0):
            await asyncio.sleep(0.01)
        return time.monotonic() - begin

    def _in_engine(self) -> tuple[float, float]:
        """Running sequences, and blocks in use."""
        headers = {"Authorization": f"Bearer {CROWD_KEY}"}
        values = parse(self.server.request("/metrics", headers=headers)[2].decode()).values
        return values["vllm:num_requests_running"], values["kvllm:blocks_in_use"]

    def check_rest(self) -> None:
        """Remember if the engine does not come to rest, or if files stay open."""
        end = time.monotonic() + REST_SECONDS
        while True:
            left = (*self._in_engine(), psutil.Process(self.server.process.pid).num_fds() - self.parts[0].files)
            if left[:2] == (0, 0) and left[2] <= 4:
                return
            if time.monotonic() > end:
                self.wrong.append(f"left at the end: sequences, blocks in use, and files more than before: {left}")
                return
            time.sleep(0.2)


async def run_parts(faults: Faults, args: argparse.Namespace) -> list[float]:
    """All parts; a tenth of the random requests comes first, as a warm-up for the memory. Returns the seconds until the
    engine is idle behind clients that have gone, three times."""
    await faults.begin()
    half, warm_up = args.requests // 2, max(1, args.requests // 20)
    await faults.run("broken HTTP, warm-up", warm_up, faults.broken_http)
    await faults.run("random bodies, warm-up", warm_up, faults.random_body)
    await faults.run("broken HTTP", half, faults.broken_http)
    await faults.run("random bodies", half, faults.random_body)
    await faults.run("exploding rules", args.rules, faults.exploding_rule, at_once=4)
    await faults.run("slow readers", args.slow, faults.slow_reader, at_once=args.slow)
    if args.writers:
        await faults.run("slow writers", args.writers, faults.slow_writer, at_once=args.writers)
    await faults.run("dropped connections", args.connections, faults.dropped, at_once=100)
    return [await faults.clients_gone() for _ in range(3)]


def show(parts: Sequence[Part]) -> str:
    header = ["part", "number", "s", "neighbour's\nstreams", "first\ntoken, s", "whole\nstream, s", "resident", "files"]
    rows = [
        [
            part.name,
            f"{part.requests:,}",
            f"{part.seconds:.0f}",
            str(part.neighbours),
            f"{part.first_token:.2f}",
            f"{part.whole:.2f}",
            report.mib(part.resident),
            str(part.files),
        ]
        for part in parts
    ]
    statuses = [
        f"{part.name}: " + ", ".join(f"{status} {count:,}" for status, count in part.statuses.items())
        for part in parts
        if part.statuses
    ]
    return "\n".join([report.table(header, rows), "", *statuses])


def run(arguments: Sequence[str]) -> None:
    """Run all parts. Exits with an error if anything was wrong."""
    args = parse_arguments(arguments)
    provenance = machine.announce("benchmarks.serving.faults", arguments)
    server = ServerProcess(*FLAGS, environment={"KVLLM_API_KEY": f"{NEIGHBOUR_KEY},{CROWD_KEY}"})
    try:
        faults = Faults(server, args.seed)
        idle = asyncio.run(run_parts(faults, args))
        faults.check_rest()
        faults.wrong += [f"the log has an error: {found}" for found in server.tracebacks]
    finally:
        code = server.stop()
    if code != 0:
        faults.wrong.append(f"the server has ended with code {code}")
    wrong = "\n".join(faults.wrong[:20]) or "nothing was wrong"
    gone = ", ".join(f"{seconds:.2f}" for seconds in idle)
    print(f"\n{show(faults.parts)}\n\n{GONE} clients gone: the engine is idle after {gone} s\n{wrong}")
    content = {"parts": msgspec.to_builtins(faults.parts), "idle_seconds": idle, "wrong": faults.wrong}
    report.write_json(args.output / "faults.json", {**provenance, **content})
    print(f"\nWritten: {args.output / 'faults.json'}")
    if faults.wrong:
        sys.exit(1)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.serving.faults", __doc__)
    add = parser.add_argument
    add("--requests", type=int, default=10_000, help="half of them broken HTTP, half random bodies (default 10000)")
    add("--rules", type=int, default=24, help="exploding rules (default 24)")
    add("--slow", type=int, default=50, help="slow readers (default 50)")
    add("--writers", type=int, default=200, help="slow writers: over 30 s, if there are any (default 200)")
    add("--connections", type=int, default=10_000, help="connections that are dropped (default 10000)")
    add("--seed", type=int, default=0)
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    command_line.require_positive(args, "requests", "rules", "slow", "connections")
    return args


if __name__ == "__main__":
    command_line.run_script(run)
