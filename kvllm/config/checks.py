"""Fields of options, held against their annotations and against what is allowed."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from msgspec import Struct

from kvllm.errors import ConfigError

_fields = cache(msgspec.structs.fields)


def check_types(options: Struct) -> None:
    """Structs accept anything when constructed by hand: hold each field against its annotation, and store its type."""
    for field in _fields(type(options)):
        value = getattr(options, field.name)
        if value is field.default:  # most fields of most requests
            continue
        try:
            msgspec.structs.force_setattr(options, field.name, msgspec.convert(value, field.type))
        except msgspec.ValidationError as error:
            raise ConfigError(f"{field.name}={value!r}: {error}") from None


def require(condition: bool, field: str, value: Any, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"{field}={value!r} is not allowed: {allowed}")
