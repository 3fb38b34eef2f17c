"""`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from kvllm.chat_messages import FunctionDefinition
from kvllm.serving.tags import LONGEST_HEAD, first_tag
from kvllm.serving.tool_parsers.base import CallReader, TaggedParser

START, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
NO_NAME = frozenset("\n<")
"""Characters that no name of a function has."""
TYPES = {"null": type(None), "boolean": bool, "integer": int, "number": (int, float), "array": list, "object": dict}
OTHER_NAMES = {
    "str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"
}  # fmt: skip
"""Of types, in tools of programs that take Python's."""


class Qwen3CoderParser(TaggedParser):
    """Values are text: the schema of the function tells which are something else. `<tool_call>` may be missing."""

    tags = (START, END, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)
    starts = (START, FUNCTION)
    closing = (END,)

    def _reader(self, start: str) -> FunctionReader:
        return FunctionReader(start == FUNCTION, self.functions)


class FunctionReader(CallReader):
    """Reads one call.

    is_open: whether `<function=` was read. A text streams; a value of another type waits for its end.
    """

    def __init__(self, is_open: bool, functions: Mapping[str, FunctionDefinition]) -> None:
        super().__init__()
        self._is_open = is_open
        self._functions = functions
        self._types: set[str] | None = None  # of the parameter that is being read
        self._begins = False  # nothing of its value was read
        self._is_first = True

    def push(self, text: str) -> int:
        place = 0
        while place < len(text) and not (self.is_complete or self.is_broken):
            if (used := self._step(text[place:])) is None:
                break
            place += used
        return place

    def _step(self, text: str) -> int | None:
        """Read the next tag or value. Returns the number of characters, None if more are needed, or if it is broken."""
        if self.name is None:
            return self._read_name(text)
        if self._types is None:
            return self._read_tag(text)
        return self._read_text(text) if self._types == {"string"} else self._read_value(text)

    def _read_name(self, text: str) -> int | None:
        space = len(text) - len(text.lstrip())
        start = 0 if self._is_open else space + len(FUNCTION)
        is_tag = self._is_open or text.startswith(FUNCTION, space)
        end = text.find(">", start)
        if is_tag and start < end < LONGEST_HEAD and NO_NAME.isdisjoint(text[start:end]):
            self.name = text[start:end].strip().strip("\"'")
            self._new_arguments = "{"
            return end + 1
        is_begun = end < 0 and NO_NAME.isdisjoint(text[start:]) if is_tag else FUNCTION.startswith(text[space:])
        self.is_broken = not is_begun or len(text) >= LONGEST_HEAD
        return None

    def _read_tag(self, text: str) -> int | None:
        if text[0].isspace():
            return len(text) - len(text.lstrip())
        if text.startswith(FUNCTION_END):
            self._new_arguments += "}"
            self.is_complete = True
            return len(FUNCTION_END)
        end = text.find(">")
        if text.startswith(PARAMETER) and end > 0:
            self._begin_parameter(text[len(PARAMETER) : end].strip().strip("\"'"))
            return end + 1
        is_parameter = text.startswith(PARAMETER) and len(text) < LONGEST_HEAD
        self.is_broken = not (is_parameter or FUNCTION_END.startswith(text) or PARAMETER.startswith(text))
        return None

    def _begin_parameter(self, key: str) -> None:
        self._types = self._types_of(key)
        self._new_arguments += ("" if self._is_first else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        self._new_arguments += '"' if self._types == {"string"} else ""
        self._is_first, self._begins = False, True

    def _read_text(self, text: str) -> int | None:
        """Read text, without the line break at either end."""
        if self._begins and text[0] == "\n":
            self._begins = False
            return 1
        self._begins = False
        place, tag = first_tag(text, (PARAMETER_END, PARAMETER, FUNCTION_END))
        value = text[:place].removesuffix("\n")
        self._new_arguments += _json_text(value)
        if tag is None:
            return len(value) or None
        self._new_arguments += '"'
        return self._end_parameter(place, tag)

    def _read_value(self, text: str) -> int | None:
        place, tag = first_tag(text, (PARAMETER_END, PARAMETER, FUNCTION_END))
        if tag is None:
            return None
        assert self._types is not None  # a parameter is being read
        self._new_arguments += _value_json(text[:place].removeprefix("\n").removesuffix("\n"), self._types)
        return self._end_parameter(place, tag)

    def _end_parameter(self, place: int, tag: str) -> int:
        """The end tag belongs to the parameter, if it has one."""
        self._types = None
        return place + len(tag) if tag == PARAMETER_END else place

    def _types_of(self, key: str) -> set[str]:
        """The types that the schema allows; a text where it says nothing. Empty: any."""
        function = self._functions.get(self.name or "")
        properties = (function.parameters or {}).get("properties") if function else None
        schema = properties.get(key) if isinstance(properties, dict) else None
        return _types(schema) if isinstance(schema, dict) else {"string"}


def _types(schema: dict[str, Any]) -> set[str]:
    """The types that a schema allows; empty for any."""
    if (given := schema.get("type")) is not None:
        names = [str(each) for each in (given if isinstance(given, list) else [given])]
        return {OTHER_NAMES.get(name, name) for name in names}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return {"string"} if all(isinstance(value, str) for value in values) else set()
    parts = schema.get("anyOf", schema.get("oneOf"))
    found = [_types(part) for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return set().union(*found) if found and all(found) else set()


def _value_json(text: str, types: set[str]) -> str:
    """A value as JSON: of the first type that fits, else the text."""
    for read in (_read_json, ast.literal_eval):
        try:
            value = read(text.strip())
            if not types or any(_is_a(value, each) for each in types):
                return json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    lower = text.strip().lower()
    if lower in ("true", "false", "null") and ((lower == "null" and "null" in types) or "boolean" in types):
        return lower
    return f'"{_json_text(text)}"'


def _read_json(text: str) -> Any:
    def refuse(word: str) -> None:
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse, strict=False)


def _is_a(value: Any, name: str) -> bool:
    """Whether a value has a type of JSON schema. A text never counts: it stands there without quotes."""
    if isinstance(value, bool):
        return name == "boolean"
    return name in TYPES and isinstance(value, TYPES[name])


def _json_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
