"""Each tool parser: what a chat template writes comes back as the same calls, however the text is cut."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvllm.chat_messages import FunctionDefinition, render_chat
from kvllm.engine_args import EngineArgs
from kvllm.entrypoints.serve import add_arguments, read_options
from kvllm.errors import ConfigError
from kvllm.serving.harmony import HarmonyReasoningParser
from kvllm.serving.parser_choice import THOUGHT_MARKERS, TOOL_MARKERS, chosen_parser, with_parsers
from kvllm.serving.reasoning import ReasoningParser, thought_tags
from kvllm.serving.state import ServerOptions
from kvllm.serving.tool_choice import ToolChoice, calls_grammar
from kvllm.serving.tool_parsers import TOOL_PARSERS, HermesParser, ToolParser, tool_parser
from kvllm.tokenizer import load_tokenizer
from tests.helpers.parrot_chat import make_parrot_chat

FIELDS = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "exact": {"type": "boolean"},
    "size": {"type": ["number", "null"]},
    "tags": {"type": "array"},
    "more": {"type": "object"},
    "unit": {"enum": ["C", "F"]},
}
WEATHER = FunctionDefinition(name="get_weather", parameters={"type": "object", "properties": FIELDS})
TIME = FunctionDefinition(name="get_time", parameters={"type": "object", "properties": {"zone": {"type": "string"}}})
FUNCTIONS = (WEATHER, TIME)
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "Paris", "days": 3, "exact": True, "size": -1.5, "unit": "C"}),
    (
        "get_weather",
        {"city": "a \"b\" \\ 'c'\nd é 🙂 </x> {[(,:=", "size": None, "tags": ["a", 1], "more": {"k": [{}]}},
    ),
    ("get_time", {}),
]

# Templates of an assistant's message, as the models have them. FENCED is DeepSeek V3's, and LISTED old Mistral's.
LOOP = "{%% for call in calls %%}%s{%% endfor %%}"
OBJECT = '{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}'
FENCED = (
    "<｜tool▁calls▁begin｜>{% for call in calls %}{% if not loop.first %}\n{% endif %}<｜tool▁call▁begin｜>function"
    "<｜tool▁sep｜>{{ call.name }}\n```json\n{{ call.arguments | tojson }}\n```<｜tool▁call▁end｜>{% endfor %}"
    "<｜tool▁calls▁end｜>"
)
PLAIN = (
    "<｜tool▁calls▁begin｜>{% for call in calls %}<｜tool▁call▁begin｜>{{ call.name }}<｜tool▁sep｜>"
    "{{ call.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"
)
LISTED = (
    '[TOOL_CALLS] [{% for call in calls %}{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}, '
    '"id": "abcdefghi"}{% if not loop.last %}, {% endif %}{% endfor %}]'
)
XML = (
    "{% for call in calls %}\n<tool_call>\n<function={{ call.name }}>\n{% for key, value in call.arguments | items %}"
    "<parameter={{ key }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}"
)
HARMONY = (
    "{% for call in calls %}{% if not loop.first %}<|start|>assistant{% endif %}<|channel|>commentary to=functions."
    "{{ call.name }} <|constrain|>json<|message|>{{ call.arguments | tojson }}<|call|>{% endfor %}"
)
HARMONY_START = (
    "{% for call in calls %}{% if not loop.first %}<|start|>assistant{% endif %} to=functions.{{ call.name }}"
    "<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>{% endfor %}"
)
PYTHON = (
    "[{% for call in calls %}{{ call.name }}({% for key, value in call.arguments | items %}{{ key }}={{ value | repr }}"
    "{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]"
)
GEMMA = (
    "{% macro literal(value) %}{% if value is string %}Q{{ value }}Q{% elif value is mapping %}{ {%- for k, v in value "
    "| items %}{{ k }}:{{ literal(v) }}{% if not loop.last %},{% endif %}{% endfor -%} }{% elif value is sequence %}["
    "{% for v in value %}{{ literal(v) }}{% if not loop.last %},{% endif %}{% endfor %}]{% else %}{{ value | tojson }}"
    "{% endif %}{% endmacro %}{% for call in calls %}BEGINcall:{{ call.name }}{{ literal(call.arguments) }}END"
    "{% endfor %}"
)
OLD = GEMMA.replace("Q", "<escape>").replace("BEGIN", "<start_function_call>").replace("END", "<end_function_call>")
NEW = GEMMA.replace("Q", '<|"|>').replace("BEGIN", "<|tool_call>").replace("END", "<tool_call|>")
TEMPLATES = {
    "deepseek_v3": [FENCED],
    "deepseek_v31": [PLAIN],
    "functiongemma": [OLD],
    "gemma4": [NEW],
    "hermes": [LOOP % f"<tool_call>\n{OBJECT}\n</tool_call>\n",
               LOOP % '<tool_call>{"parameters": {{ call.arguments | tojson }}, "name": "{{ call.name }}"}</tool_call>',
               LOOP % f"<tool_call>{OBJECT.replace('arguments', 'parameters', 1)}</tool_call>",
               LOOP % f"<tool_call>{OBJECT.replace('tojson', 'tojson | tojson')}</tool_call>"],
    "llama3_json": [LOOP % (OBJECT.replace("arguments", "parameters", 1) + '{{ "" if loop.last else "; " }}'),
                    LOOP % ('<|python_tag|>{"type": "function", ' + OBJECT[1:].replace("arguments", "parameters", 1))],
    "mistral": [LISTED, LOOP % "[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments | tojson }}",
                LOOP % "[TOOL_CALLS]{{ call.name }}{{ call.arguments | tojson }}",
                LOOP % "[TOOL_CALLS]{{ call.name }}[CALL_ID]abcdefghi[ARGS]{{ call.arguments | tojson }}"],
    "openai": [HARMONY, HARMONY_START],
    "pythonic": [PYTHON, f"<|python_start|>{PYTHON}<|python_end|>"],
    "qwen3_coder": [XML, XML.replace("<tool_call>\n", ""), XML.replace("</parameter>\n", "")],
}  # fmt: skip
FORMS = [(name, template) for name, templates in TEMPLATES.items() for template in templates]
IDS = [f"{name}-{number}" for name, templates in TEMPLATES.items() for number in range(len(templates))]
LOOKALIKES = [
    '{"a": 1} and { "name',
    '{"name": "Bob", "parameters": {"x": {"y": 1}}} x',
    "[see] [f](x) [get_time (1)] [get_time() for x] [1, 2]",
    "<tool_call>no</tool_call> <tool_call",
    "a < b <function> <function=x\n>",
    "[TOOL_CALLS]: a list, {x}",
    "<start_function_call>call me {x}",
    "<|tool_call>is a tag {}",
    "`get_time()` gives ```json\n{}\n```",
]


def render(template: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(keep_trailing_newline=True)
    environment.filters |= {"repr": repr, "tojson": lambda value: json.dumps(value, ensure_ascii=False)}
    return environment.from_string(template).render(calls=[{"name": name, "arguments": each} for name, each in calls])


def read(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The text, and the calls as a client adds up their deltas."""
    text, calls = "", []
    for new, deltas in [*map(parser.push, pieces), parser.finish()]:
        text += new
        for delta in deltas:
            if delta.id:
                assert delta.index == len(calls)
                calls.append([delta.function.name, ""])
            calls[delta.index][1] += delta.function.arguments
    return text, [tuple(call) for call in calls]


