"""A server under varied traffic for a long time: its memory, its accounting of blocks, and its answers.

    python -m benchmarks.serving.soak --minutes 20

Users with keys (weights, guaranteed shares, limits on cached prefixes) send requests of random kinds in bursts:
streams and whole answers, one or several completions, compressed or not, with structured outputs, shared prefixes and
priorities; some clients go away, some requests are cancelled, wrong or too many. The pool is small, so windows are
compressed and sequences preempted. The engine checks its block accounting behind every step. One user sends the same
request all the time, and its text must stay the same. Memory is read now and then. At the end the engine must be at
rest with no block owned.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import string
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
from msgspec import Struct

from benchmarks.common import command_line, machine, report
from kvllm.client.scrape import Scrape, parse
from kvllm.config import require
from tests.helpers.server import ServerProcess

# The clients

DONE = b"data: [DONE]"
CANCELLED = "client gone"
SHARED_PREFIXES = 8
VOCABULARY = 160
"""Ids below this are tokens of the package's model."""
ROW_ID = re.compile(r'"id":"([^"]+)"')
REFERENCE = {
    "prompt": "words: d3,f9,Y0,x9\n#>d+f=k\nk>k-Y=Q\nQ>?Q,k,f\n",
    "max_tokens": 120,
    "temperature": 0,
    "ignore_eos": True,
    "compression": {"compress": False},
}


