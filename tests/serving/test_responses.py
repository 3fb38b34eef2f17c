"""/v1/responses with the openai client: its objects, the events of its streams, conversations that go on."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import msgspec
import openai
import pydantic
import pytest

from kvllm.serving import response_store
from kvllm.serving.bodies import SMALL_BODY_BYTES
from kvllm.serving.errors import ApiError
from kvllm.serving.response_store import ResponseStore, StoredResponse
from kvllm.serving.responses_protocol import CUSTOM_PARAMETERS, LOGPROBS, ResponsesRequest, chat_of, custom_input
from tests.helpers.parrot_chat import TOOLS
from tests.helpers.server import ServerProcess
from tests.serving.conftest import SERVERS

pytestmark = SERVERS

FUNCTIONS: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
NOTE: Any = {"type": "custom", "name": "note", "description": "Writes a note."}
ALLOWED: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]}
HOSTED = ("web_search", "web_search_preview", "file_search", "computer_use_preview", "code_interpreter", "mcp",
          "image_generation", "local_shell", "shell", "apply_patch", "namespace", "tool_search")  # fmt: skip
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
    assert (answer.status, answer.object, answer.store) == ("completed", "response", True)
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


def count(server: ServerProcess, messages: list[Any], **fields: Any) -> int:
    """Tokens of a chat's prompt."""
    status, answer = server.json("/tokenize", {"messages": messages, **fields})
    assert status == 200, answer
    return answer["count"]


CALL = {"id": "x", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
FIRST: Any = {"role": "user", "content": "Is it fine?"}
SECOND: Any = {"role": "assistant", "content": "Let me look.", "reasoning": "Hm, weather.", "tool_calls": [CALL]}


def test_the_input_of_a_custom_tool_may_be_cut_off() -> None:
    text = 'a "b" \\ é🙂\n'
    whole = json.dumps({"input": text})
    for length in range(len('{"input": "'), len(whole) + 1):
        assert text.startswith(custom_input(whole[:length]).rstrip("\ufffd")), whole[:length]
    assert custom_input(whole[:-1]) == custom_input(whole[:-2]) == text
    assert custom_input('{"input": "\\ud83d"}') == "\ufffd"  # half a character cannot be sent
    for odd in ('{"inp', '{"other": "a"}', "[1]", "", '{"input": 5}'):
        assert custom_input(odd) == odd


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_conversation_goes_on_from_a_stored_response(
    client: Any, parrot_server: ServerProcess, is_stream: bool
) -> None:
    """Input and output of the whole chain come before the input; instructions do not."""
    options: Any = {"model": "parrot", "temperature": 0, "tools": FUNCTIONS, "stream": is_stream}

    def ask(**fields: Any) -> Any:
        answer = client.responses.create(**options, **fields)
        return list(answer)[-1].response if is_stream else answer

    first = ask(input="Is it fine?", instructions="Be brief.")
    output = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "rain"}
    second = ask(input=[output], previous_response_id=first.id)
    assert second.previous_response_id == first.id
    result = {"role": "tool", "content": "rain", "tool_call_id": "x"}
    assert second.usage.input_tokens == count(parrot_server, [FIRST, SECOND, result], tools=TOOLS)
    third = ask(input="So?", previous_response_id=second.id)
    messages = [FIRST, SECOND, result, SECOND, {"role": "user", "content": "So?"}]
    assert third.usage.input_tokens == count(parrot_server, messages, tools=TOOLS)


def test_stored_responses_are_read_and_deleted(client: Any) -> None:
    items: Any = [{"role": "user", "content": text} for text in ("a", "b", "c")]
    answer = client.responses.create(**ASK | {"input": items}, tools=FUNCTIONS)
    assert client.responses.retrieve(answer.id) == answer
    listed = list(client.responses.input_items.list(answer.id, limit=2, order="asc"))  # in two pages
    assert [item.content[0].text for item in listed] == ["a", "b", "c"]
    assert [item.id for item in client.responses.input_items.list(answer.id)] == [item.id for item in listed][::-1]
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(answer.id)
    client.responses.delete(answer.id)
    for use in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match=f"'{answer.id}' not found"):
            use(answer.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.create(**ASK, previous_response_id=answer.id)


def test_what_is_not_stored(client: Any, parrot_server: ServerProcess) -> None:
    for stream in (False, True):
        answer = client.responses.create(**ASK, store=False, stream=stream)
        response = list(answer)[-1].response if stream else answer
        assert response.store is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)
    assert parrot_server.json("/v1/responses/resp_x?stream=true")[0] == 400


