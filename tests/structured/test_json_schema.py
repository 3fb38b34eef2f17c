"""JSON schemas: what their grammars accept is what the standard accepts, as far as it can be enforced."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import jsonschema
import pytest

from kvllm import RequestError, StructuredOutputsParams
from kvllm.chat_messages import FunctionDefinition
from kvllm.serving.errors import ApiError
from kvllm.serving.tool_choice import ToolChoice, calls_grammar, with_usable_schemas
from kvllm.structured import json_schema
from kvllm.structured.checker import GrammarChecker
from kvllm.structured.compile import Grammars
from kvllm.structured.token_sets import unpack
from kvllm.structured.vocabulary import Vocabulary

pytest.importorskip("llguidance", reason="needs llguidance: pip install llguidance")

END = 256
BYTES = Vocabulary(None, [*(bytes([byte]) for byte in range(256)), b"<end>"], {}, [END], [END], 257)
GRAMMARS = Grammars(lambda: BYTES, [END], max_kept=1000)


def accepts(rule: StructuredOutputsParams, text: str) -> bool:
    """Whether a rule lets a model write a text and end there."""
    matcher, output = GRAMMARS.matcher(rule), list[int]()
    for byte in [*text.encode(), END]:
        if not unpack(matcher.allowed(output))[byte]:
            return False
        output.append(byte)
    return True


def rules(schema: dict[str, Any]) -> list[tuple[StructuredOutputsParams, str]]:
    """A schema alone, in a user's grammar, and as that of one of three tools; with what is around its text there."""
    other = FunctionDefinition(name="other", parameters={"$defs": {"q": {}}, "properties": {"a": {"$ref": "#"}}})
    tools = (other, FunctionDefinition(name='w"ü\n', parameters=schema), FunctionDefinition(name="bare"))
    name = json.dumps('w"ü\n', ensure_ascii=False)
    call = f'<tool_call>\n{{"name": {name}, "arguments": %s}}\n</tool_call>'
    return [
        (StructuredOutputsParams(json=schema), "%s"),
        (StructuredOutputsParams(grammar=f"start: answer\nanswer: %json {json.dumps(schema)}"), "%s"),
        (StructuredOutputsParams(grammar=calls_grammar(ToolChoice(True, tools), lambda _: None)), call),
    ]


TREE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "left": {"$ref": "#"}},
    "required": ["value"],
    "additionalProperties": False,
}
NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def number(reference: str, **siblings: Any) -> dict[str, Any]:
    return {**NUMBER, "properties": {"a": {"$ref": reference}}, **siblings}


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (TREE, [{"value": 1, "left": {"value": 2, "left": {"value": 3}}}, {"value": 1, "left": {"name": "other"}},
                {"value": 1, "left": {"name": "other", "arguments": {"value": 1}}}]),
        (number("#/$defs/q", **{"$defs": {"q": {"type": "integer"}}}), [{"a": 1}, {"a": "1"}]),
        (number("#/definitions/q", definitions={"q": {"type": "integer"}}), [{"a": 1}, {"a": "1"}]),
        (number("#/$defs/r", **{"$defs": {"r": {"$ref": "#/definitions/q"}}}, definitions={"q": {"type": "integer"}}),
         [{"a": 1}, {"a": "1"}]),
        (number("#five", **{"$defs": {"q": {"$anchor": "five", "type": "integer"}}}), [{"a": 1}, {"a": "1"}]),
        (number("weather#/$defs/q", **{"$id": "http://a.b/weather", "$defs": {"q": {"type": "integer"}}}),
         [{"a": 1}, {"a": "1"}]),
        (number("#/$defs/q", **{"$id": "urn:a:b", "$defs": {"q": {"type": "integer"}}}), [{"a": 1}, {"a": "1"}]),
        ({"type": "object", "properties": {"b": {"type": "integer"}, "a": {"$ref": "#/properties/b"}},
          "required": ["b", "a"]}, [{"b": 1, "a": 2}, {"b": 1, "a": "2"}, {"b": 1, "a": {"name": 1}}]),
        (number("#/components/x~1y%20z", components={"x/y z": {"type": "integer", "format": "int32"}}),
         [{"a": 1}, {"a": "1"}]),
    ],
)  # fmt: skip
def test_references_begin_at_the_root_of_their_own_schema(schema: dict[str, Any], values: list[Any]) -> None:
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    expected = [validator.is_valid(value) for value in values]
    assert expected == [True] + [False] * (len(values) - 1)
    for rule, around in rules(schema):
        assert [accepts(rule, around % json.dumps(value)) for value in values] == expected, around


