"""Names and values of options, held against their annotations and against what is allowed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from msgspec import Struct, StructMeta

from kvllm.errors import ConfigError
from kvllm.spelling import did_you_mean

_fields = cache(msgspec.structs.fields)
Refused = Mapping[str, tuple[tuple[Any, ...], str]]
"""Options that cannot be obeyed, by name: the values that ask for nothing, and the reason."""


class OptionsMeta(StructMeta):
    """The type of structs with options, which refuse a name that they do not have with ConfigError."""

    if not TYPE_CHECKING:  # checkers and editors see the fields

        def __call__(cls, *args: Any, **options: Any) -> Any:
            known = cls.__struct_fields__
            try:
                if not options.keys() <= set(known):
                    options = cls.sorted_out(options)
                return super().__call__(*args, **options)
            except TypeError as error:
                raise ConfigError(f"{cls.__name__}: {error}: it has {', '.join(known)}") from None


class Options(Struct, metaclass=OptionsMeta, frozen=True):
    """A frozen struct with options. REFUSED: those of vLLM that it has not."""

    REFUSED: ClassVar[Refused] = {}

    @classmethod
    def sorted_out(cls, options: dict[str, Any]) -> dict[str, Any]:
        """The fields of options of which some are no fields. Raises ConfigError."""
        return without_refused(cls.__name__, options, cls.__struct_fields__, cls.REFUSED)


def without_refused(owner: str, options: dict[str, Any], known: Iterable[str], refused: Refused) -> dict[str, Any]:
    """The options that `owner` has, without those of `refused` that ask for nothing.

    Raises ConfigError for others, with the reason or the nearest name.
    """
    kept, known = {}, list(known)
    for name, value in options.items():
        if name in known:
            kept[name] = value
        elif name in refused:
            neutral, reason = refused[name]
            require(any(value is each or value == each for each in (None, *neutral)), name, value, reason)
        else:
            near = did_you_mean(name, known) or f": it has {', '.join(known)}"
            raise ConfigError(f"{owner} has no option {name!r}{near}")
    return kept


def check_types(options: Struct) -> None:
    """Structs accept anything when constructed by hand: hold each field against its annotation, and store its type."""
    for field in _fields(type(options)):
        value = getattr(options, field.name)
        if value is field.default:  # most fields of most requests
            continue
        msgspec.structs.force_setattr(options, field.name, converted(field.name, value, field.type))


def converted(name: str, value: Any, hint: Any) -> Any:
    """The value as its annotation has it. Numbers and arrays of NumPy and torch are as good as Python's. Raises
    ConfigError."""
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        try:
            return msgspec.convert(_plain(value), hint)
        except msgspec.ValidationError:
            raise ConfigError(f"{name}={value!r}: {error}") from None


def _plain(value: Any) -> Any:
    """The value with all that NumPy and torch have in it as Python's numbers and lists."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset | range):
        return [_plain(each) for each in value]
    if isinstance(value, Enum):  # which msgspec reads by its value
        return value.value
    return value.tolist() if hasattr(value, "tolist") else value


def require(condition: bool, field: str, value: Any, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"{field}={value!r} is not allowed: {allowed}")
