"""JSON schemas as far as llguidance can enforce them. What it cannot is left out, unless the schema is strict.

What is left out only ever allows more texts. The standard lets `format` be an annotation: an unknown one means nothing.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

from kvllm.errors import RequestError

OPTIONS = "x-guidance"
"""The key of llguidance's options. `lenient` false in it makes a schema strict."""
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
ANYTHING = (True, {})
NOT_ENFORCED: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": ANYTHING,
    "contains": (),
    "not": (False,),
    "if": (),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "unevaluatedProperties": ANYTHING,
    "unevaluatedItems": ANYTHING,
    "$dynamicRef": (),
    "$recursiveRef": (),
}
"""Keywords that llguidance does not know, and their values that allow everything."""
COMPANIONS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
"""Keywords that mean nothing without another one."""
BOUNDS = ("minProperties", "maxProperties")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", *BOUNDS)
VALUES = ("type", "const", "enum")
MAPS = ("properties", "patternProperties", "$defs", "definitions")
NAMES = re.compile(r"\^(?:([\w-]+)|\((?:\?:)?([\w-]+(?:\|[\w-]+)*)\))\$")
"""A pattern that only these names match."""
SCHEMAS = ("items", "additionalItems", "additionalProperties", "prefixItems", "allOf", "anyOf", "oneOf")


def with_options(schema: dict[str, Any], strict: bool | None, **options: Any) -> dict[str, Any]:
    """A schema with options of llguidance. strict: refuse it unless all of it can be enforced."""
    return {**schema, OPTIONS: {**options, "lenient": not strict}}


def enforceable(schema: dict[str, Any]) -> list[str]:
    """Change a schema to what llguidance compiles. Returns keywords that it does not enforce, with their places.

    Raises RequestError if a strict schema has such keywords, or one has what is no text.
    """
    try:
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError("a JSON schema has half a surrogate pair, which is no character: write both") from None
    given = schema.get(OPTIONS)
    # An overlapping `oneOf` is among what is found.
    schema[OPTIONS] = options = {**(given if isinstance(given, dict) else {}), "coerce_one_of": True}
    strict = options.pop("lenient", True) is False
    walk = _Walk(schema)
    found = walk.go()
    error = _error(schema)
    if "maxProperties" in error:  # where schemas are merged
        found += walk.leave_out(BOUNDS)
        error = _error(schema)
    if strict and found:
        places = "; ".join(found[:8])[:1000]
        raise RequestError(f"a strict JSON schema has what cannot be enforced: leave it out, or strict: {places}")
    if error and not strict:
        options["lenient"] = True
        found = found or [error.split("\n")[0]]
    return found


