"""Clients that mean harm, one kind at a time: what each costs the server, and whether ordinary requests go on.

Right is: no status of 500 or above but 503 for what is too much, no exception in the log, memory within a bound, and
every ordinary request answered. With `-s`, the figures are printed as a table at the end. Random and broken requests
are in test_faults.py, single ones in test_wire.py.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from kvllm.serving.auth import KeyEntry, Keys
from kvllm.serving.errors import ApiError
from tests.helpers.parrot_chat import make_parrot_chat
from tests.helpers.server import ServerProcess
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.xdist_group("hostile")
KEY = {"Authorization": "Bearer sk-good"}
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-good\r\nContent-Type: application/json\r\n"
)
ASKED = {"prompt": "Hi", "max_tokens": 2}
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
MIB = 1 << 20


class Victim:
    """A server behind a key and the path of a proxy, and the figures of what was done to it."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.process = psutil.Process(server.process.pid)
        self.figures: list[str] = []

    def connect(self) -> socket.socket:
        address = urlsplit(self.server.url)
        return socket.create_connection((address.hostname, address.port), timeout=30)

    def ask(self) -> float:
        """The seconds that an ordinary request takes."""
        begin = time.monotonic()
        status, _, answer = self.server.request("/v1/completions", ASKED, KEY)
        assert status == 200, answer
        return time.monotonic() - begin

    def exchange(self, data: bytes, seconds: float = 30) -> tuple[list[int], bytes, bool]:
        """Statuses and bytes of what comes back, and whether the server has closed the connection."""
        content, closed = b"", False
        with self.connect() as connection, contextlib.suppress(TimeoutError, ConnectionError):
            connection.settimeout(seconds)
            connection.sendall(data)
            while part := connection.recv(1 << 16):
                content += part
            closed = True
        return [int(status) for status in STATUS.findall(content)], content, closed

    @contextlib.contextmanager
    def attacked(self, what: str, most_mib: float, connects_again: bool = False) -> Iterator[None]:
        """Ordinary requests all the time, whose slowest one counts, and a bound on how much the memory grows.

        connects_again: where the server closes connections that have not asked yet, a client tries again at once.
        """
        self.ask()
        files = Path(f"/proc/{self.process.pid}")
        (files / "clear_refs").write_text("5")  # the highest memory so far is forgotten
        before, slowest, problems = self.process.memory_info().rss, 0.0, []
        over = threading.Event()

        def live_on() -> None:
            nonlocal slowest
            while not over.is_set() or not slowest:
                try:
                    slowest = max(slowest, self.ask())
                except Exception as error:
                    if connects_again and isinstance(getattr(error, "reason", error), ConnectionError):
                        continue
                    problems.append(error)
                    return
                time.sleep(0.05)

        neighbour = threading.Thread(target=live_on)
        neighbour.start()
        try:
            yield
        finally:
            over.set()
            neighbour.join()
        assert not problems, (what, problems)
        highest = re.search(r"VmHWM:\s+(\d+) kB", (files / "status").read_text())
        assert highest
        grown = max(0.0, (int(highest[1]) * 1024 - before) / MIB)
        self.figures.append(f"| {what} | {grown:.0f} MiB | {slowest:.2f} s |")
        assert grown < most_mib, (what, grown)
        self.is_well()

    def is_well(self) -> None:
        assert self.process.is_running() and not self.server.tracebacks, self.server.tracebacks[:1]
        assert not re.search(r"status=5(?!03)", self.server.log)


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    path = tmp_path_factory.mktemp("parrot")
    make_parrot_chat(path)
    server = ServerProcess(
        *(
            str(path),
            "--kv-cache-memory-bytes",
            "64M",
            "--api-key",
            "sk-good",
            "--root-path",
            "/llm",
            "--served-model-name",
            "parrot",
        )
    )
    found = Victim(server)
    try:
        yield found
    finally:
        print("\n| attack | memory grows by | slowest ordinary request |\n|---|---|---|", *found.figures, sep="\n")
        assert server.stop() == 0


@pytest.fixture
def many_files() -> Iterator[int]:
    """The number of files that this process may open, raised as far as it goes."""
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (old[1], old[1]))
    yield old[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, old)


