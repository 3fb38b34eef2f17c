"""Conversations and tools on their way to the chat template: the prompts are those of transformers."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from kvllm.chat_messages import render_chat
from kvllm.content_format import ContentFormat, content_format
from kvllm.errors import RequestError
from kvllm.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.tokenizers import byte_level

USER = {"role": "user", "content": "What is it like in Rome?"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "What it is <like> & why: é.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
            "strict": True,
        },
    },
    {
        "function": {
            "strict": False,
            "parameters": {"required": [], "$defs": {"b": {}, "a": {}}, "properties": {"z": {"x-y": 1.0}, "a": {}}},
            "name": "odd",
            "return": {"type": "number"},
            "description": "",
        },
        "cache_control": {"type": "ephemeral"},
        "type": "function",
    },
    {"type": "function", "function": {"name": "bare", "parameters": None}},
]


def of_calls(arguments: str) -> str:
    """A template that prints the calls of messages."""
    calls = "{% for call in message.tool_calls or [] %}{% set function = call.function %}{{ function.name + ' ' }}"
    return "{% for message in messages %}{{ message.content }}" + calls + arguments + "{% endfor %}{% endfor %}"


ITEMS = of_calls("{% for key, value in function.arguments.items() %}{{ key }}={{ value }};{% endfor %}")
TOJSON = of_calls("{{ function.arguments | tojson }}")
PRINTED = of_calls("{% if function.arguments is string %}{{ function.arguments }}{% else %}an object{% endif %}")


@pytest.fixture(scope="module")
def qwen3(shared_dir: Path) -> Tokenizer:
    """The real template, and the real tokenizer."""
    path = shared_dir / "data" / "tokenizers" / "Qwen3"
    if not (path / "chat_template.jinja").is_file():
        pytest.skip(f"needs the tokenizer of Qwen3 in {path}, which is absent")
    return load_tokenizer(path)


def render(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return render_chat(byte_level("chat"), messages, None, {"chat_template": template, **options})


def called(arguments: Any, name: str = "f") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "A", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


# The same as transformers


def test_tools_are_those_of_transformers(qwen3: Tokenizer) -> None:
    expected = qwen3.hf.apply_chat_template([USER], tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert render_chat(qwen3, [USER], TOOLS, {}) == expected
    for tool in TOOLS:
        assert f"\n{json.dumps(tool, ensure_ascii=False)}\n" in expected
    assert render_chat(qwen3, [USER], tuple(TOOLS), {"enable_thinking": False}).endswith("<think>\n\n</think>\n\n")


def test_calls_are_those_of_transformers(qwen3: Tokenizer) -> None:
    """transformers wants the arguments as objects; clients of OpenAI's API send their text."""
    arguments = [{"city": "Rome", "at": [1.0, None, {"z": 1, "a": "é"}]}, {}]
    messages: list[dict[str, Any]] = [USER, *map(called, arguments), {"role": "tool", "content": "rain"}, USER]
    expected = qwen3.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    texts = [USER, *(called(json.dumps(each)) for each in arguments), *messages[3:]]
    before = deepcopy(texts)
    assert render_chat(qwen3, texts, None, {}) == render_chat(qwen3, messages, None, {}) == expected
    assert texts == before


def test_other_keys_of_a_message_reach_the_template() -> None:
    message = {"z": [1], "role": "user", "name": "Ann", "content": "A", "a": {"d": 1, "c": 2}, "tool_call_id": "7"}
    template = "{{ messages | tojson }}"
    assert render(template, [message]) == json.dumps([message])
    call = {
        "type": "function",
        "index": 0,
        "function": {"arguments": {"b": 1, "a": 2}, "more": 1, "name": "f"},
        "id": "1",
    }
    assert json.dumps(call) in render(template, [{"role": "assistant", "content": "A", "tool_calls": [call]}])
    documents = [{"z": 1, "title": "T", "a": 2}]
    assert render("{{ documents | tojson }}", [message], documents=documents) == json.dumps(documents)


# What clients leave to the server


def test_fields_that_are_null_are_absent() -> None:
    given = {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "function_call": None}
    assert render("{{ messages | tojson }}", [given]) == '[{"role": "assistant", "content": ""}]'
    assert "tool_calls" not in render("{{ messages | tojson }}", [given | {"tool_calls": []}])
    assert render("{{ messages[0].content }}.", [{"role": "user"}]) == "."


def test_developers_and_thoughts() -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.reasoning }},{{ m.reasoning_content }};{% endfor %}"
    messages = [
        {"role": "developer", "content": "A"},
        {"role": "assistant", "content": "B", "reasoning": "C"},
        {"role": "assistant", "content": "B", "reasoning_content": "D", "reasoning": "C"},
    ]
    assert render(template, messages) == "system:,;assistant:C,C;assistant:D,D;"


