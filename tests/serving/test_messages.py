"""/v1/messages with the anthropic client: blocks, streams, tools, errors, counts of tokens."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import anthropic
import msgspec
import pydantic
import pytest

from kvllm.serving.messages import tool_input
from kvllm.serving.messages_protocol import INVALID_JSON, MessagesRequest, chat_of
from tests.helpers.parrot_chat import TOOLS
from tests.helpers.server import ServerProcess
from tests.serving.conftest import SERVERS

pytestmark = SERVERS

OWN_TOOLS: Any = [
    {"input_schema" if key == "parameters" else key: value for key, value in tool["function"].items()} for tool in TOOLS
]
ASK: Any = {"model": "parrot", "max_tokens": 100, "messages": [{"role": "user", "content": "Is it fine?"}],
            "extra_body": {"temperature": 0}}  # fmt: skip
BODY: Any = {name: value for name, value in ASK.items() if name != "extra_body"}


class City(pydantic.BaseModel):
    city: Literal["Paris", "Rome"]


@pytest.fixture(scope="module")
def client(parrot_server: ServerProcess) -> Any:
    return anthropic.Anthropic(base_url=parrot_server.url, api_key="unused", max_retries=0)


def test_blocks(client: Any) -> None:
    answer = client.messages.create(**ASK, tools=OWN_TOOLS)
    thought, text, call = answer.content
    assert (thought.type, thought.thinking) == ("thinking", "Hm, weather.")
    assert (text.type, text.text) == ("text", "Let me look.")
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris"})
    assert (answer.type, answer.role, answer.model, answer.stop_reason) == (
        "message", "assistant", "parrot", "tool_use")  # fmt: skip
    assert answer.usage.input_tokens > 0 and answer.usage.output_tokens > 4


def test_the_stream_adds_up(client: Any) -> None:
    """The client's own helper puts the events together."""
    whole = client.messages.create(**ASK, tools=OWN_TOOLS)
    with client.messages.stream(**ASK, tools=OWN_TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_message()
    kinds = [event.type for event in events]
    assert [block.model_dump() for block in final.content][:2] == [block.model_dump() for block in whole.content][:2]
    assert final.content[2].input == {"city": "Paris"} and final.content[2].name == "get_weather"
    assert final.stop_reason == "tool_use" and final.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    begun = client.messages.create(**ASK, tools=OWN_TOOLS, stream=True)
    assert next(iter(begun)).message.usage.output_tokens == 0
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    with client.messages.stream(**ASK, tools=OWN_TOOLS) as stream:
        assert "".join(stream.text_stream) == "Let me look."


def test_a_conversation_with_results(client: Any, parrot_server: ServerProcess) -> None:
    """It is the same prompt as that of the chat, as the count of its tokens says."""
    first = client.messages.create(**ASK, tools=OWN_TOOLS)
    result = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": [{"type": "text", "text": "rain"}]}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    fields: Any = {"model": "parrot", "system": [{"type": "text", "text": "Be brief."}], "tools": OWN_TOOLS}
    counted = client.messages.count_tokens(**fields, messages=messages).input_tokens
    call = {"id": "x", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Is it fine?"},
        {"role": "assistant", "content": "Let me look.", "reasoning": "Hm, weather.", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "x"},
        {"role": "user", "content": "So?"},
    ]
    assert counted == parrot_server.json("/tokenize", {"messages": chat, "tools": TOOLS})[1]["count"]
    answer = client.messages.create(**ASK | fields | {"messages": messages})
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted
    assert answer.content[1].text == "Let me look."


def test_tools_and_calls_have_the_form_of_chats(parrot_server: ServerProcess) -> None:
    """What the chat template prints of a tool is in the order that models know, and inside as the client has it."""
    schema = {"required": ["b"], "type": "object", "properties": {"b": {}, "a": {"x": None}}}
    tools = [
        {"input_schema": schema, "name": "f", "cache_control": {"type": "ephemeral"}, "description": "D."},
        {"strict": True, "name": "g", "type": "custom"},
    ]
    blocks = [
        {"type": "tool_use", "id": "1", "name": "f", "input": {"b": 1, "a": [2]}},
        {"type": "tool_use", "id": "2", "name": "f", "input": {"INVALID_JSON": '{"b": '}},
        {"type": "tool_use", "id": "3", "name": "f", "input": [1]},
    ]
    messages = [{"role": "assistant", "content": blocks}, {"role": "user", "content": "So?"}]
    body = BODY | {"tools": tools, "messages": messages}
    first = {"type": "function", "function": {"name": "f", "description": "D.", "parameters": schema}}
    second = {"type": "function", "function": {"name": "g", "strict": True}}
    calls = "".join(f"(f {json.dumps(arguments)})" for arguments in ({"b": 1, "a": [2]}, '{"b": ', [1]))
    text = f"{json.dumps(first)};{json.dumps(second)};assistant:{calls}user:So?\n"
    chat = chat_of(msgspec.convert(body, MessagesRequest))
    assert json.dumps(chat.tools) == json.dumps([first, second])
    _, expected = parrot_server.json("/tokenize", {"prompt": text})
    assert parrot_server.json("/v1/messages/count_tokens", body) == (200, {"input_tokens": expected["count"]})


@pytest.mark.parametrize("content", ["Let me look.", [{"type": "text", "text": "Let me look."}]])
def test_the_last_message_is_continued(client: Any, parrot_server: ServerProcess, content: Any) -> None:
    """The answer is what comes after the text, which it does not repeat."""
    messages = [*ASK["messages"], {"role": "assistant", "content": content}]
    answer = client.messages.create(**ASK | {"messages": messages}, tools=OWN_TOOLS)
    (call,) = answer.content
    assert (call.type, call.input, answer.stop_reason) == ("tool_use", {"city": "Paris"}, "tool_use")
    with client.messages.stream(**ASK | {"messages": messages}, tools=OWN_TOOLS) as stream:
        assert [block.type for block in stream.get_final_message().content] == ["tool_use"]
    counted = client.messages.count_tokens(model="parrot", messages=messages).input_tokens
    chat = {"messages": messages, "continue_final_message": True}
    assert counted == parrot_server.json("/tokenize", chat)[1]["count"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        ('{"b": "é🙂", "a": [1]}', {"b": "é🙂", "a": [1]}),
        (r'{"a": "\ud83d\ude42 \ud83d"}', {"a": "🙂 \ufffd"}),
        ('{"a": 123456789012345678901234567890}', {"a": 123456789012345678901234567890}),
        *((text, {INVALID_JSON: text}) for text in ("[1]", '{"a": ', '{"a": NaN}', '{"a": 1e999}', '{"a":' * 5000)),
    ],
)
def test_any_arguments_are_an_input_that_can_be_sent(arguments: str, expected: Any) -> None:
    assert msgspec.json.decode(msgspec.json.encode(tool_input(arguments))) == expected


