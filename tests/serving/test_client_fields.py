"""Fields that clients send beside the question: each is obeyed, changes nothing, or is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.server import ServerProcess

QUESTION = [{"role": "user", "content": "Is it fine?"}]
ASK = {"messages": QUESTION, "temperature": 0, "max_tokens": 40}


def content(server: ServerProcess, **fields: Any) -> Any:
    status, answer = server.json("/v1/chat/completions", ASK | fields)
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "user": "me"},
        {"prediction": {"type": "content", "content": "Let me look."}},
        {"safety_identifier": "x", "prompt_cache_key": "x", "verbosity": "low"},
        {"parallel_tool_calls": False, "tool_choice": "none", "tools": []},
        {"modalities": ["text"], "audio": None, "functions": [], "function_call": "none"},
        {"reasoning_effort": "low", "response_format": {"type": "text"}},
        {"stop": None, "seed": None, "top_p": 1, "top_k": -1, "logit_bias": {}, "n": 1, "frequency_penalty": 0},
        {"keep_alive": "5m", "options": {"num_ctx": 2048}, "cache_prompt": True},
        {"stream": False, "stream_options": None},
        {"best_of": 1, "use_beam_search": False, "length_penalty": 1.0},
    ],
)
def test_fields_that_change_nothing(parrot_server: ServerProcess, fields: dict[str, Any]) -> None:
    assert content(parrot_server, **fields) == content(parrot_server)


def test_messages_as_clients_give_them_back(parrot_server: ServerProcess) -> None:
    """An assistant's message has the fields that it came with; "developer" is another name of "system"."""

    def count(messages: list[dict[str, Any]]) -> int:
        status, answer = parrot_server.json("/tokenize", {"messages": messages})
        assert status == 200, answer
        return answer["count"]

    given = {"role": "assistant", "content": "Yes.", "refusal": None, "annotations": [], "audio": None,
             "function_call": None, "tool_calls": None}  # fmt: skip
    assert count([*QUESTION, given]) == count([*QUESTION, {"role": "assistant", "content": "Yes."}])
    parts = [{"type": "text", "text": "Yes."}]
    assert count([*QUESTION, given]) == count([*QUESTION, {"role": "assistant", "content": parts}])
    _, system = parrot_server.json("/tokenize", {"messages": [{"role": "system", "content": "x"}]})
    _, developer = parrot_server.json("/tokenize", {"messages": [{"role": "developer", "content": "x"}]})
    assert developer["tokens"] == system["tokens"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "very"}, "reasoning_effort"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"max_completion_tokens": 100_000}, "prompt"),
    ],
)
def test_fields_that_cannot_be_obeyed(parrot_server: ServerProcess, fields: dict[str, Any], param: str) -> None:
    status, answer = parrot_server.json("/v1/chat/completions", ASK | fields)
    assert status == 400 and answer["error"]["param"] == param, answer


def test_probes_of_other_servers(server: ServerProcess) -> None:
    """Clients that look for another kind of server get a clear no."""
    for path in ("/api/tags", "/api/version", "/props", "/v1/nothing"):
        status, answer = server.json(path)
        assert status == 404 and answer["error"]["type"] == "NotFoundError"
    assert server.request("/v1/models", method="HEAD")[0] == 200
