"""What arrives on the wire, well formed or not, gets one shape of answer and harms nobody."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import time
import zlib
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.helpers.server import COMPLETION_HEAD, ServerProcess
from tests.serving.conftest import PROMPT, SERVERS

pytestmark = SERVERS


def connect(server: ServerProcess) -> socket.socket:
    where = urlsplit(server.url)
    assert where.hostname and where.port
    return socket.create_connection((where.hostname, where.port), timeout=30)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/gpt-4", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("POST", "/health", 405),
        ("PUT", "/v1/responses/resp_1", 405),
    ],
)
def test_unknown_routes_and_methods(server: ServerProcess, method: str, path: str, status: int) -> None:
    found, headers, body = server.request(path, method=method)
    assert found == status and headers["content-type"] == "application/json"
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
    assert headers["x-request-id"]
    if status == 405:
        assert headers["allow"]
    if path == "/v1/responses/resp_1":  # one path of two methods
        assert {"GET", "DELETE"} <= {each.strip() for each in headers["allow"].split(",")}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"prompt": "a"',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": NaN}',
        b'{"prompt": 1e999}',
        b'{"prompt": [1' + b"0" * 400 + b"]}",
        b'{"prompt": [' * 5000,
        b'{"prompt": "a", "user": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "a", "x": ' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"prompt": "a", "x": [' + b"[]," * 200_000 + b"[]]}",
        b'"' + b'\\"' * 2_000_000 + b"[" * 70,
        b"\x00" * 1000,
    ],
    ids=range(17),
)
def test_bodies_that_are_no_requests(server: ServerProcess, body: bytes) -> None:
    begin = time.monotonic()
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        status, _, answer = server.request(path, body)
        assert status == 400 and json.loads(answer)["error"]["type"] == "BadRequestError", (path, answer)
    assert time.monotonic() - begin < 10


def test_only_json_is_read(server: ServerProcess) -> None:
    """A page in a browser can send forms and text to this machine without asking, but no JSON."""
    for kind in ("application/x-www-form-urlencoded", "text/plain; charset=application/json", ""):
        status, _, answer = server.request("/v1/completions", {"prompt": "a"}, {"Content-Type": kind})
        assert status == 415 and json.loads(answer)["error"]["code"] == 415
    declared = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert server.request("/v1/completions", {"prompt": "a", "max_tokens": 1}, declared)[0] == 200


RAW = zlib.compressobj(wbits=-zlib.MAX_WBITS)
SMALL = b'{"prompt": "a", "max_tokens": 1}'
BOMB = b'{"prompt": "' + b"a" * (17 << 20) + b'"}'


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("identity", SMALL, 200),
        ("gzip", gzip.compress(SMALL), 200),
        ("GZIP", gzip.compress(b"\xef\xbb\xbf" + SMALL), 200),
        ("x-gzip", gzip.compress(SMALL), 200),
        ("deflate", zlib.compress(SMALL), 200),
        ("deflate", RAW.compress(SMALL) + RAW.flush(), 200),
        ("gzip", gzip.compress(BOMB), 413),
        ("deflate", zlib.compress(BOMB), 413),
        ("gzip", SMALL, 400),
        ("deflate", SMALL, 400),
        ("gzip", gzip.compress(SMALL)[:-5], 400),
        ("gzip", gzip.compress(SMALL) * 2, 400),
        ("br", SMALL, 415),
        ("gzip, gzip", gzip.compress(gzip.compress(SMALL)), 415),
    ],
    ids=range(14),
)
def test_compressed_bodies(server: ServerProcess, encoding: str, body: bytes, status: int) -> None:
    found, headers, answer = server.request("/v1/completions", body, {"Content-Encoding": encoding})
    assert found == status, answer
    assert headers.get("accept-encoding") == ("gzip, deflate" if status == 415 else None)


def test_a_byte_order_mark_is_no_part_of_a_body(server: ServerProcess) -> None:
    assert server.request("/v1/completions", b"\xef\xbb\xbf" + SMALL)[0] == 200
    assert server.request("/v1/completions", b"\xef\xbb\xbf" * 2 + SMALL)[0] == 400


def test_a_body_that_is_too_large(server: ServerProcess) -> None:
    """With its length told, nothing of it is read; without, as much as is allowed."""
    with connect(server) as connection:
        connection.sendall(COMPLETION_HEAD + b"Content-Length: 99999999999\r\n\r\n")
        assert b" 413 " in connection.recv(4096).split(b"\r\n")[0]
    with connect(server) as connection:
        connection.sendall(COMPLETION_HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        answer = b""
        try:
            for _ in range(20):
                connection.sendall(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")
            answer = connection.recv(4096)
        except (ConnectionResetError, BrokenPipeError):
            answer = connection.recv(4096)
        assert b" 413 " in answer.split(b"\r\n")[0]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /version HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"GET /version HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 300_000, 431),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (b"GET /version HTTP/1.1\r\nHost: x\r\n" + b"X: a\r\n" * 20_000 + b"\r\n", 431),
        (b"GET /version HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 60_000 + b"\r\n\r\n", 200),
        (b"no HTTP at all\r\n\r\n", 400),
        (b"GET /version HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET http:// HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    ],
    ids=["long header", "no end", "long path", "many headers", "within the bound", "noise", "length", "url"],
)
def test_the_head_of_a_request_has_a_bound(server: ServerProcess, head: bytes, status: int) -> None:
    with connect(server) as connection:
        with contextlib.suppress(ConnectionError):  # the server may have answered before all was sent
            connection.sendall(head)
        answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    if status != 200:
        assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == status
    assert server.request("/health")[0] == 200


def test_a_slow_writer_harms_nobody(server: ServerProcess) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 2, "temperature": 0}).encode()
    with connect(server) as connection:
        connection.sendall(COMPLETION_HEAD + b"Content-Length: %d\r\n\r\n" % len(body))
        for byte in body[:10]:
            connection.sendall(bytes([byte]))
            assert server.json("/version")[0] == 200
        connection.sendall(body[10:])
        assert b" 200 " in connection.recv(4096).split(b"\r\n")[0]


def test_a_slow_reader_gets_all(server: ServerProcess) -> None:
    """Its stream waits, others do not."""
    body = {
        "prompt": PROMPT,
        "max_tokens": 400,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "n": 4,
        "logprobs": 9,
    }
    data = json.dumps(body).encode()
    with connect(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32768)
        head = COMPLETION_HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n"
        connection.sendall(head % len(data) + data)
        time.sleep(0.5)
        begin = time.monotonic()
        assert server.json("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
        assert time.monotonic() - begin < 10
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    assert received.rstrip(b"0\r\n").endswith(b"data: [DONE]")
    assert received.count(b'"finish_reason":"length"') == 4


def test_thousands_of_connections_that_are_dropped(server: ServerProcess) -> None:
    for _ in range(500):
        connect(server).close()
    for _ in range(100):
        with connect(server) as connection:
            connection.sendall(COMPLETION_HEAD + b"Content-Length: 100\r\n\r\n{")
    assert server.request("/health")[0] == 200


def test_information(server: ServerProcess) -> None:
    assert server.request("/health")[0] == server.request("/ping")[0] == server.request("/ping", b"")[0] == 200
    assert server.json("/load") == (200, {"server_load": 0})
    assert set(server.json("/version")[1]) == {"version"}
    status, document = server.json("/openapi.json")
    assert status == 200 and document["openapi"].startswith("3.")
    assert "/v1/chat/completions" in document["paths"]
    references: set[str] = set()

    def collect(node: Any) -> None:
        if isinstance(node, dict):
            references.update([node["$ref"]] if isinstance(node.get("$ref"), str) else [])
            node = list(node.values())
        if isinstance(node, list):
            for each in node:
                collect(each)

    collect(document)
    schemas = document["components"]["schemas"]
    assert references and all(reference.rpartition("/")[2] in schemas for reference in references)
    assert "top_k" in schemas["CompletionRequest"]["properties"]


def test_metrics(server: ServerProcess) -> None:
    before = {name: server.metric(name) for name in ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")}
    finished = 'vllm:request_success_total{engine="0",finished_reason="length",model_name="reasoner"}'
    assert server.json("/v1/completions", {"prompt": PROMPT, "max_tokens": 7, "ignore_eos": True, "n": 2})[0] == 200
    assert server.metric("vllm:generation_tokens_total") - before["vllm:generation_tokens_total"] == 14
    assert server.metric("vllm:prompt_tokens_total") - before["vllm:prompt_tokens_total"] == 40
    assert server.metric(finished) >= 2
    assert server.metric("vllm:num_requests_running") == server.metric("vllm:num_requests_waiting") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    for name in (
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",
        "kvllm:stall_seconds",
    ):
        assert server.metric(f"{name}_count") > 0
    assert server.metric("kvllm:event_stall_seconds_count") == 0
    for name in ("kvllm:windows_compressed_total", "kvllm:evicted_pairs_total", "kvllm:blocks_released_total"):
        assert server.metric(name) == 0


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3}, {"use_beam_search": True, "n": 2}])
def test_the_times_between_tokens_are_counted_for_each_token(server: ServerProcess, fields: dict[str, Any]) -> None:
    """Tokens come together where they are faster than events. The sum is what lies between the first and the last."""
    name, number = "vllm:inter_token_latency_seconds", fields.get("n", 1)
    before = server.metric(f"{name}_count"), server.metric(f"{name}_sum")
    body = {"prompt": PROMPT, "max_tokens": 50, "ignore_eos": True, **fields}
    begin = time.monotonic()
    assert server.request("/v1/completions", body)[0] == 200
    seconds = time.monotonic() - begin
    assert server.metric(f"{name}_count") - before[0] == 49 * number
    assert 0 <= server.metric(f"{name}_sum") - before[1] <= number * seconds


def test_metrics_of_steps_and_of_what_waits(server: ServerProcess) -> None:
    names = ("vllm:iteration_tokens_total", "vllm:request_num_preemptions")
    before = [(server.metric(f"{name}_count"), server.metric(f"{name}_sum")) for name in names]
    steps = server.metric("kvllm:steps_total")
    body = {"prompt": list(range(3, 23)), "max_tokens": 7, "ignore_eos": True, "cache_salt": "of its own"}
    assert server.json("/v1/completions", body)[0] == 200
    after = [(server.metric(f"{name}_count"), server.metric(f"{name}_sum")) for name in names]
    steps = server.metric("kvllm:steps_total") - steps
    assert [(number - was[0], total - was[1]) for was, (number, total) in zip(before, after, strict=True)] == [
        (steps, 20 + steps - 1),
        (1, 0),
    ]
    for reason in ("capacity", "deferred"):
        labels = f'engine="0",model_name="reasoner",reason="{reason}"'
        assert server.metric(f"vllm:num_requests_waiting_by_reason{{{labels}}}") == 0


def test_the_log_has_ids_and_no_prompts(server: ServerProcess) -> None:
    secret = "words: k7,k7,k7,k7"
    body = {"prompt": secret, "max_tokens": 1, "request_id": "find-me\n"}
    assert server.json("/v1/completions", body)[0] == 200
    assert server.json("/v1/completions", {"prompt": secret, "temperature": "high"})[0] == 400
    line = next(line for line in server.log.splitlines() if "request=find-me " in line)
    assert "status=200" in line and "prompt_tokens=14" in line
    assert "k7" not in server.log
