"""StructuredOutputsParams to the grammar that llguidance compiles."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from kvllm.errors import RequestError
from kvllm.structured.json_schema import OPTIONS, enforceable
from kvllm.structured_outputs import StructuredOutputsParams

MAX_CHARACTERS = 2**18
MAX_DEPTH = 100
# A space, or a line break with an indentation. With more freedom, small models write nothing else until they are cut
# off.
WHITE_SPACE = r"(\n {0,40}| )?"
CLASSES = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[A-Za-z0-9_]", r"\W": "[^A-Za-z0-9_]"}
ESCAPE_OR_DASH = re.compile(r"\\.|(?<!-)-(?=\\[dDwW])", re.DOTALL)
"""The dash in front of a class is one: it would take the bracket of what stands for the class as the end of a range."""
LARK_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|/(?:[^/\\\n]|\\.)+/|%json\s*')
"""What may hold anything, and what is in front of a JSON schema."""


class Grammar(NamedTuple):
    """text: in llguidance's JSON. not_enforced: keywords of JSON schemas that are left out, with their places."""

    text: str
    not_enforced: list[str]


def to_grammar(rule: StructuredOutputsParams, token_id_of: Callable[[str], int | None]) -> Grammar:
    """The grammar of a rule.

    token_id_of: the id of a token that stands for a text on its own, such as "</think>", or None.

    Raises:
        RequestError: too long, too deep, or not what it claims to be. Whether it compiles is found out later.
    """
    part, not_enforced = _grammar_of(rule)
    parts = [part]
    if rule.free_end is not None:
        parts[0]["name"] = "answer"
        parts.insert(0, {"lark_grammar": _free_part(rule, rule.free_end, token_id_of)})
    return Grammar(json.dumps({"grammars": parts}), not_enforced)


def literal(text: str, token_id_of: Callable[[str], int | None]) -> str:
    """Text in a Lark grammar. A token that was added to the vocabulary as a whole, such as a tag, never comes from
    text: it has an id."""
    if (token_id := token_id_of(text)) is not None:
        return f"<[{token_id}]>"
    parts = [part for part in re.split(r"(<[^<>\s]+>|\[/?[A-Z_]+\])", text) if part]
    return json.dumps(text) if len(parts) < 2 else " ".join(literal(part, token_id_of) for part in parts)


def _free_part(rule: StructuredOutputsParams, end: str, token_id_of: Callable[[str], int | None]) -> str:
    """A Lark grammar: any text until `end`, then the answer."""
    any_text = "/(.|\\n)*/"
    if token_id_of(end) is None:
        part, definition = "free BREAK", f"free[suffix={json.dumps(end)}]: {any_text}"
    else:
        part, definition = f"FREE {literal(end, token_id_of)} BREAK", f"FREE: {any_text}"
    if rule.free_start is not None:
        part = f"({literal(rule.free_start, token_id_of)} {part})?"
    if rule.free_openings:
        part += f" ({' | '.join(literal(text, token_id_of) for text in rule.free_openings)})?"
    return f"start: {part} @answer\nBREAK: /\\n{{0,2}}/\n{definition}"


def _grammar_of(rule: StructuredOutputsParams) -> tuple[dict[str, Any], list[str]]:
    if rule.json is not None:
        assert isinstance(rule.json, str)
        _check_size("json", rule.json)
        schema = _schema(rule.json)
        not_enforced = enforceable(schema)
        return {"json_schema": _with_white_space(schema, rule)}, not_enforced
    if rule.regex is not None:
        _check_size("regex", rule.regex)
        return _regex(_with_ascii_classes(_without_anchors(rule.regex))), []
    if rule.choice is not None:
        pattern = "|".join(map(re.escape, rule.choice))
        _check_size("choice", pattern, nests=False)
        return _regex(pattern), []
    if rule.grammar is not None:
        _check_size("grammar", rule.grammar)
        lark, not_enforced = _with_enforceable_schemas(_lark(rule.grammar))
        return {"lark_grammar": lark}, not_enforced
    return {"json_schema": _with_white_space({"type": "object"}, rule)}, []


def _regex(pattern: str) -> dict[str, Any]:
    from llguidance import LLMatcher

    return json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]


def _without_anchors(pattern: str) -> str:
    """The whole text is matched anyway, and the compiler knows no anchors."""
    pattern = pattern.removeprefix("^")
    backslashes = len(pattern[:-1]) - len(pattern[:-1].rstrip("\\"))
    return pattern[:-1] if pattern.endswith("$") and backslashes % 2 == 0 else pattern


def _with_ascii_classes(pattern: str) -> str:
    """Digits and letters are those of ASCII, as in JSON schemas and in vLLM. To the compiler they are Unicode's."""
    return ESCAPE_OR_DASH.sub(lambda found: r"\-" if found[0] == "-" else CLASSES.get(found[0], found[0]), pattern)


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs.json is not valid JSON: {error}") from None
    if not isinstance(schema, dict):
        raise RequestError(f"structured_outputs.json is a JSON schema, so an object, not {type(schema).__name__}")
    return schema


def _with_white_space(schema: dict[str, Any], rule: StructuredOutputsParams) -> dict[str, Any]:
    allowed = "" if rule.disable_any_whitespace else WHITE_SPACE
    return {**schema, OPTIONS: {**schema.get(OPTIONS, {}), "whitespace_pattern": allowed}}


def _lark(grammar: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except Exception as error:  # the converter raises whatever it stumbles over
        raise RequestError(f"structured_outputs.grammar is neither Lark nor GBNF: {error}") from None


def _with_enforceable_schemas(lark: str) -> tuple[str, list[str]]:
    parts: list[str] = []
    not_enforced: list[str] = []
    begin = end = 0
    while (found := LARK_TOKENS.search(lark, end)) is not None:
        end = found.end()
        if not found[0].startswith("%json"):
            continue
        try:
            schema, end_of_schema = json.JSONDecoder().raw_decode(lark, end)
        except ValueError:  # the compiler says more
            continue
        if isinstance(schema, dict):
            not_enforced += enforceable(schema)
            parts += [lark[begin:end], json.dumps(schema)]
            begin = end = end_of_schema
    return "".join([*parts, lark[begin:]]), not_enforced


def _check_size(field: str, text: str, nests: bool = True) -> None:
    if len(text) > MAX_CHARACTERS:
        raise RequestError(f"structured_outputs.{field} has {len(text)} characters: at most {MAX_CHARACTERS}")
    if nests and _depth(text) > MAX_DEPTH:
        raise RequestError(f"structured_outputs.{field} nests its brackets deeper than {MAX_DEPTH}: make it flatter")


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in re.findall(r"[(){}\[\]]", text):
        depth = max(0, depth + (1 if character in "({[" else -1))
        deepest = max(deepest, depth)
    return deepest
