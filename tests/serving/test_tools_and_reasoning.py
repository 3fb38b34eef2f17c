"""Thoughts, tool calls and structured outputs through the real server, with the openai client.

The model knows which token of its only answer follows which. Where a rule leads it elsewhere, all tokens are equally
likely.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import jsonschema
import msgspec
import openai
import pydantic
import pytest

from kvllm.serving.errors import ApiError
from kvllm.serving.protocol import ChatCompletionRequest
from kvllm.serving.state import ServerOptions
from kvllm.serving.tool_choice import tool_choice
from tests.helpers.browser import open_browser, watched_page
from tests.helpers.parrot_chat import ANSWER, CITY, QUESTION, TIME, TOOLS
from tests.helpers.server import ServerProcess
from tests.serving.conftest import SERVERS

pytestmark = SERVERS

NO_THOUGHT = {"chat_template_kwargs": {"closed": True}}


@pytest.fixture(scope="module")
def client(parrot_server: ServerProcess) -> Any:
    return openai.OpenAI(base_url=f"{parrot_server.url}/v1", api_key="unused", max_retries=0)


def ask(client: Any, **options: Any) -> Any:
    options = {"model": "parrot", "messages": QUESTION, "temperature": 0, "max_tokens": 300} | options
    return client.chat.completions.create(**options)


def allowed(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


# Free answers


def test_a_thought_a_text_and_a_call(client: Any) -> None:
    answer = ask(client, tools=TOOLS)
    choice = answer.choices[0]
    assert (choice.message.reasoning, choice.message.reasoning_content) == ("Hm, weather.", "Hm, weather.")
    assert (choice.message.content, choice.finish_reason) == ("Let me look.", "tool_calls")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function", "get_weather", {"city": "Paris"})  # fmt: skip
    assert call.id.startswith("call_")
    assert answer.usage.completion_tokens_details.reasoning_tokens == 4
    assert answer.usage.completion_tokens == len(ANSWER) - 1


def test_the_stream_says_the_same(client: Any) -> None:
    """The client adds the deltas up, as its helper for streams does."""
    options = {"model": "parrot", "messages": QUESTION, "temperature": 0, "tools": TOOLS}
    with client.chat.completions.stream(**options) as stream:
        events = list(stream)
        choice = stream.get_final_completion().choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.message.content, choice.finish_reason) == ("Let me look.", "tool_calls")
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')
    pieces = [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert "".join(pieces) == call.function.arguments
    chunks = list(ask(client, tools=TOOLS, stream=True, stream_options={"include_usage": True}))
    thought = [getattr(chunk.choices[0].delta, "reasoning", None) for chunk in chunks[:-1]]
    assert "".join(filter(None, thought)) == "Hm, weather."
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == 4
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "tool_calls"
    assert not any("<" in (chunk.choices[0].delta.content or "") for chunk in chunks[:-1])


def test_without_tools_calls_are_text(client: Any) -> None:
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = ask(client, **options).choices[0]
        assert choice.message.content == "".join(ANSWER[5:-1]) and choice.finish_reason == "stop"
        assert choice.message.tool_calls is None


def test_a_thought_that_the_prompt_opens(client: Any) -> None:
    """The rest of the answer is a thought, when its end does not come."""
    extra = {"chat_template_kwargs": {"opened": True}}
    message = ask(client, extra_body=extra).choices[0].message
    assert (message.reasoning, message.content) == ("Hm, weather.", "".join(ANSWER[5:-1]))
    cut = ask(client, extra_body=extra, max_tokens=2)
    assert (cut.choices[0].message.reasoning, cut.choices[0].message.content) == ("Hm, weather.", None)
    assert cut.usage.completion_tokens_details.reasoning_tokens == 2
    hidden = ask(client, extra_body=extra | {"include_reasoning": False}).choices[0].message
    assert hidden.content and hidden.reasoning is None


def test_tools_thoughts_and_earlier_calls_reach_the_template(parrot_server: ServerProcess) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "assistant", "content": "A", "reasoning": "B"},
        {"role": "assistant", "content": "C", "reasoning_content": "D"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
    ]
    tools = "".join(json.dumps(tool) + ";" for tool in TOOLS)
    said = 'assistant:A[B]assistant:C[D]assistant:(get_weather {"city": "Rome"})tool:rain'
    assert prompt(parrot_server, messages, TOOLS) == tools + said


def prompt(server: ServerProcess, messages: list[Any], tools: list[Any]) -> str:
    """What the chat template makes of a conversation."""
    body = {"messages": messages, "tools": tools, "add_generation_prompt": False}
    status, encoded = server.json("/tokenize", body)
    assert status == 200, encoded
    return server.json("/detokenize", {"tokens": encoded["tokens"]})[1]["prompt"]


def test_tools_reach_the_template_as_they_were_sent(client: Any, parrot_server: ServerProcess) -> None:
    """Every key in the client's order: models know the order of `get_json_schema`, and clients send what they like."""
    properties = {"b": {"type": "string", "x-unit": 1.0}, "a": {"enum": [2**70, None]}}
    odd = {
        "type": "function",
        "cache_control": {"type": "ephemeral"},
        "function": {
            "strict": True,
            "parameters": {"required": ["b"], "type": "object", "properties": properties},
            "returns": {"type": "string"},
            "description": None,
            "name": "odd",
        },
    }
    tools = [odd, {"function": {"name": "bare"}}, *TOOLS]
    messages = [{"role": "user", "content": "A"}]
    text = "".join(json.dumps(tool) + ";" for tool in tools) + "user:A"
    assert prompt(parrot_server, messages, tools) == text
    chat = ask(client, messages=messages, tools=tools, max_tokens=1)
    _, counted = parrot_server.json("/tokenize", {"prompt": text + "\n"})
    assert chat.usage.prompt_tokens == counted["count"]


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"b": 1, "a": [2]}', '{"b": 1, "a": [2]}'),
        ({"b": 1, "a": None}, '{"b": 1, "a": null}'),
        ('{"city": "Par', json.dumps('{"city": "Par')),
        ("", "{}"),
        (None, "{}"),
        ("[1]", '"[1]"'),
        ([1], "[1]"),
    ],
    ids=str,
)
def test_calls_that_a_model_has_spoilt_do_not_end_the_conversation(
    parrot_server: ServerProcess, arguments: Any, seen: str
) -> None:
    """An answer that `max_tokens` cuts off has such calls, and clients send them back."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert prompt(parrot_server, messages, []) == f"assistant:(f {seen})"


# Answers that have to


def check_calls(calls: Any, names: set[str]) -> None:
    schemas = {"get_weather": CITY, "get_time": TIME}
    assert calls and {call.function.name for call in calls} <= names
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])
def test_a_call_that_must_come_goes_before_the_format_of_text(client: Any, choice: Any) -> None:
    options = {"tools": TOOLS, "tool_choice": choice, "temperature": 1, "seed": 3, "extra_body": NO_THOUGHT}
    expected = ask(client, **options).choices[0].message
    found = ask(client, **options, response_format={"type": "json_object"}).choices[0].message
    assert [call.function for call in found.tool_calls] == [call.function for call in expected.tool_calls]


@pytest.mark.parametrize("seed", range(4))
def test_required_calls(client: Any, seed: int) -> None:
    options = {"tools": TOOLS, "tool_choice": "required", "temperature": 1, "extra_body": NO_THOUGHT}
    choice = ask(client, seed=seed, **options).choices[0]
    assert choice.message.content is None and choice.finish_reason == "tool_calls"
    check_calls(choice.message.tool_calls, {"get_weather", "get_time"})


def test_a_named_call_in_a_stream(client: Any) -> None:
    named = {"type": "function", "function": {"name": "get_time"}}
    options = {"model": "parrot", "messages": QUESTION, "tools": TOOLS, "tool_choice": named, "seed": 5}
    with client.chat.completions.stream(**options, extra_body=NO_THOUGHT) as stream:
        stream.until_done()
        choice = stream.get_final_completion().choices[0]
    check_calls(choice.message.tool_calls, {"get_time"})
    assert len(choice.message.tool_calls) == 1 and choice.finish_reason == "tool_calls"


def test_tools_that_are_allowed(client: Any) -> None:
    """The model sees no others, and calls one where it has to."""
    options = {"tools": TOOLS, "temperature": 1, "extra_body": NO_THOUGHT}
    answer = ask(client, seed=3, tool_choice=allowed("required", "get_time"), **options)
    assert {call.function.name for call in answer.choices[0].message.tool_calls} == {"get_time"}
    free = ask(client, tools=TOOLS, tool_choice=allowed("auto", "get_time"))
    assert free.usage.prompt_tokens == ask(client, tools=TOOLS[1:]).usage.prompt_tokens
    none = ask(client, tools=TOOLS, tool_choice=allowed("auto"))
    assert none.usage.prompt_tokens == ask(client).usage.prompt_tokens


def test_the_thought_comes_before_the_rule(client: Any) -> None:
    """The free part goes as the model likes, and the rule holds after it."""
    answer = ask(
        client, extra_body={"structured_outputs": {"regex": "[0-9]{5}"}, "chat_template_kwargs": {"opened": 1}}
    )
    message = answer.choices[0].message
    assert message.reasoning == "Hm, weather." and re.fullmatch("[0-9]{5}", message.content)


def tool(name: str, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


LIMITED = {"type": "string", "pattern": "^[ab]$", "format": "password", "not": {"const": "b"}}
ODD = [tool("odd", {"type": "no"}), tool("get_key", {"properties": {"key": {"$ref": "#/$defs/q"}}, "type": "object",
       "required": ["key"], "additionalProperties": False, "$defs": {"q": LIMITED}})]  # fmt: skip


def test_an_odd_tool_spoils_no_request(client: Any) -> None:
    options = {"temperature": 1, "extra_body": NO_THOUGHT, "tools": ODD}
    unended = {**options, "extra_body": {**NO_THOUGHT, "ignore_eos": True}}
    assert ask(client, **unended, max_tokens=5).choices[0].finish_reason == "length"
    found = {}
    for seed in range(20):
        choice = ask(client, seed=seed, tool_choice="required", max_tokens=100, **options).choices[0]
        for call in choice.message.tool_calls if choice.finish_reason == "tool_calls" else ():
            found[call.function.name] = json.loads(call.function.arguments)
    assert found["get_key"]["key"] in "ab" and isinstance(found.get("odd", {}), dict)


@pytest.mark.parametrize(("strict", "expected"), [(True, 400), (False, 200), (None, 200)])
def test_strict_schemas_of_every_route(parrot_server: ServerProcess, strict: bool | None, expected: int) -> None:
    named = {"type": "json_schema", "name": "x", "strict": strict, "schema": LIMITED}
    schema = {"response_format": {"type": "json_schema", "json_schema": named}, "max_tokens": 5}
    limited = {"type": "object", "properties": {"a": LIMITED}}
    of_messages = {"name": "f", "input_schema": limited, "strict": strict}
    requests = [
        ("/v1/completions", {"prompt": "A", **schema}),
        ("/v1/chat/completions", {"messages": QUESTION, **schema}),
        ("/v1/responses", {"input": "A", "text": {"format": named}, "max_output_tokens": 5}),
        ("/v1/responses", {"input": "A", "tools": [{"type": "function", "name": "f", "parameters": limited,
                           "strict": strict}], "tool_choice": "required", "max_output_tokens": 5}),
        ("/v1/messages", {"model": "parrot", "messages": QUESTION, "tools": [of_messages],
                          "tool_choice": {"type": "any"}, "max_tokens": 5}),
    ]  # fmt: skip
    for path, body in requests:
        status, answer = parrot_server.json(path, body)
        assert status == expected, (path, answer)
        assert expected == 200 or "not at #" in answer["error"]["message"]


class Person(pydantic.BaseModel):
    name: Literal["Ann", "Bob"]
    ages: tuple[int, int]
    is_new: bool


def test_a_schema_that_the_client_parses(client: Any) -> None:
    for seed in range(5):
        options = {"temperature": 1, "seed": seed, "max_tokens": 400}
        answer = client.chat.completions.parse(
            model="parrot", messages=QUESTION, response_format=Person, **options, extra_body=NO_THOUGHT
        )
        assert isinstance(answer.choices[0].message.parsed, Person)


def test_json_object_and_other_rules(client: Any) -> None:
    kinds: list[tuple[dict[str, Any], str]] = [
        ({"response_format": {"type": "text"}}, ".*"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "a" "b"*'}}, "ab*"),
        ({"response_format": {"type": "json_object"}, "max_tokens": 30}, r"\{.*"),
    ]
    for fields, pattern in kinds:
        message = ask(client, temperature=1, seed=1, extra_body=NO_THOUGHT | fields).choices[0].message
        assert re.fullmatch(pattern, message.content or "", re.DOTALL), message


def test_completions_obey_too(client: Any) -> None:
    for extra in ({"structured_outputs": {"regex": "[0-9]{3}"}}, {"response_format": {"type": "json_schema",
                  "json_schema": {"name": "n", "schema": {"enum": [123]}}}}):  # fmt: skip
        answer = client.completions.create(model="parrot", prompt=["A", "B"], n=2, extra_body=extra)
        assert all(re.fullmatch("[0-9]{3}", choice.text) for choice in answer.choices)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": TOOLS, "tool_choice": "some"}, "none, auto, required"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "none of the tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "'', which is none of the tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "'custom' is not supported"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "needs allowed_tools"),
        ({"tools": TOOLS, "tool_choice": allowed("auto", "get_rain")}, "'get_rain', which is none of the tools"),
        ({"tools": TOOLS, "tool_choice": allowed("none", "get_time")}, "auto or required"),
        ({"tools": TOOLS, "tool_choice": allowed("required")}, "one of no tools"),
        ({"tools": [{"type": "retrieval", "function": {"name": "x"}}]}, "retrieval"),
        ({"tools": TOOLS * 100}, "tools"),
        ({"tools": [tool("odd", {"type": "no"})], "tool_choice": tool("odd")}, "'odd': structured_outputs cannot be"),
        ({"tools": [*TOOLS, tool("odd", {"type": "no"}, strict=True)], "tool_choice": "required"}, "'odd'"),
        ({"tools": [*TOOLS, tool("odd", {"type": "object", "properties": {"a": {"uniqueItems": True}}}, strict=True)],
          "tool_choice": "required"}, "'odd': a strict JSON schema has what cannot be enforced"),
        ({"response_format": {"type": "json_schema", "json_schema": {
            "strict": True, "schema": {"properties": {"a": {"not": {}}}}}}}, "not at #/properties/a"),
        ({"structured_outputs": {"regex": "(((a?){30}){30}){30}x", "choice": ["a"]}}, "exactly one"),
        ({"structured_outputs": {"regexp": "a"}}, "regexp"),
        ({"structured_outputs": {"regex": "a{1000000}{1000000}"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "exclude each other"),
        ({"response_format": {"type": "xml"}}, "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "schema"),
        ({"guided_json": {}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_refusals(parrot_server: ServerProcess, fields: dict[str, Any], words: str) -> None:
    status, answer = parrot_server.json("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 5, **fields})
    assert status == 400 and words in answer["error"]["message"], answer


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": ["a"]}, "tools[0]"),
        ({"tools": [*TOOLS, {"function": {"name": 1}}]}, "tools[2].function.name"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [*QUESTION, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages[0].content"),
        ({"messages": [{"content": "a"}]}, "messages[0]"),
    ],
    ids=str,
)
def test_an_error_names_its_place(parrot_server: ServerProcess, fields: dict[str, Any], param: str) -> None:
    for route in ("/v1/chat/completions", "/tokenize"):
        status, answer = parrot_server.json(route, {"messages": QUESTION, **fields})
        assert (status, answer["error"]["param"]) == (400, param), answer


def test_the_page_shows_the_thought_and_the_call(parrot_server: ServerProcess) -> None:
    """A thought of its own, closed and with its time, then a call whose result the user gives."""
    with open_browser() as browser, watched_page(browser, parrot_server.url) as page:
        page.click("text=Settings")
        page.click("#chat-settings summary >> text=Tools")
        page.fill("#chat-settings .mono", json.dumps(TOOLS))
        page.fill("#chat-settings input[type=number] >> nth=0", "0")
        page.click("#chat-settings >> text=Close")
        page.fill("#composer", "Is it fine?")
        page.press("#composer", "Enter")
        page.wait_for_selector(".call >> text=Calls the tool get_weather")
        assert json.loads(page.inner_text(".call pre")) == {"city": "Paris"}
        page.wait_for_selector(".thought:not([open]) summary >> text=/^Thought for (less than a second|[\\d.]+ s)$/")
        assert page.locator(".thought .plain").text_content() == "Hm, weather."
        assert page.inner_text(".prose") == "Let me look."
        page.fill(".call textarea", "sunny")
        page.click("text=Give the result")
        page.wait_for_selector(".answer >> nth=1 >> .call >> text=Calls the tool get_weather")
        assert page.locator(".tool pre").text_content() == "sunny"


def test_tools_need_a_flag() -> None:
    body = msgspec.convert({"messages": QUESTION, "tools": TOOLS}, ChatCompletionRequest)
    with pytest.raises(ApiError, match="--enable-auto-tool-choice"):
        tool_choice(body, ServerOptions(("parrot",)))
    assert tool_choice(body, ServerOptions(("parrot",), enable_auto_tool_choice=True)).may_call