def test_an_empty_last_message_is_none(client: Any) -> None:
    for content in ("", [], [{"type": "text", "text": ""}]):
        messages: Any = [*ASK["messages"], {"role": "assistant", "content": content}]
        assert client.messages.create(**ASK | {"messages": messages}).content[1].text.startswith("Let me look.")


@pytest.mark.parametrize(
    ("content", "fields", "words"),
    [
        ("Yes \n", {}, "final assistant content cannot end with trailing whitespace"),
        ([{"type": "tool_use", "id": "1", "name": "f", "input": {}}], {}, "messages.1. ends .* 'tool_use'"),
        ([{"type": "thinking", "thinking": "Hm", "signature": ""}], {}, "messages.1. ends .* 'thinking'"),
        ("{", {"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "leave out messages.1."),
    ],
)
def test_messages_that_are_not_continued(client: Any, content: Any, fields: dict[str, Any], words: str) -> None:
    messages = [*ASK["messages"], {"role": "assistant", "content": content}]
    with pytest.raises(anthropic.BadRequestError, match=words):
        client.messages.create(**ASK | {"messages": messages}, **fields)


def test_the_form_of_the_answer(client: Any, parrot_server: ServerProcess) -> None:
    """The client's own helper, the field itself, and its older name."""
    parsed = client.messages.parse(**BODY, output_format=City, extra_body={"seed": 3})
    assert isinstance(parsed.parsed_output, City)
    wanted = {"type": "json_schema", "schema": City.model_json_schema()}
    for fields in ({"output_config": {"format": wanted}}, {"output_format": wanted}):
        status, answer = parrot_server.json("/v1/messages", BODY | {"seed": 3} | fields)
        text = next(block["text"] for block in answer["content"] if block["type"] == "text")
        assert status == 200 and City.model_validate_json(text), answer


def test_failures_of_tools() -> None:
    """The model sees that a result is an error."""

    def results(content: Any, **fields: Any) -> Any:
        result = {"type": "tool_result", "tool_use_id": "1", "content": content, **fields}
        body = BODY | {"messages": [{"role": "user", "content": [result]}]}
        return [message["content"] for message in chat_of(msgspec.convert(body, MessagesRequest)).messages]

    assert results("no city", is_error=True) == ["Error: no city"]
    assert results([{"type": "text", "text": "no city"}], is_error=True) == ["Error: no city"]
    assert results([], is_error=True) == ["Error"]
    assert results("no city", is_error=False) == results("no city") == ["no city"]


def test_a_thought_can_be_left_out(client: Any) -> None:
    answer = client.messages.create(**ASK, tools=OWN_TOOLS, thinking={"type": "adaptive", "display": "omitted"})
    assert [block.type for block in answer.content] == ["text", "tool_use"]


@pytest.mark.parametrize("kind", ["image", "document", "search_result", "container_upload", "web_search_tool_result"])
def test_blocks_that_are_not_text(parrot_server: ServerProcess, kind: str) -> None:
    """They are named, with their place."""
    text, block = {"type": "text", "text": "a"}, {"type": kind, "source": {"type": "text", "data": "x"}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [text, block]}
    for fields, place in (
        ({"messages": [{"role": "user", "content": [text, block]}]}, "messages[0].content[1]"),
        ({"messages": [{"role": "assistant", "content": [block, text]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [result]}]}, "messages[0].content[0].content[1]"),
        ({"system": [text, block]}, "system[1]"),
    ):
        status, answer = parrot_server.json("/v1/messages", BODY | fields)
        assert status == 400 and f"{place} is a block of type '{kind}'" in answer["error"]["message"], answer


def test_stops(client: Any) -> None:
    cut = client.messages.create(**ASK | {"max_tokens": 2})
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 2
    stopped = client.messages.create(**ASK, stop_sequences=["look"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "look")
    assert stopped.content[1].text == "Let me "
    ended = client.messages.create(**ASK)
    assert ended.stop_reason == "end_turn" and "<tool_call>" in ended.content[1].text


def test_a_tool_that_must_be_called(client: Any) -> None:
    choice: Any = {"type": "tool", "name": "get_time"}
    answer = client.messages.create(**BODY, tools=OWN_TOOLS, tool_choice=choice, extra_body={"seed": 1})
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert call.name == "get_time" and 0 <= call.input["hour"] <= 23


def test_errors(client: Any, parrot_server: ServerProcess) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as missing:
        client.messages.create(**ASK | {"model": "other"})
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match=r"`max_tokens` exceed context limit: \d+ \+ 5000 > 2048"):
        client.messages.create(**ASK | {"max_tokens": 5000})
    for length in (3000, 100_000):
        long: Any = [{"role": "user", "content": "a " * length}]
        for ask in (client.messages.create, client.messages.count_tokens):
            options = {"max_tokens": 1} if ask == client.messages.create else {}
            with pytest.raises(
                anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 2048 maximum"
            ) as cut:
                ask(model="parrot", messages=long, **options)
            assert cut.value.body["error"]["type"] == "invalid_request_error"
    image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    for fields, words in (
        ({"messages": [{"role": "user", "content": [image]}]}, "image"),
        ({"messages": []}, "empty"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "role"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
        ({"tools": OWN_TOOLS, "tool_choice": {"type": "some"}}, "auto, any, tool"),
        ({"max_tokens": 0}, "at least 1"),
        ({"temperature": -1}, "temperature"),
    ):
        status, answer = parrot_server.json("/v1/messages", BODY | fields)
        assert status == 400 and answer["type"] == "error" and words in answer["error"]["message"], answer
        assert answer["error"]["type"] == "invalid_request_error"


def test_the_key_of_the_client(keys_server: ServerProcess) -> None:
    """It is sent in a header of its own."""
    wrong, right = (anthropic.Anthropic(base_url=keys_server.url, api_key=key, max_retries=0) for key in ("x", "two"))
    own = {"model": "reasoner", "messages": [{"role": "user", "content": "words: a1\n"}], "max_tokens": 2}
    with pytest.raises(anthropic.AuthenticationError):
        wrong.messages.create(**own)
    assert right.messages.create(**own).usage.output_tokens == 2


def test_asynchronous_streams_at_once(parrot_server: ServerProcess) -> None:
    async def one(client: anthropic.AsyncAnthropic) -> str:
        async with client.messages.stream(**ASK, tools=OWN_TOOLS) as stream:
            return await stream.get_final_text()

    async def all_of_them() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=parrot_server.url, api_key="unused") as client:
            return await asyncio.gather(*(one(client) for _ in range(16)))

    assert asyncio.run(all_of_them()) == ["Let me look."] * 16
