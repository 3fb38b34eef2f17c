"""Settings of a command line that are sent to a server, which checks them."""

from __future__ import annotations

from typing import Any

import msgspec

from kvllm.errors import ConfigError


def parse_settings(option: str, text: str) -> dict[str, Any]:
    """Read `key=value,...`. Values are JSON where they can be, else text. Raises ConfigError."""
    settings = {}
    for setting in text.split(","):
        name, equals, value = setting.partition("=")
        if not name or not equals:
            raise ConfigError(f"{option}: {setting!r} is no setting: write name=value,name=value")
        try:
            settings[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            settings[name] = value
    return settings


def parse_json_object(option: str, text: str) -> dict[str, Any]:
    """Raises ConfigError for what is no JSON object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f'{option} {text!r} is no JSON object like {{"top_p": 0.9}}: {error}') from None