# Arguments that are no object


SPOILT = ['{"city": "Ro', "[1]", "7", '"a"', "nothing", '{"a": "\\ud83d"}']


@pytest.mark.parametrize("text", SPOILT)
def test_text_that_is_no_json_of_an_object(text: str) -> None:
    """A template that prints text sees what the model has written; one that needs an object gets an empty one."""
    messages = [USER, called(text)]
    assert render(TOJSON, messages).endswith(f"Af {json.dumps(text)}")
    assert render(PRINTED, messages).endswith(f"Af {text}")
    assert render(ITEMS, [*messages, called('{"b": 1, "a": 2}', "g")]).endswith("Af Ag b=1;a=2;")


@pytest.mark.parametrize("value", [[1], 7, False], ids=str)
def test_values_that_are_no_object(value: Any) -> None:
    assert render(TOJSON, [called(value)]) == f"Af {json.dumps(value)}"
    assert render(ITEMS, [called(value)]) == "Af "


@pytest.mark.parametrize("nothing", [None, "", " ", "null", "{}", {}], ids=repr)
def test_no_arguments(nothing: Any) -> None:
    message = called(nothing)
    for template, seen in ((TOJSON, "{}"), (PRINTED, "an object"), (ITEMS, "")):
        assert render(template, [message]) == f"Af {seen}"
    del message["tool_calls"][0]["function"]["arguments"]
    assert render(TOJSON, [message]) == "Af {}"


JOINED = of_calls("{{ '`' + function.arguments + '`' }}")
"""As DeepSeek's templates have it."""


def test_templates_that_join_the_text_of_arguments() -> None:
    calls = [called('{"b": 1, "a": "é"}'), called({"c": 2}, "g"), called('{"d', "h")]
    assert render(JOINED, calls) == 'Af `{"b": 1, "a": "é"}`Ag `{"c": 2}`Ah `{}`'


def test_a_template_that_leaves_calls_out() -> None:
    of_null = "{% for message in messages %}{% if message.content is none %}{{ message.tool_calls }}{% endif %}"
    with pytest.raises(RequestError, match="only where the content is null.*use a newer template of this model"):
        render(of_null + "{% endfor %}", [called("{}")])
    assert render("{% for message in messages %}{{ message.content }}{% endfor %}", [called("{}")]) == "A"


def test_spoilt_calls_in_a_real_template(qwen3: Tokenizer) -> None:
    """Text is printed as the model has written it."""
    for given, seen in (*((text, text) for text in SPOILT), (None, "{}"), ("", "{}"), ([1], "[1]"), (7, "7")):
        turn = f'<|im_start|>assistant\nA\n<tool_call>\n{{"name": "f", "arguments": {seen}}}\n</tool_call><|im_end|>\n'
        assert turn in render_chat(qwen3, [USER, called(given), USER], None, {})


def test_a_template_that_fails_for_another_reason_says_so() -> None:
    with pytest.raises(RequestError, match="cannot render these messages.*too many"):
        render("{{ raise_exception('too many') }}", [USER, called("{")])


# Parts


ONE_PART = [{"type": "text", "text": "A"}]
PARTS = [*ONE_PART, {"type": "refusal", "refusal": "B"}, {"text": "C", "type": "text"}]
STRING = "{% for message in messages %}{{ message.role + ':' + message.content }}{% endfor %}"
LOOP = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
EITHER = (
    "{% set rest = messages[1:] if messages[0]['role'] == 'system' else messages %}{% for message in rest %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}[{{ part['text'] }}]{% endfor %}"
    "{% endif %}{% endfor %}"
)
MACRO = (
    "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}{% for item in content %}"
    "[{{ item.text }}]{% endfor %}{% endif %}{% endmacro %}"
    "{% for message in messages[::-1] %}{{ show(message.content) }}{% endfor %}"
)
NAMED = (
    "{% for message in messages %}{% set content = message['content'] or [] %}{% generation %}"
    "{% for part in content %}[{{ part['text'] }}]{% endfor %}{% endgeneration %}{% endfor %}"
)
TEXT, BOTH = ContentFormat(), ContentFormat(parts=True)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (STRING, TEXT),
        (LOOP, ContentFormat(text=False, parts=True)),
        (EITHER, BOTH),
        (MACRO, BOTH),
        (NAMED, ContentFormat(text=False, parts=True)),
        (TOJSON, TEXT),
        ("{% set last = messages | last %}{% for part in last.content %}{{ part.text }}{% endfor %}",
         ContentFormat(text=False, parts=True)),
        ("{% for message in messages %}{{ message.content }}{% endfor %}"
         "{% for document in documents %}{% for content in document.content %}{{ content }}{% endfor %}{% endfor %}",
         TEXT),
        ("{% for message in messages %}{% if message.content is string %}{{ message.content }}{% endif %}{% endfor %}",
         TEXT),
        # Calls, or the content of a role of their own, as in a template for Mistral.
        ("{% for message in messages %}{% if message.calls %}{% set calls = message.calls %}{% else %}"
         "{% set calls = message.content %}{% endif %}{{ message.content }}"
         "{% for call in calls %}{{ call.function }}{{ call['id'] }}{% endfor %}{% endfor %}", TEXT),
        ("{{ broken", TEXT),
    ],
)  # fmt: skip
def test_forms_that_a_template_reads(template: str, form: ContentFormat) -> None:
    assert content_format(template) == form