def parse(name: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    """What the whole text gives, and its characters give, too."""
    whole = read(tool_parser(name)(FUNCTIONS), [text])
    assert read(tool_parser(name)(FUNCTIONS), list(text)) == whole
    return whole


def values(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


def surrounded(name: str, text: str) -> tuple[str, str]:
    """A text with others in front of it and after it, and what is left of these."""
    if name == "openai":
        start, final = "<|start|>assistant", "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
        return f"<|channel|>commentary<|message|>Sure.<|end|>{start}{text}{final}", "Sure.Done."
    return f"Sure.\n{text} Done.", "Sure. Done."


@pytest.mark.parametrize(("name", "template"), FORMS, ids=IDS)
def test_what_a_template_writes_comes_back(name: str, template: str) -> None:
    text = render(template, CALLS)
    left, calls = parse(name, text)
    assert (left.strip(), values(calls)) == ("", CALLS)
    longer, rest = surrounded(name, text.strip("\n"))
    left, calls = parse(name, longer)
    assert (left, values(calls)) == (rest, CALLS)


@pytest.mark.parametrize(("name", "template"), FORMS, ids=IDS)
def test_a_call_that_is_cut_off(name: str, template: str) -> None:
    """At any place: what came of the calls is the beginning of what comes of the whole text."""
    text = render(template, CALLS[:2])
    whole = parse(name, text)[1]
    longest = 0
    for end in range(len(text)):
        _, calls = read(tool_parser(name)(FUNCTIONS), [text[: end // 2], text[end // 2 : end]])
        assert [call[0] for call in calls] == [call[0] for call in whole[: len(calls)]]
        assert calls[:-1] == whole[: len(calls)][:-1]
        if calls:
            assert whole[len(calls) - 1][1].startswith(calls[-1][1])
            longest = max(longest, len(calls[0][1]) if len(calls) == 1 else 0)
    assert longest > len(whole[0][1]) // 2


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_what_only_looks_like_a_call_stays_text(name: str) -> None:
    for text in LOOKALIKES:
        assert parse(name, text) == (text, [])


@pytest.mark.parametrize(("name", "template"), FORMS, ids=IDS)
def test_a_call_that_is_none_hides_no_other(name: str, template: str) -> None:
    """A tag with words after it stays text, and the call that follows is read."""
    text = render(template, CALLS[:1]).strip("\n")
    tags = tool_parser(name).tags
    if not tags or not text.startswith(tags):
        pytest.skip("has no tag in front of calls")
    begin = max((tag for tag in tags if text.startswith(tag)), key=len)
    assert values(parse(name, f"{begin}no call here {text}")[1]) == CALLS[:1]


def test_the_word_in_front_of_a_name_may_be_missing() -> None:
    assert parse("gemma4", "<|tool_call>:get_time{hour:5}<tool_call|>") == ("", [("get_time", '{"hour": 5}')])


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=50)
@given(data=st.data())
def test_any_cut_of_any_text(name: str, data: st.DataObject) -> None:
    """No text raises an error, and where it is cut makes no difference."""
    text = "".join(data.draw(st.lists(st.sampled_from(_pieces(name)), max_size=15)))
    parse(name, text)


@cache
def _pieces(name: str) -> list[str]:
    """Calls, parts of calls, and words."""
    texts = [render(template, CALLS[:2]) for template in TEMPLATES[name]]
    parts = [text[start : start + 13] for text in texts for start in range(0, len(text), 13)]
    words = ["\n", " ", "a", "é", '"', "'", "\\", "{", "}", "[", "]", "(", ")", ",", ";", ":", "=", "<", "get_time()"]
    return [*parts, *words, *texts, *tool_parser(name).tags, *LOOKALIKES]


@pytest.mark.parametrize(("tokenizer", "name"), [("Qwen3", "hermes"), ("Llama-3.2", "llama3_json")])
def test_templates_of_models(tokenizer: str, name: str, shared_dir: Path) -> None:
    loaded = load_tokenizer(shared_dir / "data" / "tokenizers" / tokenizer)
    calls = CALLS[:1] if tokenizer == "Llama-3.2" else CALLS  # its template takes one
    functions = [{"function": {"name": called, "arguments": arguments}} for called, arguments in calls]
    messages = [{"role": "user", "content": "Hi"}]
    prompt = render_chat(loaded, messages, None, {"add_generation_prompt": True})
    answer = {"role": "assistant", "content": "", "tool_calls": functions}
    text = render_chat(loaded, [*messages, answer], None, {"add_generation_prompt": False}).removeprefix(prompt)
    text = text.split("<|im_end|>")[0].split("<|eot_id|>")[0].split("</think>")[-1]
    left, found = parse(name, text)
    assert (left.strip(), values(found)) == ("", calls)
    template = loaded.chat_template(None, [{}])
    assert chosen_parser("--tool-call-parser", template, TOOL_MARKERS) == name


def test_values_of_xml_take_their_types_from_the_schema() -> None:
    def value(key: str, text: str) -> Any:
        called = f"<tool_call><function=get_weather><parameter={key}>{text}</parameter></function></tool_call>"
        return values(parse("qwen3_coder", called)[1])[0][1][key]

    assert [value("city", "5"), value("days", "5"), value("other", "5")] == ["5", 5, "5"]
    assert [value("exact", "True"), value("size", "null"), value("size", "2.5")] == [True, None, 2.5]
    assert [value("tags", "['a', 1]"), value("more", '{"a": 1}'), value("days", "many")] == [["a", 1], {"a": 1}, "many"]
    missing = "<function=get_weather><parameter=city>\n<parameter=unit>C"
    assert parse("qwen3_coder", missing) == ("", [("get_weather", '{"city": "", "unit": "C')])
    odd = FunctionDefinition(name="odd", parameters={"properties": {"a": {"type": [{"type": "string"}, "integer"]}}})
    called = "<tool_call><function=odd><parameter=a>5</parameter></function></tool_call>"
    assert read(tool_parser("qwen3_coder")([odd]), [called]) == ("", [("odd", '{"a": 5}')])
    python = FunctionDefinition(name="odd", parameters={"properties": {"a": {"type": ["str", "float"]}}})
    assert read(tool_parser("qwen3_coder")([python]), [called.replace("5", "3.5")])[1] == [("odd", '{"a": 3.5}')]
    assert value("city", "\n\n  x\n</function\n\n") == "\n  x\n</function\n"


def test_python_literals() -> None:
    text = r"""[get_weather(city='it\'s \x41\u00e9\n', tags=("a", {'k': None, 1: -2e3},), more={}, days=0x)]"""
    (call,) = parse("pythonic", text)[1]
    assert json.loads(call[1]) == {
        "city": "it's Aé\n", "tags": ["a", {"k": None, "1": -2000.0}], "more": {}, "days": "0x"}  # fmt: skip


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ('"""a\n"b\\n"""', 'a\n"b\n'),
        ("'''it's'''", "it's"),
        ('""', ""),
        ('r"\\d"', "\\d"),
        ("f'x'", "x"),
        (".5", 0.5),
        ("+5", 5),
        ("0x1F", 31),
    ],
)
def test_strings_and_numbers_of_python(literal: str, value: Any) -> None:
    content, [(_, arguments)] = parse("pythonic", f"[get_weather(city={literal}, days=1)]")
    assert not content and json.loads(arguments) == {"city": value, "days": 1}


def test_arguments_in_a_string_are_cut_off_as_text() -> None:
    cut = '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"x\\u00'
    assert parse("hermes", cut) == ("", [("f", '{"a": "x')])


# Thoughts


def thought(name: str, text: str, keeps_form: bool = False) -> tuple[str, str]:
    tags = thought_tags(name)

    def split(pieces: list[str]) -> tuple[str, str]:
        is_harmony = name == "openai_gptoss"
        parser = HarmonyReasoningParser(False, keeps_form) if is_harmony else ReasoningParser(tags, False)
        found = [*map(parser.push, pieces), parser.finish()]
        return "".join(each for each, _ in found), "".join(each for _, each in found)

    assert split(list(text)) == split([text])
    return split([text])


def test_thoughts_of_other_models() -> None:
    assert thought("mistral", "[THINK]Hm.[/THINK]Hi.") == ("Hm.", "Hi.")
    assert thought("seed_oss", "<seed:think>Hm.</seed:think>Hi.") == ("Hm.", "Hi.")
    assert thought("tags:<a>,</a>", "<a>Hm.</a>Hi.") == ("Hm.", "Hi.")
    for name in ("tags:", "tags:<a>", "tags:,b"):
        with pytest.raises(ConfigError, match="tags:START,END"):
            thought_tags(name)


def test_harmony() -> None:
    start = "<|start|>assistant"
    call = f"{start} to=functions.f<|channel|>commentary json<|message|>{{}}<|call|>"
    text = f"<|channel|>analysis<|message|>Hm.<|end|>{start}<|channel|>final<|message|>Hi <|x|>.<|return|>"
    assert thought("openai_gptoss", text) == ("Hm.", "Hi <|x|>.")
    assert thought("openai_gptoss", "<|channel|>analysis<|message|>Hm.<|end|>{}") == ("Hm.", "{}")
    assert thought("openai_gptoss", "plain text, to=you") == ("", "plain text, to=you")
    assert thought("openai_gptoss", "to=you, plain text") == ("", "to=you, plain text")
    for length in range(1, call.index("{") - len(start)):  # the header alone, cut off anywhere, is neither
        assert thought("openai_gptoss", call.removeprefix(start)[:length])[1].strip() in ("", "t", "to")
    twice = f"<|channel|>analysis<|message|>A<|end|>{call}{start}<|channel|>analysis<|message|>B"
    reasoning, rest = thought("openai_gptoss", twice, keeps_form=True)
    assert (reasoning, read(tool_parser("openai")(), [rest])) == ("AB", ("", [("f", "{}")]))


# The choice of parsers, and forced calls


def test_the_chat_template_chooses_the_parser() -> None:
    for name in (
        "deepseek_v3",
        "deepseek_v31",
        "functiongemma",
        "gemma4",
        "hermes",
        "mistral",
        "openai",
        "qwen3_coder",
    ):
        assert chosen_parser("--tool-call-parser", TEMPLATES[name][0], TOOL_MARKERS) == name
    for template, name in (("<think>", "qwen3"), ("[THINK]", "mistral"), (f"analysis{HARMONY}", "openai_gptoss")):
        assert chosen_parser("--reasoning-parser", template, THOUGHT_MARKERS) == name
    for template in (None, "", "{{ messages }}", "<tool_call><arg_key>"):
        with pytest.raises(ConfigError, match="--tool-call-parser auto cannot choose.*hermes"):
            chosen_parser("--tool-call-parser", template, TOOL_MARKERS)


def test_auto_reads_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_parrot_chat(tmp_path)
    args, names = EngineArgs(model=tmp_path), ("parrot",)
    with caplog.at_level("INFO"):
        assert with_parsers(ServerOptions(names, reasoning_parser="auto"), args).reasoning_parser == "qwen3"
    assert "--reasoning-parser qwen3: the chat template has <think>" in caplog.text
    wanted = ServerOptions(names, enable_auto_tool_choice=True)
    with pytest.raises(ConfigError, match="--tool-call-parser auto cannot choose"):
        with_parsers(wanted, args)
    given = replace(wanted, chat_template=TEMPLATES["mistral"][0])
    assert with_parsers(given, args).tool_call_parser == "mistral"
    named = replace(wanted, tool_call_parser="pythonic")
    assert with_parsers(named, args) == named


def test_unknown_parsers() -> None:
    for flag in ("--tool-call-parser", "--reasoning-parser"):
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        with pytest.raises(ConfigError, match="'other' is not known.*mistral"):
            read_options(parser.parse_args([flag, "other"]))


def accepts(grammar: str, text: str) -> bool:
    """Whether a text obeys a grammar as a whole."""
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("name", TEMPLATES)
def test_forced_calls_have_the_form_that_is_read(name: str) -> None:
    parser = tool_parser(name) if tool_parser(name).form else HermesParser
    grammar = calls_grammar(ToolChoice(True, FUNCTIONS, functions=FUNCTIONS, parser=parser), lambda text: None)
    form = parser.form
    assert form is not None
    forced = CALLS[:1] if form.one else [CALLS[0], CALLS[2]]
    texts = []
    for called, arguments in forced:
        inside = arguments if form.key is None else {"name": called, form.key: arguments}
        texts.append(form.start.replace("{name}", called) + json.dumps(inside) + form.end)
    text = form.first + form.between.join(texts) + form.last
    assert accepts(grammar, text) and accepts(grammar, form.opening + text)
    assert not accepts(grammar, text.replace("get_weather", "get_whether"))
    left, calls = read(parser(FUNCTIONS), [form.opening + text])
    assert (left, values(calls)) == ("", forced)


def test_tags_in_a_forced_call_are_tokens() -> None:
    ids = {"[TOOL_CALLS]": 5, "[ARGS]": 6}
    choice = ToolChoice(True, FUNCTIONS, functions=FUNCTIONS, parser=tool_parser("mistral"))
    grammar = calls_grammar(choice, ids.get)
    assert 'call_0: <[5]> "get_weather" <[6]> tool_0' in grammar
    assert "<[5]>" in calls_grammar(choice, {"[TOOL_CALLS]": 5}.get)
