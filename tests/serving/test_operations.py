"""Keys, overload, clients that go away, the end of a server, and an engine that dies."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvllm.engine_args import DEFAULT_MODEL
from kvllm.entrypoints import serve
from kvllm.entrypoints.cli import main
from tests.helpers.server import COMPLETION_HEAD, ServerProcess
from tests.helpers.waiting import wait_until
from tests.serving.conftest import PROMPT, SERVERS

pytestmark = SERVERS

POOL = ("--block-size", "16", "--kv-cache-memory-bytes", "64M")
LONG = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True}


def stream_all(server: ServerProcess, number: int, max_tokens: int) -> list[list[bytes]]:
    """The events of so many streams at once."""

    async def one() -> list[bytes]:
        host, _, port = server.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({**LONG, "max_tokens": max_tokens, "stream": True, "return_token_ids": True}).encode()
        head = COMPLETION_HEAD.decode() + f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        content = await reader.read(-1)
        writer.close()
        return [line.strip() for line in content.split(b"\r\n") if line.startswith(b"data: ")]

    async def together() -> list[list[bytes]]:
        return await asyncio.gather(*(one() for _ in range(number)))

    return asyncio.run(together())


def aborted(server: ServerProcess) -> float:
    """Completions that clients gave up."""
    name = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="reasoner"}'
    return server.metric(name) if name in server.request("/metrics")[2].decode() else 0


ORIGIN = "https://chat.example"
PREFLIGHT = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}


@pytest.fixture(scope="module")
def behind_a_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with keys of a file and of the environment, for scripts of an origin, at the path /llm of a proxy."""
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text('[[keys]]\nname = "alice"\nkey = "sk-alice"\n\n[[keys]]\nname = "bob"\nkey = "sk-bob"\n')
    flags = ("--api-key-file", str(file), "--allowed-origins", json.dumps([ORIGIN]), "--allow-credentials")
    flags += ("--root-path", "/llm/")
    process = ServerProcess(*POOL, *flags, environment={"KVLLM_API_KEY": "sk-env"})
    yield process
    assert process.stop() == 0


def test_keys(behind_a_proxy: ServerProcess) -> None:
    """Several keys from a file and the environment. Prefixes are shared within a key alone."""
    for path in ("/health", "/ping", "/version"):
        assert behind_a_proxy.request(path)[0] == 200
    for headers in ({}, {"Authorization": "Bearer sk-wrong"}, {"Authorization": "sk-alice"}):
        for path in ("/v1/models", "/metrics", "/load", "/openapi.json", "/nothing"):
            status, answer, body = behind_a_proxy.request(path, headers=headers)
            assert status == 401 and answer["www-authenticate"] == "Bearer", path
            assert json.loads(body)["error"]["type"] == "AuthenticationError"
    right, wrong = ("sk-alice", "sk-bob"), "sk-wrong"
    for bearer, other, name in [(wrong, right[0], "alice"), (right[1], wrong, "bob"), (*right[::-1], "bob")]:
        headers = {"Authorization": f"Bearer {bearer}", "x-api-key": other}
        assert behind_a_proxy.request("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers)[0] == 200
        wait_until(
            lambda name=name: f"key={name} method=POST" in behind_a_proxy.log.splitlines()[-1], "its name in the log"
        )
    both = {"Authorization": f"Bearer {wrong}", "x-api-key": wrong}
    assert behind_a_proxy.request("/load", headers=both)[0] == 401
    assert behind_a_proxy.request("/load", headers={"x-api-key": "Bearer sk-bob"})[0] == 401
    cached = []
    for key in ("sk-alice", "sk-bob", "sk-bob", "sk-env"):
        body = {"prompt": PROMPT, "max_tokens": 1}
        status, answer = behind_a_proxy.json("/v1/completions", body, {"Authorization": f"Bearer {key}"})
        assert status == 200, answer
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 32, 0]
    salted = {"prompt": PROMPT, "max_tokens": 1, "cache_salt": "mine"}
    answer = behind_a_proxy.json("/v1/completions", salted, {"Authorization": "Bearer sk-bob"})[1]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert "key=alice" in behind_a_proxy.log and "sk-" not in behind_a_proxy.log


