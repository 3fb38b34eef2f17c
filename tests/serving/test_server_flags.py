"""Flags of `kvllm serve` that change what answers contain."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.server import ServerProcess
from tests.helpers.waiting import wait_until
from tests.serving.conftest import PROMPT

VOCABULARY = 229
ASK = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def flagged_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    names = ("--enable-force-include-usage", "--return-tokens-as-token-ids", "--enable-tokenizer-info-endpoint")
    pool = ("--kv-cache-memory-bytes", "64M", "--max-logprobs", "-1")
    browser = template.parent / "browser"
    browser.write_text(f"#!/bin/sh\necho $1 > {template.parent}/opened")
    browser.chmod(0o755)
    environment = {"BROWSER": f"{browser} %s"}
    process = ServerProcess("--open", *names, "--chat-template", str(template), *pool, environment=environment)
    process.opened = template.parent / "opened"  # type: ignore[attr-defined]
    try:
        yield process
    finally:
        assert process.stop() == 0


def stream(server: ServerProcess, path: str, body: Any) -> list[Any]:
    """The chunks of a stream."""
    status, _, content = server.request(path, body | {"stream": True})
    assert status == 200, content
    lines = [line for line in content.decode().split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", ASK), ("/v1/chat/completions", CHAT)])
def test_every_stream_has_its_usage(flagged_server: ServerProcess, path: str, body: Any) -> None:
    chunks = stream(flagged_server, path, body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert chunks[-1]["choices"] == [] and counts[-1] == 2 and counts == sorted(counts)
    assert counts[0] == 0 if "chat" in path else counts[0] > 0


def test_tokens_as_token_ids(flagged_server: ServerProcess) -> None:
    """A request has the last word."""
    _, answer = flagged_server.json("/v1/completions", ASK | {"logprobs": 0, "return_token_ids": True})
    choice = answer["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    _, answer = flagged_server.json("/v1/chat/completions", CHAT | {"logprobs": True})
    assert answer["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:")
    _, answer = flagged_server.json("/v1/completions", ASK | {"logprobs": 0, "return_tokens_as_token_ids": False})
    assert "".join(answer["choices"][0]["logprobs"]["tokens"]) == answer["choices"][0]["text"]


def test_all_log_probabilities(flagged_server: ServerProcess) -> None:
    """What distillation asks for: those of the whole vocabulary, or of more than the usual 20."""
    for asked, most in ((-1, VOCABULARY), (100, 100)):
        body = {"logprobs": asked, "prompt_logprobs": asked, "return_token_ids": True}
        _, answer = flagged_server.json("/v1/completions", ASK | body)
        choice = answer["choices"][0]
        assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [most, most]
        assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == len(
            choice["prompt_token_ids"]
        )
        assert all(most <= len(position) <= most + 1 for position in choice["prompt_logprobs"][1:])
        fields = {"logprobs": True, "top_logprobs": asked, "prompt_logprobs": asked}
        _, answer = flagged_server.json("/v1/chat/completions", CHAT | fields)
        assert [len(token["top_logprobs"]) for token in answer["choices"][0]["logprobs"]["content"]] == [most, most]
        assert all(most <= len(position) <= most + 1 for position in answer["prompt_logprobs"][1:])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", ASK | {"n": 128, "max_tokens": 200, "logprobs": -1}),
        ("/v1/completions", {"prompt": [PROMPT] * 1024, "max_tokens": 0, "echo": True, "prompt_logprobs": 229}),
        ("/v1/completions", ASK | {"n": 128, "max_tokens": 900, "logprobs": 100, "stream": True}),
        ("/v1/chat/completions", CHAT | {"n": 128, "max_tokens": None, "logprobs": True, "top_logprobs": -1}),
    ],
)
def test_too_many_log_probabilities(flagged_server: ServerProcess, path: str, body: Any) -> None:
    """Their number at a position says nothing about the size of an answer."""
    status, answer = flagged_server.json(path, body)
    assert status == 400 and "at most 4194304 are allowed" in answer["error"]["message"], answer


def test_the_tokenizer_tells_about_itself(flagged_server: ServerProcess, server: ServerProcess) -> None:
    status, answer = flagged_server.json("/tokenizer_info")
    assert status == 200 and answer["chat_template"] == TEMPLATE
    assert isinstance(answer["tokenizer_class"], str) and answer["tokenizer_class"]
    assert not {"vocab_file", "tokenizer_file", "name_or_path"} & answer.keys()
    assert server.json("/tokenizer_info")[0] == 404


def test_the_page_is_told_and_opened(flagged_server: Any) -> None:
    wait_until(lambda: flagged_server.opened.exists() and flagged_server.opened.read_text() != "", "the browser")
    assert flagged_server.opened.read_text() == f"{flagged_server.url}/\n"
    assert f"chat and monitor in a browser: {flagged_server.url}/" in flagged_server.log
