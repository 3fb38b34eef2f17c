"""Fields that clients send beside the question: each is obeyed, changes nothing, or is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import anthropic
import anthropic.types.beta
import msgspec
import openai
import pytest

from kvllm.serving import messages_protocol, protocol, responses_protocol
from kvllm.serving.bodies import decode_fields
from kvllm.serving.protocol import ChatCompletionRequest
from tests.helpers.server import ServerProcess
from tests.serving.conftest import SERVERS

pytestmark = SERVERS

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
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": [5, 6], "max_tokens": 3, "n": 2, "best_of": 2, "seed": 7, "top_k": 5,
                             "stop_token_ids": [1, 2], "logprobs": 1, "priority": 0}),
        ("/v1/completions", {"prompt": [[5, 6], [7], [8, 9]], "max_tokens": 3, "temperature": 0}),
        ("/v1/chat/completions", {"messages": QUESTION, "max_completion_tokens": 3, "top_logprobs": 2, "logprobs": True,
                                  "min_tokens": 1, "truncate_prompt_tokens": 9}),
        ("/v1/messages", {"model": "parrot", "messages": QUESTION, "max_tokens": 3, "top_k": 4}),
        ("/v1/responses", {"input": "A", "max_output_tokens": 3}),
        ("/detokenize", {"tokens": [5, 6, 7]}),
    ],
)  # fmt: skip
def test_whole_numbers_may_have_a_point(parrot_server: ServerProcess, path: str, fields: dict[str, Any]) -> None:
    """As clients write them whose language has one type of numbers; a fraction stays an error."""

    def with_points(value: Any, added: float) -> Any:
        if isinstance(value, list) and not isinstance(value[0], dict):
            return [with_points(each, added) for each in value]
        if isinstance(value, dict):
            return {name: with_points(each, added) for name, each in value.items()}
        return value + added if type(value) is int else value

    status, answer = parrot_server.json(path, with_points(fields, 0.0))
    assert status == 200, answer
    status, answer = parrot_server.json(path, with_points(fields, 0.5))
    message = str(answer)
    assert status == 400 and "Expected `int" in message and "got `float` - at `$." in message, answer


def test_schemas_and_messages_keep_their_numbers() -> None:
    """Only fields of the request are made whole: a template or a grammar sees what was sent."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"minimum": 1.0}}}
    body = {"messages": [{"role": "user", "content": "A", "weight": 2.0}], "tools": [tool], "n": 2.0}
    body["compression"] = {"retain_blocks": 2.0}
    chat = decode_fields(json.dumps(body).encode(), msgspec.json.Decoder(ChatCompletionRequest))
    assert chat.tools is not None and chat.compression is not None
    assert (repr(chat.n), repr(chat.compression.retain_blocks)) == ("2", "2")
    assert repr(chat.messages[0]["weight"]) == "2.0"
    assert repr(chat.tools[0]["function"]["parameters"]["minimum"]) == "1.0"


@pytest.mark.parametrize("key", ["abc", "5.0", "", "1e2"])
def test_a_key_that_is_no_token_id_is_named(parrot_server: ServerProcess, key: str) -> None:
    fields = {"logit_bias": {"5": 1, key: 2}, "max_tokens": 3.0}
    status, answer = parrot_server.json("/v1/chat/completions", ASK | fields)
    assert status == 400 and answer["error"]["param"] == "logit_bias", answer
    assert f"The key {key!r} is no whole number" in answer["error"]["message"]


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


CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
BODIES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    CHAT: (protocol.ChatCompletionRequest, {"messages": QUESTION}),
    TEXT: (protocol.CompletionRequest, {"prompt": "a"}),
    RESPONSES: (responses_protocol.ResponsesRequest, {"input": "a"}),
    MESSAGES: (messages_protocol.MessagesRequest, {"model": "parrot", "messages": QUESTION, "max_tokens": 4}),
    "/v1/messages/count_tokens": (messages_protocol.CountTokensRequest, {"model": "parrot", "messages": QUESTION}),
}
PUBLISHED = [
    (CHAT, openai.types.chat.completion_create_params.CompletionCreateParamsStreaming),
    (TEXT, openai.types.completion_create_params.CompletionCreateParamsStreaming),
    (RESPONSES, openai.types.responses.response_create_params.ResponseCreateParamsStreaming),
    (MESSAGES, anthropic.types.message_create_params.MessageCreateParamsStreaming),
    (MESSAGES, anthropic.types.beta.message_create_params.MessageCreateParamsStreaming),
    ("/v1/messages/count_tokens", anthropic.types.MessageCountTokensParams),
    ("/v1/messages/count_tokens", anthropic.types.beta.MessageCountTokensParams),
]
PUBLISHED_FIELDS = sorted({(path, name) for path, kind in PUBLISHED for name in kind.__annotations__})
NESTED = [
    ("stream_options", openai.types.chat.ChatCompletionStreamOptionsParam, protocol.StreamOptions),
    ("tool_choice", openai.types.chat.ChatCompletionAllowedToolChoiceParam, protocol.NamedToolChoice),
    ("tool_choice.allowed_tools", openai.types.chat.ChatCompletionAllowedToolsParam, protocol.AllowedTools),
    ("text", openai.types.responses.ResponseTextConfigParam, responses_protocol.TextOptions),
    ("text.format", openai.types.responses.ResponseFormatTextJSONSchemaConfigParam, responses_protocol.TextFormat),
    ("reasoning", openai.types.shared_params.Reasoning, responses_protocol.Reasoning),
    ("tools", openai.types.responses.FunctionToolParam, responses_protocol.ResponsesTool),
    ("tools", openai.types.responses.CustomToolParam, responses_protocol.ResponsesTool),
    ("tool_choice", openai.types.responses.ToolChoiceAllowedParam, responses_protocol.ResponsesToolChoice),
    ("output_config", anthropic.types.OutputConfigParam, messages_protocol.OutputConfig),
    ("output_config", anthropic.types.beta.BetaOutputConfigParam, messages_protocol.OutputConfig),
    ("output_config.format", anthropic.types.JSONOutputFormatParam, messages_protocol.OutputFormat),
    ("thinking", anthropic.types.ThinkingConfigEnabledParam, messages_protocol.Thinking),
    ("thinking", anthropic.types.ThinkingConfigAdaptiveParam, messages_protocol.Thinking),
    ("tools", anthropic.types.ToolParam, messages_protocol.MessagesTool),
    ("tools", anthropic.types.beta.BetaToolParam, messages_protocol.MessagesTool),
    ("tool_choice", anthropic.types.ToolChoiceToolParam, messages_protocol.MessagesToolChoice),
]
"""Options inside of others: where, the client's type and the server's."""
SAMPLES = {
    "metadata": {"user_id": "x"},
    "store": True,
    "cache_control": {"type": "ephemeral"},
    "prediction": {"type": "content", "content": "Let me look."},
    "verbosity": "low",
    "max_tool_calls": 1,
    "include": ["reasoning.encrypted_content"],
    "stream_options": {"include_obfuscation": True},
    "prompt_cache_options": {"ttl": "30m"},
}
"""Values of fields without effect; those of others are text."""


def fields_without_effect() -> set[str]:
    """As the table in the documentation has them."""
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    table = text.partition("that have no effect, because")[2].partition("\n\n`")[0]
    return {name for row in table.splitlines() for name in re.findall("`([a-z_.]+)`", row.rpartition(" | ")[0])}