def test_scripts_of_other_origins(behind_a_proxy: ServerProcess) -> None:
    """A browser asks for leave without the key, and shows scripts no answer without the headers, errors included."""
    asked = {**PREFLIGHT, "Access-Control-Request-Headers": "authorization,content-type"}
    status, headers, _ = behind_a_proxy.request("/v1/completions", headers=asked, method="OPTIONS")
    assert status == 200 and headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in headers["access-control-allow-methods"]
    assert "authorization" in headers["access-control-allow-headers"]
    assert headers["access-control-allow-credentials"] == "true"
    body, key = {"prompt": "a", "max_tokens": 2}, {"Authorization": "Bearer sk-env"}
    for given, fields, expected in [(key, {}, 200), (key, {"stream": True}, 200), (key, {"n": 0}, 400), ({}, {}, 401)]:
        sent = {"Origin": ORIGIN, **given}
        status, headers, _ = behind_a_proxy.request("/v1/completions", {**body, **fields}, sent)
        assert status == expected and headers["access-control-allow-origin"] == ORIGIN
        assert "x-request-id" in headers and "X-Request-Id" in headers["access-control-expose-headers"]
    foreign = {**PREFLIGHT, "Origin": "https://evil.example"}
    status, headers, _ = behind_a_proxy.request("/v1/completions", headers=foreign, method="OPTIONS")
    assert status == 400 and "access-control-allow-origin" not in headers
    _, headers, _ = behind_a_proxy.request("/", headers={"Origin": ORIGIN})
    assert "default-src 'none'" in headers["content-security-policy"]


def test_no_scripts_of_other_origins_by_default(server: ServerProcess) -> None:
    status, headers, _ = server.request("/v1/completions", headers=PREFLIGHT, method="OPTIONS")
    assert status == 405 and not [name for name in headers if name.startswith("access-control")]


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_a_path_behind_a_proxy(behind_a_proxy: ServerProcess, prefix: str) -> None:
    """The proxy may leave its path there or take it away. What needs a key needs one in both cases."""
    key = {"Authorization": "Bearer sk-env"}
    for path in ("/", "/health", "/version", "/page/main.js"):
        assert behind_a_proxy.request(prefix + path)[0] == 200
    for path in ("/v1/models", "/openapi.json", "/live/events", "/llm/health", "/llmhealth"):
        assert behind_a_proxy.request("/llm" + path)[0] == 401
    status, document = behind_a_proxy.json(f"{prefix}/openapi.json", headers=key)
    assert status == 200 and document["servers"] == [{"url": "/llm"}]
    assert behind_a_proxy.json(f"{prefix}/v1/completions", {"prompt": "a", "max_tokens": 1}, key)[0] == 200
    assert behind_a_proxy.json(f"{prefix}/v1/messages", {}, key)[1]["type"] == "error"
    assert behind_a_proxy.request("/other/version", headers=key)[0] == 404