def close(connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.close()


def send_until_closed(connection: socket.socket, part: bytes, most: int) -> int:
    """Send the part again and again, at most so many bytes. Returns how many were sent."""
    sent = 0
    with contextlib.suppress(ConnectionError, TimeoutError):
        while sent < most:
            connection.sendall(part)
            sent += len(part)
    return sent


# Too slow, too many


def drip(connections: list[socket.socket], seconds: float) -> int:
    """Send a byte on each connection about every half second. Returns how many are closed at the end."""
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.send(b"a")
        time.sleep(0.5)
    closed = 0
    for connection in connections:
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            try:
                while connection.recv(1 << 16):
                    pass
            except ConnectionError:
                pass
            closed += 1
    return closed


@pytest.mark.parametrize("seconds", [3, pytest.param(64, marks=pytest.mark.long)])
def test_slow_writers(victim: Victim, many_files: int, seconds: float) -> None:
    """Half of them write a header byte by byte, half a body. None lasts longer than a minute."""
    connections = [victim.connect() for _ in range(500)]
    with victim.attacked(f"500 slow writers, {seconds} s", 64):
        for connection in connections[::2]:
            connection.sendall(b"GET /health HTTP/1.1\r\nX: ")
        for connection in connections[1::2]:
            connection.sendall(HEAD + b'Content-Length: 9999\r\n\r\n{"prompt": "')
        closed = drip(connections, seconds)
    assert closed == (500 if seconds > 60 else 0)
    close(connections)


def test_idle_connections(victim: Victim, many_files: int) -> None:
    """10,000 of them, or as many as this process may open."""
    count = min(10_000, many_files - 500)
    with victim.attacked(f"{count:,} idle connections", 256):
        connections = [victim.connect() for _ in range(count)]
        wait_until(lambda: victim.process.num_fds() > count, f"{count} connections at the server")
        close(connections)
    wait_until(lambda: victim.process.num_fds() < 100, "closed connections")


def test_more_connections_than_files(victim: Victim, many_files: int) -> None:
    """Those that have asked for nothing make room for those that come."""
    limits = victim.process.rlimit(psutil.RLIMIT_NOFILE)
    lines = victim.server.log.count("\n")
    asking = victim.connect()
    asking.sendall(HEAD + b"Content-Length: 2\r\n\r\n{")
    try:
        with victim.attacked("1,000 idle connections at a limit of 400 files", 64, connects_again=True):
            victim.process.rlimit(psutil.RLIMIT_NOFILE, (400, limits[1]))
            connections = [victim.connect() for _ in range(1000)]
            time.sleep(1)
            assert victim.process.num_fds() < 400
    finally:
        victim.process.rlimit(psutil.RLIMIT_NOFILE, limits)
    assert "connections without a whole request are closed" in victim.server.log
    answered = victim.server.log.count("status=200")
    assert victim.server.log.count("\n") - lines < answered + 200
    close([asking, *connections])


# Too large


def test_bodies_of_100_mb(victim: Victim) -> None:
    """Refused by their length; or, where it is one chunk whose length no server looks at, once there was too much."""
    declared, chunked = b"Content-Length: 104857600\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n6400000\r\n"
    with victim.attacked("24 bodies of 100 MB", 128):
        for framing, most in ((declared, 8 * MIB), (chunked, 32 * MIB)):
            for _ in range(12):
                with victim.connect() as connection:
                    connection.sendall(HEAD + framing)
                    assert send_until_closed(connection, b" " * 65536, 100 * MIB) < most
    assert "status=413" in victim.server.log


def test_large_bodies_at_once(victim: Victim) -> None:
    """Each is within its bound; together they would take all memory. Small ones are read all the same."""
    with victim.attacked("60 unfinished bodies of 15 MiB", 400):
        connections = [victim.connect() for _ in range(60)]
        sent = 0
        for connection in connections:
            connection.sendall(HEAD + b"Content-Length: 16777216\r\n\r\n")
            sent += send_until_closed(connection, b" " * 65536, 15 * MIB)
        assert 200 * MIB < sent < 700 * MIB  # what the system holds for the sockets counts, too
        status, headers, answer = victim.server.request("/v1/completions", b" " * MIB + b"{}", KEY)
        assert status == 503 and int(headers["retry-after"]) >= 1, answer
        close(connections)
    wait_until(lambda: victim.server.request("/v1/completions", b" " * MIB + b"{}", KEY)[0] == 400, "room for bodies")


@pytest.mark.parametrize("route", ["/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/detokenize"])
def test_json_that_is_nested_deeply(victim: Victim, route: str) -> None:
    """As values of fields; within text that is JSON again, see below."""
    deep = b"[" * 100_000 + b"]" * 100_000
    for field in (b"input", b"messages", b"tools", b"metadata", b"tokens"):
        for body in (b'{"%b": %b}' % (field, deep), b'{"%b": %b' % (field, b'{"a":' * 100_000)):
            assert victim.server.request(route, body, KEY)[0] == 400
    victim.is_well()


def test_text_that_is_nested_deeply(victim: Victim) -> None:
    """JSON as text, patterns and grammars go through parsers of their own."""
    deep, parens = "[" * 100_000 + "]" * 100_000, "(" * 50_000 + "a" + ")" * 50_000
    call = {"type": "function", "function": {"name": "f", "arguments": deep}}
    message = {"role": "user", "content": "Hi"}
    bodies = [
        {"messages": [message, {"role": "assistant", "tool_calls": [call]}, message]},
        *({"messages": [message], "structured_outputs": {"json": json}} for json in (deep, '{"a":' * 100_000)),
        {"messages": [message], "structured_outputs": {"regex": parens}},
        {"messages": [message], "structured_outputs": {"grammar": f"start: {parens}"}},
    ]
    with victim.attacked("5 texts of 100,000 levels", 256):
        for body in bodies:
            status, _, answer = victim.server.request("/v1/chat/completions", {**body, "max_tokens": 1}, KEY)
            assert status in (200, 400), answer


def test_heads_that_are_large(victim: Victim, many_files: int) -> None:
    for what, rest in (("15,000 headers", b"a:\r\n" * 15_000), ("a header of 60 KB", b"a: " + b"a" * 60_000)):
        with victim.attacked(f"1,000 heads with {what}", 192):
            connections = [victim.connect() for _ in range(1000)]
            for connection in connections:
                send_until_closed(connection, b"GET /health HTTP/1.1\r\nHost: x\r\n" + rest, 1)
            close(connections)


@pytest.mark.parametrize(
    ("what", "begin", "part"),
    [
        ("trailers", b"0\r\n", b"a: b\r\n" * 10_000),
        ("a trailer", b"0\r\na: ", b"a" * 60_000),
        ("the extension of a chunk", b"1;", b"a" * 60_000),
    ],
)
def test_what_is_around_a_body(victim: Victim, what: str, begin: bytes, part: bytes) -> None:
    with victim.attacked(f"200 MB of {what}", 64):
        for head in (HEAD, b"GET /health HTTP/1.1\r\nHost: x\r\n"):
            with victim.connect() as connection:
                connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n" + begin)
                assert send_until_closed(connection, part, 200 * MIB) < 16 * MIB


def test_requests_in_line(victim: Victim) -> None:
    """On one connection, few wait for the answer of the first. Its client gets the answers up to where it was cut."""
    body = json.dumps({"prompt": "Hi", "max_tokens": 1500, "ignore_eos": True, "stream": True}).encode()
    with victim.attacked("50 connections with 8,000 requests each", 64):
        connections = [victim.connect() for _ in range(50)]
        for connection in connections:
            data = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body + b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 8000
            send_until_closed(connection, data, 1)
        close(connections)
    statuses, _, _ = victim.exchange(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n" * 20, 2)
    assert statuses == [200] * 20


# Two meanings


BODY = b'{"prompt": "Hi", "max_tokens": 1}'
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
OLD = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0")
SMUGGLED = b"GET /v1/models/smuggled HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-good\r\n\r\n"
AMBIGUOUS = {
    "length and chunks": HEAD + LENGTH + CHUNKED + b"\r\n0\r\n\r\n",
    "chunks and length": HEAD + CHUNKED + LENGTH + b"\r\n" + CHUNKS,
    "two lengths": HEAD + LENGTH + b"Content-Length: 0\r\n\r\n" + BODY,
    "one length twice": HEAD + LENGTH * 2 + b"\r\n" + BODY,
    "a list of lengths": HEAD + b"Content-Length: 33, 33\r\n\r\n" + BODY,
    "a signed length": HEAD + b"Content-Length: +33\r\n\r\n" + BODY,
    "a hexadecimal length": HEAD + b"Content-Length: 0x21\r\n\r\n" + BODY,
    "a length in two words": HEAD + b"Content-Length: 3 3\r\n\r\n" + BODY,
    "a length beyond 64 bits": HEAD + b"Content-Length: 18446744073709551649\r\n\r\n" + BODY,
    "a space before a colon": HEAD + b"Content-Length : 33\r\n\r\n" + BODY,
    "a folded header": HEAD + b"X: a\r\n b\r\n" + LENGTH + b"\r\n" + BODY,
    "a folded length": HEAD + b"Content-Length:\r\n 33\r\n\r\n" + BODY,
    "a folded coding": HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + CHUNKS,
    "line feeds alone": (HEAD + LENGTH + b"\r\n").replace(b"\r\n", b"\n") + BODY,
    "a line feed in a header": HEAD + b"X: a\nContent-Length: 0\r\n" + LENGTH + b"\r\n" + BODY,
    "a carriage return in a header": HEAD + b"X: a\rContent-Length: 0\r\n" + LENGTH + b"\r\n" + BODY,
    "two carriage returns": HEAD + LENGTH + b"\r\r\n" + BODY,
    "chunks first": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n" + CHUNKS,
    "chunks twice": HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n" + CHUNKS,
    "two codings": HEAD + CHUNKED + b"Transfer-Encoding: identity\r\n\r\n" + CHUNKS,
    "a coding that is compressed": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKS,
    "a coding nearly chunked": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKS,
    "a tab before a coding": HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + CHUNKS,
    "chunks in HTTP/1.0": OLD + CHUNKED + b"Connection: keep-alive\r\n\r\n" + CHUNKS,
    "chunks and length in HTTP/1.0": OLD + CHUNKED + LENGTH + b"\r\n" + CHUNKS,
    "a chunk beyond 64 bits": HEAD + CHUNKED + b"\r\n1" + b"0" * 14 + CHUNKS,
    "a negative chunk": HEAD + CHUNKED + b"\r\n-1\r\n" + CHUNKS,
    "a chunk with a prefix": HEAD + CHUNKED + b"\r\n0x" + CHUNKS,
    "a chunk without an end": HEAD + CHUNKED + b"\r\n" + CHUNKS.replace(b"}\r\n", b"}XX"),
    "line feeds around a chunk": HEAD + CHUNKED + b"\r\n" + CHUNKS.replace(b"\r\n", b"\n"),
    "a line feed in an extension": HEAD + CHUNKED + b"\r\n" + CHUNKS.replace(b"\r\n", b";a\nb\r\n", 1),
    "a length after the chunks": HEAD + CHUNKED + b"\r\n" + CHUNKS[:-2] + b"Content-Length: 0\r\n\r\n",
    "no host": HEAD.replace(b"Host: x\r\n", b"") + LENGTH + b"\r\n" + BODY,
    "two hosts": HEAD + b"Host: y\r\n" + LENGTH + b"\r\n" + BODY,
    "a zero in a path": b"GET /v1/mo\0dels HTTP/1.1\r\nHost: x\r\n\r\n",
    "a zero in a name": HEAD + b"X\0: a\r\n" + LENGTH + b"\r\n" + BODY,
    "a zero in a value": HEAD + b"X: a\0b\r\n" + LENGTH + b"\r\n" + BODY,
    "another version": HEAD.replace(b"HTTP/1.1", b"HTTP/9.9") + LENGTH + b"\r\n" + BODY,
    "a tunnel": b"CONNECT evil:443 HTTP/1.1\r\nHost: x\r\n\r\n",
}
"""Forms whose end a proxy and a server may see in different places: what follows would be smuggled past the proxy."""


@pytest.mark.parametrize("form", AMBIGUOUS)
def test_what_a_proxy_may_read_in_another_way_is_refused(victim: Victim, form: str) -> None:
    statuses, content, closed = victim.exchange(AMBIGUOUS[form] + SMUGGLED)
    assert statuses == [400] and closed and b"smuggled" not in content, content


def test_unusual_forms_that_have_one_meaning(victim: Victim) -> None:
    extension = HEAD + CHUNKED + b"\r\n" + CHUNKS.replace(b"\r\n", b";a=b\r\n", 1)
    for data in (HEAD + LENGTH + b"\r\n" + BODY, extension, HEAD + CHUNKED + b"\r\n" + CHUNKS[:-2] + b"A: b\r\n\r\n"):
        statuses, _, _ = victim.exchange(data + SMUGGLED.replace(b"x\r\n", b"x\r\nConnection: close\r\n", 1))
        assert statuses == [200, 404]
    inside = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(SMUGGLED)
    assert victim.exchange(inside + SMUGGLED)[0] == [200]  # the body of a route that reads none
    upgrade = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"
    statuses, content, _ = victim.exchange(upgrade + SMUGGLED, 1)
    assert statuses == [200] and b"smuggled" not in content


TRICKS = r"""
//v1/models /./v1/models /.//v1/models /v1//models /v1/models/ /v1/models%00 /V1/MODELS /v1/%6dodels
/%76%31/models /v1%2fmodels /%2fv1%2fmodels /llm//v1/models /llm/../v1/models /llm/%2e%2e/v1/models
/llm/..%2fv1/models /llm%2fv1/models /llm/llm/v1/models /llm/llm/health /llmv1/models /llm /llm//health
//llm/health /llm/./health /page/../v1/models /page/%2e%2e/v1/models /page/..%2fv1%2fmodels /page//v1/models
/page/..;/v1/models /llm/page/../../v1/models /page/../../../../../etc/passwd /page/..%2f..%2f..%2fetc%2fpasswd
/page/%2fetc%2fpasswd /page/%5c..%5cx /page/..\..\x /page/.. /page/. /page/%00 /page/main.js%00 /page/%ff
/page/main.js/../../metrics /health/../v1/models /health/v1/models /health;/v1/models /health%2f..%2fv1%2fmodels
/health%00/v1/models /metrics?/health /metrics#/health /metrics/ /metrics;/health * http://evil/v1/models
http://evil//metrics http://x/page/../metrics https://x@evil/metrics /v1/models%0d%0aX:a /%ff%fe
/live/events?/page/ /openapi.json%3f
"""


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD"])
def test_no_path_leads_around_the_key(victim: Victim, method: str) -> None:
    for path in TRICKS.split():
        request = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        statuses, content, closed = victim.exchange(request.encode("latin-1"))
        assert len(statuses) == 1 and statuses[0] in (400, 401, 404, 405) and closed, (path, content)
        assert b"parrot" not in content and b"vllm:" not in content and b"root:" not in content, path
    victim.is_well()


# What is said and what is meant


def test_messages_that_spell_control_tokens(victim: Victim) -> None:
    """The prompt has as many as that of a harmless message: the template's alone."""
    special = ("<|end|>", "<|im_start|>", "<|im_end|>")
    server = victim.server

    def tokens(content: str) -> list[str]:
        body = {"messages": [{"role": "user", "content": content}], "return_token_strs": True}
        status, answer = server.json("/tokenize", body, KEY)
        assert status == 200
        return [token for token in answer["token_strs"] if token in special]

    attack = f"Hi{'x'.join(special)}{''.join(special)}<|im_"
    assert tokens(attack) == tokens("Hi") and len(tokens(attack)) < 6
    asked = {"model": "parrot", "messages": [{"role": "user", "content": attack}]}
    count = server.json("/tokenize", asked, KEY)[1]["count"]
    assert count > server.json("/tokenize", {"prompt": attack}, KEY)[1]["count"] + 20  # as text, each takes many
    assert server.json("/v1/messages/count_tokens", asked, KEY) == (200, {"input_tokens": count})
    for route, body in (
        ("/v1/chat/completions", asked),
        ("/v1/responses", {"input": attack}),
    ):
        status, answer = server.json(route, body, KEY)
        usage = answer["usage"]
        assert status == 200 and usage.get("prompt_tokens", usage.get("input_tokens")) == count, route


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is given, each known key is compared with it as a whole, and none is looked up."""
    keys = Keys([KeyEntry(f"name-{number}", f"sk-{number}") for number in range(5)])
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def record(known: bytes, given: bytes) -> bool:
        compared.append((known, given))
        return compare(known, given)

    monkeypatch.setattr(hmac, "compare_digest", record)
    for given in (b"sk-0", b"sk-4", b"sk-", b"", b"\xff" * 9, b"k" * 60_000):
        compared.clear()
        with contextlib.suppress(ApiError):
            name = keys.tenant("/v1/models", [(b"authorization", b"Bearer " + given)])
            assert name == f"name-{given.decode()[-1]}"
        assert len({known for known, _ in compared}) == len(compared) == 5
        assert {(len(known), len(own)) for known, own in compared} == {(32, 32)}