class _Walk:
    """Goes through a schema's parts, changes what llguidance stumbles over, and notes what is not enforced."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._parts: deque[tuple[dict[str, Any], str]] = deque()
        # With the parts themselves: the id of one that is gone is used again.
        self._seen: dict[int, tuple[dict[str, Any], str]] = {}

    def go(self) -> list[str]:
        """Returns the keywords that are not enforced, with their places."""
        not_enforced: list[str] = []
        self._add(self._root, "#")
        while self._parts:
            part, place = self._parts.popleft()
            self._add_children(part, place)
            _tidy(part)
            not_enforced += [f"{key} at {place}" for key in self._not_enforced(part)]
        return not_enforced

    def leave_out(self, keys: Iterable[str]) -> list[str]:
        """Wherever they are. Returns them, with their places."""
        found = [(part, key, place) for part, place in self._seen.values() for key in keys if key in part]
        for part, key, _ in found:
            del part[key]
        return [f"{key} at {place}" for _, key, place in found]

    def _add(self, part: Any, place: str) -> None:
        if isinstance(part, dict) and id(part) not in self._seen:
            self._seen[id(part)] = part, place
            self._parts.append((part, place))

    def _add_children(self, part: dict[str, Any], place: str) -> None:
        for key in MAPS:
            children = part.get(key)
            for name, child in children.items() if isinstance(children, dict) else ():
                self._add(child, f"{place}/{key}/{name}")
        for key in SCHEMAS:
            children = part.get(key)
            self._add(children, f"{place}/{key}")
            for index, child in enumerate(children if isinstance(children, list) else ()):
                self._add(child, f"{place}/{key}/{index}")
        self._add(self._target(part), str(part.get("$ref")))

    def _not_enforced(self, part: dict[str, Any]) -> list[str]:
        """Leaves out what it returns, but for what is replaced by less."""
        found = [key for key in NOT_ENFORCED if key in part]
        if "pattern" in part and _error({"type": "string", "pattern": part["pattern"]}):
            found.append("pattern")
        found += [key for key in BOUNDS if key in part and not _is_bound(part, key)]
        for key in found:
            del part[key]
        if isinstance(part.get("patternProperties"), dict):
            _move_names(part)
            if _merge_patterns(part):
                found.append("patternProperties")
        options = part.get("oneOf")
        if isinstance(options, list) and _error({"oneOf": [self._outline(option) for option in options]}):
            found.append("oneOf")
        return found

    def _target(self, part: Any) -> Any:
        """What a reference inside the schema leads to; None if there is no such."""
        reference = part.get("$ref") if isinstance(part, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return self._root if reference == "#" else None
        target: Any = self._root
        for name in unquote(reference[2:]).split("/"):
            name = name.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            else:
                target = target.get(name) if isinstance(target, dict) else None
        return target

    def _outline(self, part: Any) -> Any:
        """A schema that allows more: types and values, and those of required properties, which tell options apart."""
        part = self._target(part) or part
        if not isinstance(part, dict):
            return part
        outline = {key: part[key] for key in VALUES if key in part}
        properties, required = part.get("properties"), part.get("required")
        if isinstance(properties, dict) and isinstance(required, list):
            named = {name: properties[name] for name in required if isinstance(name, str) and name in properties}
            outline["properties"] = {name: self._values(each) for name, each in named.items()}
            outline["required"] = list(named)
        return outline

    def _values(self, part: Any) -> Any:
        part = self._target(part) or part
        return {key: part[key] for key in VALUES if key in part} if isinstance(part, dict) else part


def _tidy(part: dict[str, Any]) -> None:
    """Leave out what means nothing, and is an error to llguidance."""
    for key, neutral in NOT_ENFORCED.items():
        if key in part and part[key] in neutral:
            del part[key]
    for key, other in COMPANIONS.items():
        if other not in part:
            part.pop(key, None)
    if isinstance(part.get("format"), str) and part["format"] not in FORMATS:
        del part["format"]
    for key in ("$schema", "$id", "id"):  # the first may name any vocabulary, the others may be no URI
        if key in part and _error({key: part[key]}):
            del part[key]
    for key in COUNTS:
        if isinstance(part.get(key), float) and part[key].is_integer():
            part[key] = int(part[key])


def _move_names(part: dict[str, Any]) -> None:
    """Make patterns that match known properties alone a part of these. To llguidance, one more could come after them,
    and then nothing fits."""
    properties, patterns = part.get("properties"), part["patternProperties"]
    if not isinstance(properties, dict):
        return
    for pattern in list(patterns):
        found = NAMES.fullmatch(pattern)
        names = (found[1] or found[2]).split("|") if found else ()
        if names and all(name in properties for name in names):
            schema = patterns.pop(pattern)
            properties |= {name: {"allOf": [properties[name], schema]} for name in names}


def _merge_patterns(part: dict[str, Any]) -> bool:
    """Make patterns of names one, if a name may match several of them or one is no pattern. Returns whether."""
    patterns: dict[str, Any] = part["patternProperties"]
    if not _error({"type": "object", "patternProperties": dict.fromkeys(patterns, True)}):
        return False
    merged = {"|".join(f"({pattern})" for pattern in patterns): {"anyOf": list(patterns.values())}}
    if _error({"type": "object", "patternProperties": dict.fromkeys(merged, True)}):
        del part["patternProperties"]
        part["additionalProperties"] = {"anyOf": [*patterns.values(), part.get("additionalProperties", True)]}
    else:
        part["patternProperties"] = merged
    return True


def _is_bound(part: dict[str, Any], key: str) -> bool:
    """Whether a bound on the number of properties is enforced."""
    names = part.get("properties")
    same = {name: part[name] for name in (key, "required") if name in part}
    rest = part.get("additionalProperties") is not False
    properties = dict.fromkeys(names if isinstance(names, dict) else (), True)
    return not _error({"type": "object", "properties": properties, "additionalProperties": rest, **same})


def _error(schema: dict[str, Any]) -> str:
    """Of llguidance, which takes a fraction of a millisecond; empty if there is none."""
    from llguidance import LLMatcher

    return LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": schema}]}), None)