def test_the_template_of_qwen3_reads_text(qwen3: Tokenizer) -> None:
    assert content_format(qwen3.chat_template()) == TEXT
    expected = qwen3.hf.apply_chat_template([{"role": "user", "content": "A\nB\nC"}], tokenize=False)
    parts = [{"role": "user", "content": PARTS}]
    assert render_chat(qwen3, parts, None, {"add_generation_prompt": False}) == expected


@pytest.mark.parametrize(
    ("template", "of_parts", "of_text"),
    [(STRING, "user:A\nB\nC", "user:D"), (LOOP, "[A][B][C]", "[D]"), (EITHER, "[A][B][C]", "D"),
     (MACRO, "[A][B][C]", "D"), (NAMED, "[A][B][C]", "[D]")],
)  # fmt: skip
def test_contents_have_a_form_that_the_template_reads(template: str, of_parts: str, of_text: str) -> None:
    assert render(template, [{"role": "user", "content": PARTS}]) == of_parts
    assert render(template, [{"role": "user", "content": tuple(PARTS)}]) == of_parts
    assert render(template, [{"role": "user", "content": "D"}]) == of_text
    assert render(template, [{"role": "user", "content": None}]) == of_parts[: of_parts.index("A")].rstrip("[")


def test_parts_are_not_rebuilt() -> None:
    part = {"z": 1, "text": "A", "type": "text", "cache_control": {"type": "ephemeral"}}
    template = LOOP + "{{ messages | tojson }}"
    assert render(template, [{"role": "user", "content": [part]}]).endswith(json.dumps([part]) + "}]")


def test_the_result_of_a_tool_is_text() -> None:
    """Templates that loop over what a user has sent print a result as it is."""
    template = EITHER + "{{ messages[-1].content }}"
    assert render(template, [USER, {"role": "tool", "content": PARTS}]).endswith("A\nB\nC")


# Refusals


@pytest.mark.parametrize(
    ("message", "words", "param"),
    [
        *(({"role": "user", "content": [*ONE_PART, {"type": kind}]}, f"messages[1] has a part of type '{kind}'",
           "messages[1].content") for kind in ("image_url", "image", "input_audio", "video_url", "file")),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1] has a part of type 'text' without 'text'",
         "messages[1].content"),
        ({"role": "user", "content": ["A"]}, "Expected `object`, got `str`", "messages[1].content[0]"),
        ({"role": "user", "content": {"a": 1}}, "got `object`", "messages[1].content"),
        ({"role": "user", "content": "A", "name": 5}, "got `int`", "messages[1].name"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "`name`", "messages[1].tool_calls[0].function"),
        ({"content": "A"}, 'messages[1] must be a dict with a "role"', "messages[1]"),
        ("A", "messages[1] must be a dict", "messages[1]"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_message(message: Any, words: str, param: str) -> None:
    with pytest.raises(RequestError) as error:
        render(STRING, [USER, message])
    assert words in str(error.value) and error.value.param == param


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([TOOLS[0], {"type": "function"}], "tools[1]"),
        ([{"type": "function", "function": {"name": 5}}], "tools[0].function.name"),
        ([{"type": "custom", "function": {"name": "f"}}], "tools"),
        (TOOLS[0], "tools"),
        ([print], "tools[0]"),
    ],
    ids=str,
)
def test_malformed_tools_are_refused(tools: Any, param: str) -> None:
    with pytest.raises(RequestError) as error:
        render_chat(byte_level("chat"), [USER], tools, {})
    assert error.value.param == param


def test_no_template() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        render_chat(byte_level("plain"), [USER], None, {})
    with pytest.raises(RequestError, match="text of a Jinja template"):
        render_chat(byte_level("plain"), [USER], None, {"chat_template": 5})
    with pytest.raises(RequestError, match="cannot render these messages"):
        render("{{ broken", [USER])


@pytest.mark.parametrize("name", ["messages", "conversation", "tokenize", "return_dict", "return_tensors"])
def test_names_that_are_not_for_the_template(name: str) -> None:
    with pytest.raises(RequestError, match=f"chat_template_kwargs may not have '{name}'"):
        render_chat(byte_level("chat"), [USER], None, {name: True})