A = {"type": "object", "properties": {"kind": {"const": "a"}, "x": {"type": "integer"}}, "required": ["kind"]}
B = {"type": "object", "properties": {"kind": {"$ref": "#/$defs/C"}, "y": {"type": "integer"}}, "required": ["kind"]}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "format": "password", "pattern": "^a+$"}, "aa", "ab"),
        ({"type": "string", "format": "binary", "maxLength": 2.0}, "aa", "aaa"),
        ({"type": "string", "format": "date"}, "2026-01-02", "2026-13-02"),
        ({"type": "integer", "format": "int32"}, 5, "5"),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False, "unevaluatedItems": {}}, [1], ["1"]),
        ({"type": "array", "items": {"type": "integer"}, "minContains": 2}, [], ["1"]),
        ({"type": "integer", "then": {"minimum": 5}, "not": False, "nullable": True, "example": 5}, 5, None),
        ({"$schema": "http://odd/", "$id": "a b", "type": "integer"}, 5, None),
        ({"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "discriminator": {"propertyName": "kind"},
          "$defs": {"A": A, "B": B, "C": {"enum": ["b", "c"]}}}, {"kind": "c", "y": 1}, {"kind": "b", "y": "1"}),
    ],
)  # fmt: skip
def test_what_asks_for_nothing_more_is_fine_in_strict_schemas_too(
    schema: dict[str, Any], right: Any, wrong: Any
) -> None:
    for given in (schema, json_schema.with_options(schema, strict=True)):
        assert json_schema.enforceable(json.loads(json.dumps(given))) == []
        assert accepts(StructuredOutputsParams(json=given), json.dumps(right))
        assert not accepts(StructuredOutputsParams(json=given), json.dumps(wrong))


TEXT = {"type": "string"}
OBJECT = {"type": "object"}


@pytest.mark.parametrize("pattern", ["^a$", "^(a)$", "^(?:b|a)$"])
def test_a_pattern_of_names_that_are_known_promises_no_further_property(pattern: str) -> None:
    """A comma after the last one would be followed by nothing that fits."""
    number = {"type": "integer", "multipleOf": 5}
    schema = {**OBJECT, "properties": {"a": number, "b": number}, "required": ["a", "b"], "additionalProperties": False}
    rule = StructuredOutputsParams(json={**schema, "patternProperties": {pattern: {"minimum": 10}}})
    assert accepts(rule, '{"a": 15, "b": 20}') and not accepts(rule, '{"a": 5, "b": 20}')
    allowed = unpack(GRAMMARS.matcher(rule).allowed(list(b'{"a": 15, "b": 20')))
    assert allowed[ord("}")] and not allowed[ord(",")]


@pytest.mark.parametrize(
    ("schema", "left_out", "right", "wrong"),
    [
        ({"type": "array", "items": TEXT, "uniqueItems": True}, "uniqueItems", ["a"], [1]),
        ({**OBJECT, "propertyNames": {"pattern": "^a"}}, "propertyNames", {"a": 1}, []),
        ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 3}, "minContains": 2}, "contains",
         [3, 3], ["3"]),
        ({**TEXT, "not": {"const": "a"}}, "not", "b", 1),
        ({**TEXT, "if": {"minLength": 2}, "then": {"pattern": "^a"}, "else": {}}, "if", "ab", 1),
        ({**OBJECT, "dependentRequired": {"a": ["b"]}}, "dependentRequired", {"a": 1, "b": 2}, 1),
        ({**OBJECT, "properties": {"a": TEXT}, "unevaluatedProperties": False}, "unevaluatedProperties", {"a": "b"},
         {"a": 1}),
        ({**TEXT, "pattern": "^(?=.*[0-9])[a0-9]+$", "maxLength": 3}, "pattern", "a1", "aaaa"),
        ({**OBJECT, "properties": {"a": TEXT, "b": TEXT}, "minProperties": 1}, "minProperties", {"b": "x"}, {"b": 1}),
        ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]}, "oneOf", 3, "x"),
        ({**OBJECT, "patternProperties": {"^a": TEXT, "b$": {"maxLength": 2}}, "additionalProperties": False},
         "patternProperties", {"ab": "x"}, {"c": "x"}),
        ({**OBJECT, "patternProperties": {"^(?!x)": TEXT}, "additionalProperties": False}, "patternProperties",
         {"a": "b"}, {"a": 1}),
        ({**OBJECT, "patternProperties": {"^(?!x)": TEXT}}, "patternProperties", {"x": 1}, 1),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_left_out_or_refused(
    schema: dict[str, Any], left_out: str, right: Any, wrong: Any
) -> None:
    assert jsonschema.Draft202012Validator(schema).is_valid(right)
    inside = {"type": "object", "properties": {"p": {"$ref": "#/$defs/q"}}, "required": ["p"], "$defs": {"q": schema}}
    assert json_schema.enforceable(json.loads(json.dumps(inside))) == [f"{left_out} at #/$defs/q"]
    for rule, around in rules(inside):
        assert accepts(rule, around % json.dumps({"p": right}))
        assert not accepts(rule, around % json.dumps({"p": wrong}))
    strict = StructuredOutputsParams(json=json_schema.with_options(inside, strict=True))
    with pytest.raises(RequestError, match=f"{left_out} at #/\\$defs/q"):
        GRAMMARS.compile(strict)


