"""/v1/responses with the openai client: its objects, the events of its streams, conversations that go on."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import msgspec
import openai
import pydantic
import pytest

from kvllm.serving.responses_protocol import ResponsesRequest, chat_of
from tests.helpers.parrot_chat import TOOLS
from tests.helpers.server import ServerProcess

FUNCTIONS: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
ASK: Any = {"model": "parrot", "input": "Is it fine?", "temperature": 0}


class City(pydantic.BaseModel):
    city: Literal["Paris", "Rome"]


@pytest.fixture(scope="module")
def client(parrot_server: ServerProcess) -> Any:
    return openai.OpenAI(base_url=f"{parrot_server.url}/v1", api_key="unused", max_retries=0)


def test_text_thought_and_call(client: Any) -> None:
    answer = client.responses.create(**ASK, tools=FUNCTIONS)
    thought, message, call = answer.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "Hm, weather.")
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert answer.output_text == "Let me look."
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Paris"})
    assert (answer.status, answer.object, answer.store) == ("completed", "response", False)
    assert answer.usage.output_tokens_details.reasoning_tokens == 4
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    chat = client.chat.completions.create(
        model="parrot", messages=[{"role": "user", "content": "Is it fine?"}], temperature=0, tools=TOOLS
    )
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (
        chat.usage.prompt_tokens, chat.usage.completion_tokens)  # fmt: skip


def test_the_stream_adds_up(client: Any) -> None:
    """The client's own helper puts the deltas together, and refuses events that do not fit."""
    whole = client.responses.create(**ASK, tools=FUNCTIONS)
    with client.responses.stream(**ASK, tools=FUNCTIONS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    assert kinds.count("response.content_part.added") == kinds.count("response.content_part.done") == 2
    for kind, text in (
        ("reasoning_text", "Hm, weather."),
        ("output_text", "Let me look."),
        ("function_call_arguments", '{"city": "Paris"}'),
    ):
        assert "".join(event.delta for event in events if event.type == f"response.{kind}.delta") == text
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    assert final.output_text == whole.output_text and final.usage == whole.usage
    assert final.output[2].arguments == '{"city": "Paris"}'


def test_a_call_is_answered(client: Any, parrot_server: ServerProcess) -> None:
    """The items of an answer go back as they came, with the output of the function."""
    first = client.responses.create(**ASK, tools=FUNCTIONS, instructions="Be brief.")
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Is it fine?"}]}, *first.output]
    items.append({"type": "function_call_output", "call_id": first.output[2].call_id, "output": "rain"})
    again = client.responses.create(**ASK | {"input": items}, tools=FUNCTIONS, instructions="Be brief.")
    call = {"id": "x", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Is it fine?"},
        {"role": "assistant", "content": "Let me look.", "reasoning": "Hm, weather.", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "x"},
    ]
    _, encoded = parrot_server.json("/tokenize", {"messages": messages, "tools": TOOLS})
    assert again.usage.input_tokens == encoded["count"] and again.output_text == "Let me look."


def test_tools_and_calls_have_the_form_of_chats(parrot_server: ServerProcess) -> None:
    """What the chat template prints of a tool is in the order that models know, and inside as the client has it."""
    schema = {"required": ["b"], "type": "object", "properties": {"b": {}, "a": {"x": None}}}
    tools = [
        {"strict": True, "parameters": schema, "type": "function", "name": "f", "description": "D."},
        {"type": "function", "name": "g", "strict": None},
    ]
    calls = [{"type": "function_call", "call_id": "1", "name": "f", "arguments": text} for text in ('{"b": 1}', "{")]
    body = {"input": calls, "tools": tools, "max_output_tokens": 1}
    first = {"type": "function", "function": {"name": "f", "description": "D.", "parameters": schema, "strict": True}}
    second = {"type": "function", "function": {"name": "g"}}
    chat = chat_of(msgspec.convert(body, ResponsesRequest))
    assert json.dumps(chat.tools) == json.dumps([first, second])
    text = f'{json.dumps(first)};{json.dumps(second)};assistant:(f {{"b": 1}})(f "{{")\n'
    _, expected = parrot_server.json("/tokenize", {"prompt": text})
    status, answer = parrot_server.json("/v1/responses", body)
    assert status == 200 and answer["usage"]["input_tokens"] == expected["count"], answer


def test_max_output_tokens(client: Any) -> None:
    cut = client.responses.create(**ASK, max_output_tokens=2)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output[-1].status == "incomplete" and cut.usage.output_tokens == 2
    events = list(client.responses.create(**ASK, max_output_tokens=2, stream=True))
    assert events[-1].type == "response.incomplete"


def test_structured_output_and_a_function_that_must_be_called(client: Any) -> None:
    options = ASK | {"temperature": 1, "extra_body": {"seed": 3}}
    parsed = client.responses.parse(**options, text_format=City)
    assert isinstance(parsed.output_parsed, City)
    choice = {"type": "function", "name": "get_time"}
    answer = client.responses.create(**options, tools=FUNCTIONS, tool_choice=choice)
    assert [item.name for item in answer.output if item.type == "function_call"] == ["get_time"]


def test_asynchronous_streams_at_once(parrot_server: ServerProcess) -> None:
    async def one(client: openai.AsyncOpenAI) -> str:
        stream: Any = await client.responses.create(**ASK, tools=FUNCTIONS, stream=True)
        return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{parrot_server.url}/v1", api_key="unused") as client:
            return await asyncio.gather(*(one(client) for _ in range(16)))

    assert asyncio.run(all_of_them()) == ["Let me look."] * 16


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ({"conversation": "conv_1"}, "conversation", "nothing is stored"),
        ({"background": True}, "background", "stream"),
        ({"truncation": "auto"}, "truncation", "shorten"),
        ({"input": []}, "messages", "empty"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0]", "input_image"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0]", "without 'text'"),
        ({"input": [{"type": "computer_call"}]}, "input[0]", "computer_call"),
        ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
        ({"tools": FUNCTIONS, "tool_choice": {"type": "mcp"}}, "tool_choice", "mcp"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"reasoning": {"effort": "some"}}, "reasoning_effort", "none, minimal"),
        ({"model": "gpt-5"}, "model", "does not exist"),
        ({"input": "a" * 100_000}, "prompt", "maximum context length"),
    ],
)
def test_refusals(parrot_server: ServerProcess, fields: dict[str, Any], param: str, words: str) -> None:
    for stream in (False, True):
        status, answer = parrot_server.json("/v1/responses", {"input": "a", "stream": stream, **fields})
        assert status == (404 if param == "model" else 400), answer
        assert answer["error"]["param"] == param and words in answer["error"]["message"], answer
        assert (answer["error"]["code"] == "context_length_exceeded") == ("maximum context" in words)


def test_fields_that_change_nothing(client: Any) -> None:
    others: Any = {"include": ["reasoning.encrypted_content"], "service_tier": "auto", "truncation": "disabled"}
    own: Any = {"store": True, "metadata": {"a": "b"}, "reasoning": {"effort": "low"}, "parallel_tool_calls": True}
    answer = client.responses.create(**ASK, **others, **own)
    assert answer.metadata == {"a": "b"} and answer.store is False and answer.reasoning.effort == "low"