class Traffic:
    """Users that send one request after the other until `stop`.

    outcomes: requests by kind and status; the status of one that its client gave up is CANCELLED.
    wrong: what should not be: errors of the server, streams that break off, tokens that differ.
    """

    def __init__(self, url: str, keys: list[str], reference_key: str, seed: int) -> None:
        self.url = url
        self.keys = keys
        self.reference_key = reference_key  # of its own: the users of the others cancel requests
        self.rng = random.Random(seed)
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.wrong: list[str] = []
        self.references = 0
        self._expected: str | None = None
        self._stopping = False
        self._prefixes = [self._tokens(self.rng.randint(16, 128)) for _ in range(SHARED_PREFIXES)]

    def stop(self) -> None:
        self._stopping = True

    async def run(self, users: int) -> None:
        """Run until `stop`, and until the requests in flight have ended."""
        async with aiohttp.ClientSession(self.url, connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(self._reference_user(session), *(self._user(session) for _ in range(users)))

    async def _user(self, session: aiohttp.ClientSession) -> None:
        """Busy times and pauses follow each other."""
        while not self._stopping:
            for _ in range(self.rng.randint(1, 12)):
                if not self._stopping:
                    await self._one(session)
            await asyncio.sleep(self.rng.expovariate(1.0))

    async def _one(self, session: aiohttp.ClientSession) -> None:
        kinds = {
            "completion": (self._completion, 50),
            "stream": (self._stream, 30),
            "left": (self._left, 20),
            "cancelled": (self._cancel, 3),
            "tokenize": (self._tokenize, 5),
            "refused": (self._refused, 5),
            "information": (self._information, 3),
        }
        (kind,) = self.rng.choices(list(kinds), [weight for _, weight in kinds.values()])
        headers = {"Authorization": f"Bearer {self.rng.choice(self.keys)}"}
        try:
            status = await kinds[kind][0](session, headers)
        except (aiohttp.ClientError, TimeoutError) as error:
            status = type(error).__name__
            self.wrong.append(f"{kind}: {type(error).__name__}: {error}")
        self.outcomes[kind, str(status)] += 1

    # Kinds of requests. Each returns a status.

    async def _completion(self, session: aiohttp.ClientSession, headers: dict[str, str]) -> int:
        body = self._body()
        async with session.post("/v1/completions", json=body, headers=headers) as answer:
            return self._check(answer.status, await answer.read(), allowed=(200, 503))

    async def _stream(self, session: aiohttp.ClientSession, headers: dict[str, str]) -> int:
        body = {**self._body(), "stream": True, "stream_options": {"include_usage": True}}
        async with session.post("/v1/completions", json=body, headers=headers) as answer:
            content = await answer.read()
            if answer.status == 200 and not content.rstrip().endswith(DONE):
                self.wrong.append(f"a stream ended with {content[-200:]!r}")
            if b'data: {"error"' in content:
                self.wrong.append(f"a stream has an error: {content[-300:]!r}")
            return self._check(answer.status, content, allowed=(200, 503))

    async def _left(self, session: aiohttp.ClientSession, headers: dict[str, str]) -> int | str:
        """The client goes away after a while, from a stream or from an answer that it waits for."""
        body = {**self._body(), "stream": self.rng.random() < 0.5, "max_tokens": 600}
        try:
            async with asyncio.timeout(self.rng.uniform(0, 2)):
                async with session.post("/v1/completions", json=body, headers=headers) as answer:
                    return self._check(answer.status, await answer.read(), allowed=(200, 503))
        except TimeoutError:
            return CANCELLED

    async def _cancel(self, session: aiohttp.ClientSession, headers: dict[str, str]) -> int:
        """A request of anybody, as the live page names it; only its own key may."""
        async with session.get("/live/events", headers=headers) as events:
            await events.content.readuntil(b"\n\n")  # those of the last minutes, without requests
            line = (await events.content.readuntil(b"\n\n")).decode()
        if not (found := ROW_ID.findall(line)):
            return 404
        async with session.delete(f"/live/requests/{self.rng.choice(found)}", headers=headers) as answer:
            return self._check(answer.status, await answer.read(), allowed=(204, 403))

    async def _tokenize(self, session: aiohttp.ClientSession, headers: dict[str, str]) -> int:
        prompt = "".join(self.rng.choices(string.digits, k=self.rng.randint(1, 20_000)))
        async with session.post("/tokenize", json={"prompt": prompt}, headers=headers) as answer:
            return self._check(answer.status, await answer.read(), allowed=(200, 400))

    async def _refused(self, session: aiohttp.ClientSession, headers: dict[str, str]) -> int:
        wrong = {"temperature": -1}, {"n": 1000}, {"prompt": [10**9]}, {"structured_outputs": {"regex": "("}}
        body = {**self._body(), **self.rng.choice(wrong)}
        async with session.post("/v1/completions", json=body, headers=headers) as answer:
            return self._check(answer.status, await answer.read(), allowed=(400, 503))

    async def _information(self, session: aiohttp.ClientSession, headers: dict[str, str]) -> int:
        path = self.rng.choice(("/metrics", "/health", "/load", "/v1/models", "/openapi.json"))
        async with session.get(path, headers=headers) as answer:
            return self._check(answer.status, await answer.read(), allowed=(200,))

    async def _reference_user(self, session: aiohttp.ClientSession) -> None:
        """The same request again and again, whose text must not depend on what else runs."""
        headers = {"Authorization": f"Bearer {self.reference_key}"}
        while not self._stopping:
            async with session.post("/v1/completions", json=REFERENCE, headers=headers) as answer:
                if self._check(answer.status, await answer.read(), allowed=(200, 503)) == 200:
                    text = (await answer.json())["choices"][0]["text"]
                    self._expected = self._expected or text
                    self.references += 1
                    if text != self._expected:
                        self.wrong.append(f"the reference has another text: {text!r}, not {self._expected!r}")
            await asyncio.sleep(0.5)

    def _check(self, status: int, content: bytes, allowed: tuple[int, ...]) -> int:
        if status not in allowed:
            self.wrong.append(f"status {status}: {content[:300]!r}")
        return status

    # Random requests

    def _tokens(self, length: int) -> list[int]:
        return [self.rng.randrange(3, VOCABULARY) for _ in range(length)]

    def _body(self) -> dict[str, Any]:
        rng = self.rng
        temperature = rng.choice((0.0, 0.7, 1.0))
        body: dict[str, Any] = {
            "prompt": self._prompt(),
            "max_tokens": rng.randint(1, 300),
            "temperature": temperature,
            "top_p": rng.choice((1.0, 0.9)),
            "repetition_penalty": rng.choice((1.0, 1.0, 1.1)),
            "n": rng.choice((1, 1, 1, 2, 4)),
            "priority": rng.choice((0, 0, 0, -1, 5)),
            "ignore_eos": rng.random() < 0.7,
        }
        extras: list[dict[str, Any]] = [
            {"logprobs": 3},
            {"stop": ["1", "?Q"]},
            {"compression": {"compress": False}},
            {"compression": {"retain_blocks": 1}},
            {"echo": True, "logprobs": 1},
            {"structured_outputs": {"regex": "[0-9]{1,40}"}},
            {"structured_outputs": {"choice": ["yes", "no"]}},
            {"cache_salt": "own"},
        ]
        return body | (rng.choice(extras) if rng.random() < 0.4 else {})

    def _prompt(self) -> str | list[int] | list[list[int]]:
        length = min(int(self.rng.lognormvariate(4.5, 1)) + 1, 600)
        kind = self.rng.random()
        if kind < 0.3:
            return "".join(self.rng.choices(string.digits, k=length))
        if kind < 0.4:
            return [self._tokens(length // 2 + 1), self._tokens(length)]
        shared = self.rng.choice(self._prefixes) if kind < 0.7 else []
        return shared + self._tokens(length)


# The server

KEYS = """
[[keys]]
name = "alice"
key = "sk-alice"
weight = 2
guaranteed_share = 0.25
[[keys]]
name = "bob"
key = "sk-bob"
guaranteed_share = 0.25
max_priority = 0
[[keys]]
name = "reference"
key = "sk-reference"
[[keys]]
name = "carol"
key = "sk-carol"
cached_share = 0.1
"""
FLAGS = (
    *("--block-size", "16", "--num-gpu-blocks-override", "192", "--max-model-len", "1536", "--max-num-seqs", "32"),
    *("--compression", "policy=pressure,window_blocks=3,retain_blocks=2,buffer=8", "--max-num-queued-reqs", "64"),
)
REST_SECONDS = 30.0
COUNTERS = ("kvllm:steps", "vllm:num_preemptions", "kvllm:windows_compressed", "vllm:generation_tokens")


class Reading(Struct):
    """The server at one time. resident: bytes in RAM. files: open file descriptors. Counters count from the start."""

    minutes: float
    resident: int
    files: int
    threads: int
    requests: int
    steps: int
    preemptions: int
    windows_compressed: int
    output_tokens: int


async def watch(server: ServerProcess, traffic: Traffic, minutes: float, every: float) -> list[Reading]:
    """Read the server every so many minutes while the traffic runs, then stop the traffic."""
    begin, readings = time.monotonic(), []
    try:
        while not readings or readings[-1].minutes < minutes:
            await asyncio.sleep(60 * every)
            scrape = await asyncio.to_thread(_scrape, server)
            readings.append(_read(server, traffic, (time.monotonic() - begin) / 60, scrape))
            show(readings[-1])
    finally:
        traffic.stop()
    return readings


def _scrape(server: ServerProcess) -> Scrape:
    return parse(server.request("/metrics", headers={"Authorization": "Bearer sk-alice"})[2].decode())


def _read(server: ServerProcess, traffic: Traffic, minutes: float, scrape: Scrape) -> Reading:
    process = psutil.Process(server.process.pid)
    return Reading(
        round(minutes, 2),
        process.memory_info().rss,
        process.num_fds(),
        process.num_threads(),
        sum(traffic.outcomes.values()) + traffic.references,
        *(int(scrape.values[f"{name}_total"]) for name in COUNTERS),
    )


def show(reading: Reading) -> None:
    print(
        f"{reading.minutes:5.1f} min: {report.mib(reading.resident)} resident, {reading.files} files, "
        f"{reading.threads} threads; {reading.requests:,} requests, {reading.steps:,} steps, "
        f"{reading.preemptions:,} preemptions, {reading.windows_compressed:,} windows",
        flush=True,
    )


def check_rest(server: ServerProcess) -> list[str]:
    """What is wrong with a server that has nothing to do."""
    end = time.monotonic() + REST_SECONDS
    while True:
        values = _scrape(server).values
        left = {name: values[name] for name in ("vllm:num_requests_running", "kvllm:blocks_in_use")}
        if not any(left.values()):
            break
        if time.monotonic() > end:
            return [f"the engine is not at rest: {left}"]
        time.sleep(0.1)
    return [f"the log has an error: {found}" for found in server.tracebacks]


def soak(args: argparse.Namespace) -> tuple[list[Reading], Traffic]:
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        keys.write_text(KEYS)
        server = ServerProcess(*FLAGS, "--api-key-file", str(keys), module="benchmarks.serving.checked_server")
        try:
            traffic = Traffic(server.url, ["sk-alice", "sk-bob", "sk-carol"], "sk-reference", args.seed)

            async def together() -> list[Reading]:
                watching = asyncio.create_task(watch(server, traffic, args.minutes, args.every))
                await traffic.run(args.users)
                return await watching

            readings = asyncio.run(together())
            traffic.wrong += check_rest(server)
        finally:
            if server.stop() != 0:
                print("the server has ended with an error", file=sys.stderr)
    return readings, traffic


def summary(traffic: Traffic) -> str:
    """A table of the requests by kind and status, and what was wrong."""
    rows = [[kind, status, f"{count:,}"] for (kind, status), count in sorted(traffic.outcomes.items())]
    rows.append(["reference, same text", "200", f"{traffic.references:,}"])
    wrong = "nothing was wrong" if not traffic.wrong else f"{len(traffic.wrong)} were wrong:"
    return "\n".join([report.table(["requests", "status", "number"], rows), "", wrong, *traffic.wrong[:20]])


def run(arguments: Sequence[str]) -> None:
    """Soak a server. Exits with an error if anything was wrong."""
    args = parse_arguments(arguments)
    provenance = machine.announce("benchmarks.serving.soak", arguments)
    readings, traffic = soak(args)
    print(f"\n{summary(traffic)}")
    content = {
        "readings": msgspec.to_builtins(readings),
        "outcomes": [[*key, count] for key, count in sorted(traffic.outcomes.items())],
        "references": traffic.references,
        "wrong": traffic.wrong,
    }
    report.write_json(args.output / "soak.json", {**provenance, **content})
    minutes = [each.minutes for each in readings]
    panels = {
        "resident, MiB": {"server": (minutes, [each.resident / report.MIB for each in readings])},
        "preemptions": {"server": (minutes, [float(each.preemptions) for each in readings])},
    }
    report.plot_lines(args.output / "soak.png", "kvllm serve under varied traffic", "minutes", panels)
    print(f"\nWritten: {args.output / 'soak.json'}, {args.output / 'soak.png'}")
    if traffic.wrong:
        sys.exit(1)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.serving.soak", __doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=20)
    add("--every", type=float, default=1, metavar="MINUTES", help="between two readings (default 1)")
    add("--users", type=int, default=24, help="clients at once (default 24)")
    add("--seed", type=int, default=0)
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    for name in ("minutes", "every", "users"):
        require(getattr(args, name) > 0, f"--{name}", getattr(args, name), "above 0")
    return args


if __name__ == "__main__":
    command_line.run_script(run)