def test_ids_that_clients_choose_stay_apart(client: Any) -> None:
    """A second request with the same id neither replaces the first one's response nor goes on from itself."""
    ask = ASK | {"extra_headers": {"X-Request-Id": "mine"}}
    first = client.responses.create(**ask)
    second = client.responses.create(**ask, previous_response_id=first.id)
    assert first.id == "resp_mine" != second.id and second.previous_response_id == first.id
    assert client.responses.retrieve(first.id) == first and client.responses.retrieve(second.id) == second


def test_requests_at_once_with_the_id_of_a_client(parrot_server: ServerProcess) -> None:
    """None of them replaces the response of another."""
    asynchronous = openai.AsyncOpenAI(base_url=f"{parrot_server.url}/v1", api_key="unused", max_retries=0)

    async def run() -> None:
        ask = ASK | {"extra_headers": {"X-Request-Id": "same"}}
        answers = await asyncio.gather(*(asynchronous.responses.create(**ask, metadata={"n": n}) for n in "abcd"))
        assert len({answer.id for answer in answers}) == 4
        assert [await asynchronous.responses.retrieve(answer.id) for answer in answers] == answers

    asyncio.run(run())


def test_references_to_items(client: Any, parrot_server: ServerProcess) -> None:
    first = client.responses.create(**ASK, tools=FUNCTIONS)
    question = client.responses.input_items.list(first.id).data[0]
    references: Any = [{"type": "item_reference", "id": item.id} for item in (question, *first.output)]
    references[-1].pop("type")
    references.append({"type": "function_call_output", "call_id": "x", "output": "rain"})
    answer = client.responses.create(**ASK | {"input": references}, tools=FUNCTIONS)
    messages = [FIRST, SECOND, {"role": "tool", "content": "rain", "tool_call_id": "x"}]
    assert answer.usage.input_tokens == count(parrot_server, messages, tools=TOOLS)
    with pytest.raises(openai.BadRequestError, match="Duplicate item found with id"):
        client.responses.create(**ASK | {"input": [*references, references[0]]}, tools=FUNCTIONS)


def test_items_of_a_long_response(client: Any, parrot_server: ServerProcess) -> None:
    """What takes long to read is read in a thread."""
    own: Any = [{"role": "user", "content": text, "id": text} for text in ("a", "b", "c")]
    first = client.responses.create(**ASK | {"input": [*own, FIRST]}, metadata={"long": "x" * SMALL_BODY_BYTES})
    assert [item.id for item in client.responses.input_items.list(first.id, order="asc")][:3] == ["a", "b", "c"]
    references: Any = [{"type": "item_reference", "id": name} for name in ("b", first.output[-1].id, "c")]
    answer = client.responses.create(**ASK | {"input": references})
    messages = [{"role": "user", "content": "b"}, {"role": "assistant", "content": first.output_text}]
    messages.append({"role": "user", "content": "c"})
    assert answer.usage.input_tokens == count(parrot_server, messages)


def test_keys_have_their_own_responses(keys_server: ServerProcess) -> None:
    one, two = (openai.OpenAI(base_url=f"{keys_server.url}/v1", api_key=key, max_retries=0) for key in ("one", "two"))
    answer = one.responses.create(model="reasoner", input="words: a1\n", max_output_tokens=2)
    assert one.responses.retrieve(answer.id) == answer
    reference: Any = [{"type": "item_reference", "id": answer.output[0].id}]
    for use in (
        lambda: two.responses.retrieve(answer.id),
        lambda: two.responses.delete(answer.id),
        lambda: two.responses.create(model="reasoner", input="a", previous_response_id=answer.id),
        lambda: two.responses.create(model="reasoner", input=reference),
    ):
        with pytest.raises(openai.NotFoundError, match="not found"):
            use()
    assert one.responses.retrieve(answer.id) == answer


