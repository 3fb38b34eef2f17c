"""Settings of a command line: `key=value,...` or a JSON object."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import msgspec

from kvllm.errors import ConfigError
from kvllm.spelling import did_you_mean

T = TypeVar("T")


def reader(parse: Callable[[str, str], T], option: str) -> Callable[[str], T]:
    """`parse` for one option, as the type of a flag: argparse tells what is wrong with its value."""

    def read(text: str) -> T:
        try:
            return parse(option, text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix(f"{option} ")) from None

    return read


def parse_settings(option: str, text: str, names: Collection[str] | None, bare: str = "") -> dict[str, Any]:
    """Read settings. Values of `key=value,...` are JSON where they can be, else text.

    names: those that are known; None if whoever asks checks them. bare: the setting whose value may stand alone.
    Raises ConfigError for other names, and for those without a value.
    """
    if text.lstrip().startswith("{"):
        settings = parse_json_object(option, text)
        for name, value in settings.items():
            _check_name(option, name, f"{name}={value}", names)
        return settings
    settings = {}
    for setting in filter(None, text.split(",")):
        name, equals, value = setting.partition("=")
        if not equals and bare:
            settings[bare] = setting
            continue
        _check_name(option, name, setting, names)
        try:
            settings[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            settings[name] = value
    return settings


def parse_request_compression(text: str) -> dict[str, Any]:
    """The settings of `--compression` that are sent with a request, whose values the server checks."""
    from kvllm.serving.protocol import CompressionOptions

    return parse_settings("--compression", text, CompressionOptions.__struct_fields__)


def parse_json_object(option: str, text: str) -> dict[str, Any]:
    """Raises ConfigError for what is no JSON object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f'{option} {text!r} is no JSON object like {{"top_p": 0.9}}: {error}') from None


def parse_json_list(option: str, text: str) -> tuple[str, ...]:
    """Raises ConfigError for what is no JSON list of strings."""
    try:
        return msgspec.json.decode(text, type=tuple[str, ...])
    except msgspec.DecodeError as error:
        raise ConfigError(f'{option} {text!r} is no JSON list like ["*"]: {error}') from None


def _check_name(option: str, name: str, setting: str, names: Collection[str] | None) -> None:
    if names is not None and name not in names:
        near = did_you_mean(name, names)
        written = f": write name=value,name=value or JSON, with {', '.join(names)}"
        raise ConfigError(f"{option}: {setting!r} is no setting{near or written}")
