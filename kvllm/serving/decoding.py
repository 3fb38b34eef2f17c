"""JSON to the type of a request. Clients whose language has one type of numbers write 10.0 for 10."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

MAX_NUMBERS = 64
"""Numbers of a body, or lists of them, that may be written so: each takes another look at all fields."""
FLOAT = re.compile(r"got `float` - at `\$(.*)`$")
KEY = re.compile(r" - at `key` in `\$(.*)`$")
STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
T = TypeVar("T")


def decode_fields(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Raises msgspec.DecodeError, of which a ValidationError names the place, and UnicodeDecodeError."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if not (FLOAT.search(str(error)) or KEY.search(str(error))):
            raise
        fields, wrong = msgspec.json.decode(body), error
    for _ in range(MAX_NUMBERS):
        if not _make_whole(fields, str(wrong)):
            break
        try:
            return msgspec.convert(fields, decoder.type, str_keys=True)
        except msgspec.ValidationError as error:
            wrong = error
    raise _with_key(fields, wrong)


def _make_whole(fields: Any, error: str) -> bool:
    """Make the number that an error names an integer, with all of its list. Returns whether it has no fraction."""
    found = FLOAT.search(error)
    steps = _steps(found[1]) if found else []
    number = _at(fields, steps)
    if not isinstance(number, float) or not number.is_integer():
        return False
    while isinstance(_at(fields, steps[:-1]), list):
        steps.pop()
    if steps:
        _at(fields, steps[:-1])[steps[-1]] = _whole(_at(fields, steps))
    return bool(steps)


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _with_key(fields: Any, error: msgspec.ValidationError) -> msgspec.ValidationError:
    """The error, with the key that is no number if it is about one."""
    found = KEY.search(str(error))
    for key in _at(fields, _steps(found[1])) if found else ():
        try:
            msgspec.convert({key: None}, dict[int, None], str_keys=True)
        except msgspec.ValidationError:
            return msgspec.ValidationError(
                f"The key {key[:100]!r} is no whole number - at `${found[1] if found else ''}`"
            )
    return error


def _steps(path: str) -> list[str | int]:
    return [name or int(index) for name, index in STEP.findall(path)]


def _at(fields: Any, steps: list[str | int]) -> Any:
    for step in steps:
        fields = fields[step]
    return fields