def test_bounds_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Number, bytes and age of what a key keeps; what was used last stays longest."""
    now = 0.0
    store = ResponseStore(lambda: now)

    def put(name: str, tenant: str = "a", size: int = 1) -> None:
        store.put(tenant, StoredResponse(name, b"x" * size, b"", (f"item_{name}",)))

    monkeypatch.setattr(response_store, "MAX_RESPONSES", 2)
    monkeypatch.setattr(response_store, "MAX_BYTES", 10)
    put("1")
    put("2")
    store.get("a", "1")
    put("3")
    assert [store.has("a", name) for name in "123"] == [True, False, True]
    with pytest.raises(ApiError, match="item_2"):
        store.with_item("a", "item_2", "input")
    put("4", "b", 10)
    assert store.with_item("a", "item_3", "input").id == "3"
    put("5", size=10)
    assert [store.has("a", name) for name in "135"] == [False, False, True] and store.has("b", "4")
    put("6", size=11)
    assert not store.has("a", "6")
    put("7")
    now = response_store.MAX_SECONDS + 1
    with pytest.raises(ApiError, match="not found"):
        store.get("a", "7")


def test_truncation(client: Any, parrot_server: ServerProcess) -> None:
    """The earliest turns are left out, as few as have to; instructions stay."""
    turns: Any = []
    for number in range(40):
        turns += [{"role": "user", "content": f"{number}" + " a" * 60}, {"role": "assistant", "content": "Yes."}]
    turns.append(FIRST)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.responses.create(**ASK | {"input": turns}, instructions="Be brief.")
    options: Any = {"instructions": "Be brief.", "truncation": "auto", "max_output_tokens": 50}
    answer = client.responses.create(**ASK | {"input": turns}, **options)
    assert answer.truncation == "auto" and answer.output_text.startswith("Let me look.")
    system = {"role": "system", "content": "Be brief."}
    fitting = []
    for start in range(0, 80, 2):
        status, found = parrot_server.json("/tokenize", {"messages": [system, *turns[start:]]})
        if status == 200 and found["count"] + 50 <= 2048:
            fitting.append(found["count"])
    assert answer.usage.input_tokens == max(fitting)


def test_tools_that_are_allowed(client: Any) -> None:
    """The model sees no others, and calls one where it has to."""
    options = ASK | {"temperature": 1, "extra_body": {"seed": 3}}
    answer = client.responses.create(**options, tools=FUNCTIONS, tool_choice=ALLOWED)
    assert {item.name for item in answer.output if item.type == "function_call"} == {"get_time"}
    assert answer.tool_choice.model_dump() == ALLOWED and len(answer.tools) == 2
    free = client.responses.create(**ASK, tools=FUNCTIONS, tool_choice=ALLOWED | {"mode": "auto"})
    alone = client.responses.create(**ASK, tools=FUNCTIONS[1:])
    assert free.usage.input_tokens == alone.usage.input_tokens


def test_custom_tools(client: Any, parrot_server: ServerProcess) -> None:
    """Their input is text of any form. The model takes each for a function with one text."""
    options: Any = ASK | {"temperature": 1, "max_output_tokens": 400, "extra_body": {"seed": 3}}
    options |= {"tools": [NOTE], "tool_choice": {"type": "custom", "name": "note"}}
    answer = client.responses.create(**options)
    (call,) = [item for item in answer.output if item.type == "custom_tool_call"]
    assert call.name == "note" and call.input and call.id.startswith("ctc_")
    assert answer.tools[0].name == "note" and answer.tools[0].type == "custom"
    events = list(client.responses.create(**options, stream=True))
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == done.input == call.input
    assert not [event for event in events if "function_call_arguments" in event.type]

    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "noted"}
    items = [FIRST, {**call.model_dump(), "input": 'a"b'}, output]
    body = {"input": items, "tools": [NOTE], "max_output_tokens": 1}
    made = {"name": "note", "arguments": json.dumps({"input": 'a"b'})}
    messages = [FIRST, {"role": "assistant", "tool_calls": [{"type": "function", "function": made}]}]
    messages.append({"role": "tool", "content": "noted"})
    tool = {"name": "note", "description": "Writes a note.", "parameters": CUSTOM_PARAMETERS}
    expected = count(parrot_server, messages, tools=[{"type": "function", "function": tool}])
    status, found = parrot_server.json("/v1/responses", body)
    assert status == 200 and found["usage"]["input_tokens"] == expected, found


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": "look"},
        {"stop": ["look"], "include_stop_str_in_output": True},
        {"structured_outputs": {"choice": ["yes"]}},
        {"allowed_token_ids": [70, 71]},
        {"bad_words": ["Let me look."]},
        {"logit_bias": {"70": 100}},
        {"include_reasoning": False},
    ],
)
def test_fields_of_chats(parrot_server: ServerProcess, fields: dict[str, Any]) -> None:
    """Each does what it does to a chat, and that is something."""

    def answer(**fields: Any) -> tuple[str, str]:
        ask = {"input": "Is it fine?", "temperature": 0, "max_output_tokens": 20, "store": False}
        status, response = parrot_server.json("/v1/responses", ask | fields)
        assert status == 200, response
        texts = {item["type"]: item["content"][0]["text"] for item in response["output"]}
        return texts.get("reasoning", ""), texts.get("message", "")

    ask = {"messages": [{"role": "user", "content": "Is it fine?"}], "temperature": 0, "max_tokens": 20}
    _, chat = parrot_server.json("/v1/chat/completions", ask | fields)
    message = chat["choices"][0]["message"]
    assert answer(**fields) == (message["reasoning"] or "", message["content"] or "") != answer()


def test_log_probabilities(client: Any, parrot_server: ServerProcess) -> None:
    """Those of the text alone, the same in a stream, and those of chats."""
    wanted: Any = {"include": [LOGPROBS], "top_logprobs": 2}
    thought, message, _ = client.responses.create(**ASK, **wanted, tools=FUNCTIONS).output
    shown = message.content[0].logprobs
    assert [each.token for each in shown] == ["Let me look."] and len(shown[0].top_logprobs) == 2
    assert thought.type == "reasoning" and shown[0].logprob == shown[0].top_logprobs[0].logprob
    events = list(client.responses.create(**ASK, **wanted, tools=FUNCTIONS, stream=True))
    deltas = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    (done,) = [event.logprobs for event in events if event.type == "response.output_text.done"]
    assert [each.token for each in deltas] == [each.token for each in done] == [each.token for each in shown]
    assert events[-1].response.output[1].content[0].logprobs == shown


def test_a_message_that_was_cut_off_goes_on(client: Any) -> None:
    """As it was given back, or named by its id. One that is whole is answered instead."""
    question = {"role": "user", "content": "Is it fine?"}
    ask = {"model": "parrot", "temperature": 0}
    whole = client.responses.create(**ask, input=[question]).output_text
    cut = client.responses.create(**ask, input=[question], max_output_tokens=8).output[-1]
    assert cut.status == "incomplete" and whole.startswith(cut.content[0].text) and whole != cut.content[0].text
    for item in (cut.to_dict(), {"type": "item_reference", "id": cut.id}):
        rest = client.responses.create(**ask, input=[question, item])
        assert cut.content[0].text + rest.output_text == whole
    answered = client.responses.create(**ask, input=[question, cut.to_dict() | {"status": "completed"}])
    assert answered.usage.input_tokens > rest.usage.input_tokens
    call = {"type": "function_call", "call_id": "c", "name": "get_time", "arguments": "{}"}
    for items in ([call, cut.to_dict()], [cut.to_dict() | {"content": ""}]):  # nothing that could go on
        body = msgspec.convert({"input": [question, *items]}, ResponsesRequest)
        assert not chat_of(body).continue_final_message


def test_a_thought_of_which_there_is_a_summary_alone() -> None:
    summary = [{"type": "summary_text", "text": "Hm."}]
    for content, thought in (([], "Hm."), ([{"type": "reasoning_text", "text": "Hm, weather."}], "Hm, weather.")):
        item = {"type": "reasoning", "summary": summary, "content": content}
        body = msgspec.convert({"input": [{"role": "user", "content": "a"}, item]}, ResponsesRequest)
        assert chat_of(body).messages[-1]["reasoning"] == thought


def test_max_output_tokens(client: Any) -> None:
    cut = client.responses.create(**ASK, max_output_tokens=2)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output[-1].status == "incomplete" and cut.usage.output_tokens == 2
    events = list(client.responses.create(**ASK, max_output_tokens=9, tools=FUNCTIONS, stream=True))
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert events[-1].type == "response.incomplete"
    assert [item.status for item in done] == ["completed", "completed", "incomplete"]
    assert done[-1].type == "function_call" and not done[-1].arguments.endswith("}")


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
        ({"previous_response_id": "resp_none"}, "previous_response_id", "'resp_none' not found"),
        ({"input": [{"type": "item_reference", "id": "msg_none"}]}, "input[0]", "'msg_none' not found"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"background": True}, "background", "stream"),
        ({"truncation": "some"}, "truncation", "auto or disabled"),
        ({"input": "a" * 100_000, "truncation": "auto"}, "prompt", "maximum context length"),
        ({"top_logprobs": 2}, "top_logprobs", "in include"),
        ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs", "between 0 and 20"),
        *(({name: 3}, name, "between") for name in ("min_p", "presence_penalty", "frequency_penalty")),
        ({"repetition_penalty": -1}, "repetition_penalty", "between"),
        ({"stop_token_ids": [*range(2000)]}, "stop_token_ids", "at most 1024"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs", "no such arguments"),
        ({"enable_response_messages": True}, "enable_response_messages", "return_token_ids"),
        (
            {"structured_outputs": {"choice": ["a"]}, "text": {"format": {"type": "json_object"}}},
            "structured_outputs",
            "exclude each other",
        ),
        ({"input": []}, "messages", "empty"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0]", "input_image"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0]", "without 'text'"),
        ({"input": [{"type": "computer_call"}]}, "input[0]", "computer_call"),
        *(({"tools": [{"type": kind}]}, "tools", kind) for kind in HOSTED),
        ({"tools": [{**NOTE, "format": {"type": "grammar", "syntax": "lark"}}]}, "tools", "'note' has a format"),
        ({"tools": [{**NOTE, "defer_loading": True}]}, "defer_loading", "all tools"),
        ({"tools": FUNCTIONS, "tool_choice": ALLOWED | {"tools": [NOTE]}}, "tool_choice", "'note', which is none"),
        ({"tools": FUNCTIONS, "tool_choice": ALLOWED | {"mode": "x"}}, "tool_choice", "auto or required"),
        ({"tools": FUNCTIONS, "tool_choice": ALLOWED | {"tools": []}}, "tool_choice", "no tools"),
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
        assert status == (404 if param == "model" or "not found" in words else 400), answer
        assert answer["error"]["param"] == param and words in answer["error"]["message"], answer
        assert (answer["error"]["code"] == "context_length_exceeded") == ("maximum context" in words)


def test_fields_that_change_nothing(client: Any) -> None:
    others: Any = {"include": ["reasoning.encrypted_content"], "service_tier": "auto", "truncation": "disabled"}
    own: Any = {"store": False, "metadata": {"a": "b"}, "reasoning": {"effort": "low"}, "parallel_tool_calls": True}
    answer = client.responses.create(**ASK, **others, **own)
    assert answer.metadata == {"a": "b"} and answer.store is False and answer.reasoning.effort == "low"