@pytest.mark.parametrize(("path", "name"), PUBLISHED_FIELDS)
def test_published_fields(parrot_server: ServerProcess, path: str, name: str) -> None:
    """A field that a client may send is of a type that is checked, is refused by its name, or has no effect."""
    kind, body = BODIES[path]
    if name in protocol.refused_fields(kind):
        status, answer = parrot_server.json(path, body | {name: "x"})
        assert status == 400 and f"{name} is not supported" in answer["error"]["message"], answer
        return
    if name in fields_without_effect() and (name != "stream_options" or path == RESPONSES):
        status, answer = parrot_server.json(path, body | {name: SAMPLES.get(name, "x")})
        assert status == 200, answer
        return
    problems = 0
    for wrong in (True, []):
        try:
            msgspec.convert(body | {name: wrong}, kind)
        except msgspec.ValidationError as error:
            problems += f"$.{name}`" in str(error)
    assert problems, f"{name} of {path} is ignored"


@pytest.mark.parametrize(("place", "published", "kind"), NESTED)
def test_published_options(place: str, published: Any, kind: type[msgspec.Struct]) -> None:
    missing = {name for name in published.__annotations__ if name not in kind.__struct_fields__}
    assert {f"{place}.{name}" for name in missing} <= fields_without_effect()


def test_the_table_has_fields_of_clients_alone() -> None:
    """And only those that the server does not act on."""
    names = {name for _, name in PUBLISHED_FIELDS}
    names |= {f"{place}.{name}" for place, published, _ in NESTED for name in published.__annotations__}
    assert fields_without_effect() <= names


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (MESSAGES, {"output_config": {"task_budget": {"type": "tokens", "total": 9}}}),
        (MESSAGES, {"tools": [{"name": "f", "defer_loading": True}]}),
        (MESSAGES, {"tools": [{"name": "f", "allowed_callers": ["code_execution_20260120"]}]}),
        (MESSAGES, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
        (MESSAGES, {"thinking": {"type": "between_tools"}}),
        (RESPONSES, {"reasoning": {"mode": "pro"}}),
    ],
)
def test_options_that_cannot_be_obeyed(parrot_server: ServerProcess, path: str, fields: dict[str, Any]) -> None:
    status, answer = parrot_server.json(path, BODIES[path][1] | fields)
    assert status == 400 and "is not supported" in answer["error"]["message"], answer


def test_options_that_ask_for_nothing(parrot_server: ServerProcess) -> None:
    """Agents send them with every request."""
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    fields = {"context_management": edits, "mcp_servers": [], "speed": "standard", "inference_geo": "global"}
    assert parrot_server.json(MESSAGES, BODIES[MESSAGES][1] | fields)[0] == 200
    fields = {"context_management": [], "background": False, "truncation": "disabled", "top_logprobs": 0}
    assert parrot_server.json(RESPONSES, BODIES[RESPONSES][1] | fields)[0] == 200


def test_a_context_that_is_too_long(parrot_server: ServerProcess) -> None:
    """The openai client's exception has the code that agents look for before they shorten a conversation."""
    client = openai.OpenAI(base_url=f"{parrot_server.url}/v1", api_key="unused", max_retries=0)
    long: Any = [{"role": "user", "content": "a " * 3000}]
    for ask in (
        lambda: client.chat.completions.create(model="parrot", messages=long),
        lambda: client.chat.completions.create(model="parrot", messages=long, stream=True),
        lambda: client.completions.create(model="parrot", prompt="a " * 3000),
        lambda: client.responses.create(model="parrot", input=long),
    ):
        with pytest.raises(openai.BadRequestError, match="This model's maximum context length is 2048 tokens") as cut:
            ask()
        assert (cut.value.code, cut.value.type) == ("context_length_exceeded", "invalid_request_error")


def test_probes_of_other_servers(server: ServerProcess) -> None:
    """Clients that look for another kind of server get a clear no."""
    for path in ("/api/tags", "/api/version", "/props", "/v1/nothing"):
        status, answer = server.json(path)
        assert status == 404 and answer["error"]["type"] == "NotFoundError"
    assert server.request("/v1/models", method="HEAD")[0] == 200