def test_clients_that_go_away(server: ServerProcess) -> None:
    """Half of them stream, half wait for the whole answer. Their requests end, and their blocks come back."""
    before = aborted(server)
    connections = []
    for number in range(32):
        host, _, port = server.url.removeprefix("http://").partition(":")
        connection = socket.create_connection((host, int(port)))
        body = json.dumps({**LONG, "max_tokens": 4000, "stream": number % 2 == 0}).encode()
        connection.sendall(COMPLETION_HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        connections.append(connection)
    wait_until(lambda: server.metric("vllm:num_requests_running") == 32, "32 running requests")
    assert server.metric("kvllm:blocks_in_use") >= 32
    for connection in connections:
        connection.close()
    wait_until(lambda: aborted(server) - before == 32, "32 aborted requests")
    wait_until(lambda: server.metric("vllm:num_requests_running") == 0, "an idle engine")
    assert server.metric("kvllm:blocks_in_use") == 0
    time.sleep(0.5)  # for the step that ran when the last one was aborted
    steps = server.metric("kvllm:steps_total")
    time.sleep(0.2)
    assert server.metric("kvllm:steps_total") == steps


def test_a_client_that_goes_away_with_requests_in_line(server: ServerProcess) -> None:
    """The second request on its connection waits for the first one, which ends too. So it does after broken HTTP."""
    body = json.dumps({**LONG, "max_tokens": 4000, "stream": True}).encode()
    request = COMPLETION_HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    for noise in (b"", b"no HTTP\r\n\r\n"):
        before = aborted(server)
        host, _, port = server.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(request)
            connection.recv(100)
            connection.sendall(noise or request)
            time.sleep(0.2)
        wait_until(lambda before=before: aborted(server) - before == 1, "an aborted request")
    wait_until(lambda: server.metric("vllm:num_requests_running") == 0, "an idle engine")
    assert "Traceback" not in server.log


def test_overload_and_a_drain() -> None:
    """More completions in flight than allowed get 503. After a SIGTERM those in flight have all tokens and [DONE];
    meanwhile new requests and /health get 503. The exit code is 0."""
    process = ServerProcess(*POOL, "--max-num-queued-reqs", "32")
    try:
        assert process.json("/v1/completions", {"prompt": "a", "n": 33})[0] == 503
        assert process.json("/v1/completions", {"prompt": "a", "n": 32, "max_tokens": 1})[0] == 200
        results: list[list[list[bytes]]] = []
        thread = threading.Thread(target=lambda: results.append(stream_all(process, 32, 300)))
        thread.start()
        wait_until(lambda: process.metric("vllm:num_requests_running") == 32, "32 running requests")
        for body in ({"prompt": "a"}, {"prompt": "a", "stream": True}):
            status, headers, answer = process.request("/v1/completions", body)
            assert status == 503 and int(headers["retry-after"]) >= 1
            assert json.loads(answer)["error"]["type"] == "ServiceUnavailableError"
        labels = 'engine="0",model_name="reasoner",reason="requests"'
        assert process.metric(f"vllm:admission_rejections_total{{{labels}}}") == 3
        process.signal(signal.SIGTERM)
        wait_until(lambda: process.request("/health")[0] == 503, "a draining server", 5)
        assert b"shutting down" in process.request("/v1/completions", {"prompt": "a"})[2]
        thread.join()
        for events in results[0]:
            assert events[-1] == b"data: [DONE]"
            chunks: list[Any] = [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
            assert sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks) == 300
        assert process.process.wait(30) == 0
    finally:
        assert process.stop() == 0


def test_a_drain_has_an_end(tmp_path: Path) -> None:
    """Requests that take longer are aborted, and their streams end too. One whose prompt was not computed yet has an
    answer without log probabilities of it. A message, for which the API has no such end, is an error."""
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    options = ("--max-num-seqs", "2", "--shutdown-timeout", "0.3", "--chat-template", str(template))
    process = ServerProcess(*POOL, *options)
    try:
        results: list[list[list[bytes]]] = []
        thread = threading.Thread(target=lambda: results.append(stream_all(process, 2, 4000)))
        thread.start()
        wait_until(lambda: process.metric("vllm:num_requests_running") == 2, "two running requests")
        scored = {"prompt": PROMPT, "echo": True, "logprobs": 1}
        answers: list[tuple[int, Any]] = []
        waiting = threading.Thread(target=lambda: answers.append(process.json("/v1/completions", scored)))
        waiting.start()
        wait_until(lambda: process.metric("vllm:num_requests_waiting") == 1, "a waiting request")
        message = {"model": "reasoner", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}
        errors: list[tuple[int, Any]] = []
        asking = threading.Thread(target=lambda: errors.append(process.json("/v1/messages", message)))
        asking.start()
        wait_until(lambda: process.metric("vllm:num_requests_waiting") == 2, "another one")
        process.signal(signal.SIGTERM)
        thread.join(30)
        waiting.join(30)
        asking.join(30)
        ((status, error),) = errors
        assert status == 503 and error["error"]["type"] == "overloaded_error", error
        ((status, answer),) = answers
        assert status == 200 and answer["choices"][0]["finish_reason"] == "abort", answer
        assert set(answer["choices"][0]["logprobs"]["token_logprobs"]) == {None}
        for events in results[0]:
            assert events[-1] == b"data: [DONE]" and b'"finish_reason":"abort"' in events[-2]
        assert process.process.wait(30) == 0
    finally:
        assert process.stop() == 0


@pytest.mark.long
def test_a_second_signal_ends_at_once() -> None:
    process = ServerProcess(*POOL)
    try:
        thread = threading.Thread(target=lambda: stream_all(process, 2, 4000))
        thread.start()
        wait_until(lambda: process.metric("vllm:num_requests_running") == 2, "two running requests")
        process.signal(signal.SIGTERM)
        wait_until(lambda: process.request("/health")[0] == 503, "a draining server", 5)
        process.signal(signal.SIGINT)
        begin = time.monotonic()
        assert process.process.wait(30) == 0
        assert time.monotonic() - begin < 8
        thread.join()
    finally:
        assert process.stop() == 0


@pytest.mark.long
def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "kvllm.sock"
    process = ServerProcess(*POOL, "--uds", str(path))
    try:
        assert process.url == f"unix:{path}"
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    finally:
        assert process.stop() == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "99999"], "port"),
        (["--device", "abacus"], "choose one of auto, cuda, cpu"),
        (["--block-size", "0"], "between 1 and 256"),
        (["--compression", "method=nothing"], "choose one of auto, kara"),
        (["--compression", "period"], "name=value"),
        (["--max-model-len", "many"], "4K"),
        (["--chat-template", "no/such/file"], "no/such/file"),
        (["--api-key-file", "no/such/file"], "no/such/file"),
        (["--ssl-keyfile", "key.pem"], "--ssl-certfile"),
        (["--max-num-queued-reqs", "0"], "at least 1"),
        (["--allowed-origins", "*"], 'no JSON list like ["*"]'),
        (["--allow-credentials"], "--allow-credentials needs --allowed-origins"),
        (["--root-path", "llm"], "--root-path 'llm' is not allowed: it begins with a slash, as /llm does"),
        (["--default-chat-template-kwargs", "[]"], "no JSON object"),
        (["--default-chat-template-kwargs", '{"tokenize": true}'], "may not have 'tokenize'"),
        (["--trust-remote-code"], "code of a checkpoint is never run"),
    ],
)
def test_wrong_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["serve", "--port", "99999", *arguments])  # a port that cannot be had
    assert words in f"{raised.value} {capsys.readouterr().err}"


def examples() -> list[list[str]]:
    """Arguments of each `kvllm serve` in the help text and the pages, with the package's model in place of others."""
    pages = [Path(serve.__file__), *(Path(__file__).parents[2] / page for page in ("README.md", "docs/serving.md"))]
    text = "\n".join(page.read_text() for page in pages).replace("\\\n", " ")
    lines = re.findall(r"^ *(?:\w+=\w+ )*kvllm serve(?= |$)(.*)$", text, re.MULTILINE)
    return [shlex.split(re.sub(r"(path/to|Qwen)/\S+", str(DEFAULT_MODEL), line), comments=True) for line in lines]


@pytest.mark.parametrize("arguments", examples())
def test_examples_are_accepted(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", *arguments, "--port", "99999"])  # a port that cannot be had, which shows after all options
    assert "--port 99999" in capsys.readouterr().err


def test_a_missing_package_is_named_with_what_installs_it() -> None:
    code = "import sys; sys.modules['uvicorn'] = None; from kvllm.entrypoints.cli import main; main(['serve'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert result.stderr == "error: kvllm serve needs the package uvicorn: pip install 'kvllm[serve]'\n"
