"""A server whose replicas or ranks are killed while it streams: every stream goes on to its last token."""

from __future__ import annotations

import json
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.helpers.server import ServerProcess
from tests.helpers.waiting import wait_until
from tests.serving.conftest import PROMPT

pytest.importorskip("ray", reason="needs ray: pip install ray")

pytestmark = pytest.mark.xdist_group("ray")

STREAMS = 6
TOKENS = 1000


def stream(server: ServerProcess) -> tuple[str, int]:
    """The text of a completion and its number of tokens, after a whole stream."""
    options = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    body = {"prompt": PROMPT, "stream_options": {"include_usage": True}, **options}
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        events = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert not any("error" in chunk for chunk in chunks), chunks[-1]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])
    return text, chunks[-1]["usage"]["completion_tokens"]


def workers(server: ServerProcess, kind: str) -> list[psutil.Process]:
    """Those that run. A killed process stays in the list of processes until its parent has asked for its end."""
    found = []
    for process in psutil.Process(server.process.pid).children(recursive=True):
        try:
            if f"ray::{kind}" in process.name() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:  # it has just ended
            continue
    return found


@pytest.mark.parametrize(
    ("option", "kind"),
    [("--data-parallel-size", "Replica"), pytest.param("--tensor-parallel-size", "Rank", marks=pytest.mark.long)],
)
def test_streams_go_on_when_a_worker_is_killed(option: str, kind: str) -> None:
    """With the tokens that they would have had. Afterwards there are as many workers again."""
    pool = ["--block-size", "16", "--kv-cache-memory-bytes", "64M"]
    own_ray = {"RAY_ADDRESS": "local"}  # not that of other tests
    server = ServerProcess(option, "2", *pool, environment=own_ray)
    try:
        expected = stream(server)
        assert expected[1] == TOKENS
        assert {worker.nice() for worker in workers(server, kind)} == {psutil.Process().nice()}  # Ray would lower it
        before = server.metric("vllm:generation_tokens_total")
        with ThreadPoolExecutor(STREAMS) as threads:
            streams = [threads.submit(stream, server) for _ in range(STREAMS)]
            wait_until(lambda: server.metric("vllm:generation_tokens_total") > before + TOKENS / 2, "tokens")
            assert not any(each.done() for each in streams)
            victim = workers(server, kind)[0]
            victim.send_signal(signal.SIGKILL)
            assert [each.result(120) for each in streams] == [expected] * STREAMS
        assert server.request("/health")[0] == 200
        assert stream(server) == expected
        wait_until(
            lambda: len(workers(server, kind)) == 2,
            "another worker in its place",
            state=lambda: (workers(server, kind), server.log),
        )
        assert victim.pid not in {process.pid for process in workers(server, kind)}
    finally:
        assert server.stop() == 0