@pytest.mark.parametrize(("key", "place"), [("allOf", "#/allOf/0"), ("$ref", "#/$defs/q"), (None, "#")])
def test_bounds_that_merges_make_unenforceable(key: str | None, place: str) -> None:
    bounded, named = {**OBJECT, "minProperties": 1}, {"properties": {"a": TEXT}}
    schema = {
        "allOf": {"allOf": [bounded, named]},
        "$ref": {"$ref": "#/$defs/q", **named, "$defs": {"q": bounded}},
        None: {**bounded, "allOf": [named]},
    }[key]
    assert json_schema.enforceable(json.loads(json.dumps(schema))) == [f"minProperties at {place}"]
    assert accepts(StructuredOutputsParams(json=schema), '{"a": "b"}')
    assert not accepts(StructuredOutputsParams(json=schema), '{"a": 1}')


@pytest.mark.parametrize(
    "grammar", ['start: "%json {}"', "start: /%json [{]}/", 'start: "a" // %json {}', "start: %json {"]
)
def test_text_that_looks_like_a_schema_stays(grammar: str) -> None:
    rule = StructuredOutputsParams(grammar=grammar)
    if grammar.endswith("{"):
        with pytest.raises(RequestError, match="cannot be compiled"):
            GRAMMARS.compile(rule)
    else:
        assert accepts(rule, "a" if "//" in grammar else "%json {}")


@pytest.fixture(scope="module")
def checker() -> Any:
    checker = GrammarChecker(GRAMMARS, samples_here=False)
    yield checker
    checker.close()


def test_the_log_says_once_what_is_left_out(checker: GrammarChecker, caplog: pytest.LogCaptureFixture) -> None:
    rule = StructuredOutputsParams(json={"type": "array", "items": {"type": "integer"}, "uniqueItems": True})
    with caplog.at_level(logging.WARNING, "kvllm.structured.checker"):
        checker.check(rule)
        checker.check(rule)
    assert [record.getMessage() for record in caplog.records] == [
        "structured outputs do not enforce all of a JSON schema: 'uniqueItems at #'"
    ]


@pytest.mark.parametrize("strict", [True, False])
def test_half_a_character_does_not_end_the_process_that_tries_rules(checker: GrammarChecker, strict: bool) -> None:
    schema = {"properties": {"\ud83d": {"not": {}}}, "x-guidance": {"lenient": not strict}}
    for rule in ({"json": json.dumps(schema)}, {"grammar": f"start: %json {json.dumps(schema)}"}):
        with pytest.raises(RequestError, match="half a surrogate pair"):
            checker.check(StructuredOutputsParams(**rule))


BROKEN = {"type": "object", "properties": {"a": {"$ref": "http://a.b/c"}}}


def usable(checker: GrammarChecker, choice: ToolChoice) -> ToolChoice:
    async def check(rule: StructuredOutputsParams) -> None:
        checker.check(rule)

    return asyncio.run(with_usable_schemas(choice, check, lambda _: None))


def test_a_tool_that_cannot_be_compiled_takes_any_object(
    checker: GrammarChecker, caplog: pytest.LogCaptureFixture
) -> None:
    untyped = {name: value for name, value in NUMBER.items() if name != "type"}  # arguments are an object all the same
    tools = (FunctionDefinition(name="odd", parameters=BROKEN), FunctionDefinition(name="fine", parameters=untyped))
    choice = usable(checker, ToolChoice(True, tools))
    assert choice.must_call[1] is tools[1] and "odd" in caplog.text and "http://a.b/c" in caplog.text
    rule = StructuredOutputsParams(grammar=calls_grammar(choice, lambda _: None))
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    values = [("odd", {"b": 1}), ("fine", {"a": 1}), ("odd", 5), ("fine", {"b": 1}), ("fine", 5)]
    found = [accepts(rule, call % (name, json.dumps(value))) for name, value in values]
    assert found == [True, True, False, False, False]


@pytest.mark.parametrize(("strict", "named"), [(True, False), (None, True)])
def test_a_strict_or_named_tool_that_cannot_be_compiled_is_refused(
    checker: GrammarChecker, strict: bool | None, named: bool
) -> None:
    odd = FunctionDefinition(name="odd", parameters=BROKEN, strict=strict)
    with pytest.raises(ApiError, match="odd"):
        usable(checker, ToolChoice(True, (odd,), named))
