"""Flags of commands that run an engine, made from the fields of EngineArgs and the help in its docstring."""

from __future__ import annotations

import argparse
import re
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import msgspec

from kvllm.config import CompressionConfig, LayerGroup
from kvllm.engine_args import EngineArgs
from kvllm.entrypoints.settings import parse_json_object
from kvllm.errors import ConfigError

NONE = "none"
NO_FLAGS = ("tenants",)
"""Options that a command sets itself: tenants belong to the keys of a server."""
UNITS = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def add_engine_flags(parser: argparse.ArgumentParser, *, model: str = "model") -> None:
    """Add a flag for each option of an engine. The model is an argument, or a flag too if `model` is "--model"."""
    texts, hints = option_texts(EngineArgs), get_type_hints(EngineArgs)
    group = parser.add_argument_group("engine")
    for field in fields(EngineArgs):
        if field.name in NO_FLAGS:
            continue
        text = texts[field.name].replace("%", "%%")
        if field.name == "model":
            optional: dict[str, Any] = {} if model.startswith("-") else {"nargs": "?"}
            parser.add_argument(model, metavar="MODEL", help=text, **optional)
            continue
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            default=argparse.SUPPRESS,  # the default stands in EngineArgs
            help=f"{text}{_default(field.default)}",
            **_reading(field.name, hints[field.name]),
        )


def engine_args_from(args: argparse.Namespace, **own: Any) -> EngineArgs:
    """The options that were given, and those that a command sets itself. Raises ConfigError."""
    given = {field.name: getattr(args, field.name) for field in fields(EngineArgs) if hasattr(args, field.name)}
    if given.get("model") is None:
        given.pop("model", None)
    return EngineArgs(**given, **own)


def parse_compression(text: str) -> CompressionConfig | None:
    """Read `key=value,...` with fields of CompressionConfig, or `none`. `layer_groups` is written 0-2:1/3:4.

    Raises ConfigError for unknown fields and for values that CompressionConfig refuses.
    """
    if text == NONE:
        return None
    types = {field.name: field.type for field in msgspec.structs.fields(CompressionConfig)}
    options: dict[str, Any] = {}
    for setting in filter(None, text.split(",")):
        name, equals, value = setting.partition("=")
        if not equals or name not in types:
            raise ConfigError(
                f"--compression: {setting!r} is no setting: write none, or name=value with {', '.join(types)}"
            )
        try:
            if name == "layer_groups" and value not in ("auto", "pyramid"):
                options[name] = _layer_groups(value)
                continue
            options[name] = msgspec.convert(value, types[name], strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"--compression: {setting!r}: {error}") from None
    return CompressionConfig(**options)


def _layer_groups(text: str) -> list[LayerGroup]:
    """Read `0-2:1/3+5:4`: layers 0 to 2 keep one block of a window, layers 3 and 5 keep four. Raises ConfigError."""
    groups = []
    for group in text.split("/"):
        if not re.fullmatch(r"\d+(-\d+)?(\+\d+(-\d+)?)*:\d+", group):
            raise ConfigError(
                f"--compression: layer_groups={text!r}: write layers and the blocks that they keep, as in 0-2:1/3+5:4"
            )
        layers, _, blocks = group.partition(":")
        ends = [
            (int(first), int(last or first)) for first, _, last in (run.partition("-") for run in layers.split("+"))
        ]
        groups.append(LayerGroup(tuple(i for first, last in ends for i in range(first, last + 1)), int(blocks)))
    return groups


def option_texts(kind: type) -> dict[str, str]:
    """What the docstring of a class says about each of its arguments, in one line each."""
    _, _, section = (kind.__doc__ or "").partition("Args:\n")
    section = section.partition("\n\n")[0]
    found = re.findall(r"^        (\w+): (.*(?:\n            .*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _default(value: Any) -> str:
    return "" if value is None or value is MISSING or isinstance(value, Path) else f" (default: {value})"


def _reading(name: str, hint: Any) -> dict[str, Any]:
    """How argparse reads a flag of this type."""
    if name == "compression":
        return {"type": _compression, "metavar": "KEY=VALUE,..."}
    if name == "hf_overrides":
        return {"type": partial(parse_json_object, "--hf-overrides"), "metavar": "JSON"}
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] if isinstance(hint, UnionType) else [hint]
    if kinds == [bool]:
        return {"action": argparse.BooleanOptionalAction}
    reader = {int: _integer, float: float}.get(kinds[0], str)
    return {"type": reader, "metavar": {int: "N", float: "X"}.get(kinds[0], "NAME")}


def _integer(text: str) -> int:
    """An integer, with a unit if it is a large one: 4k is 4000, 4K is 4096."""
    found = re.fullmatch(r"(-?\d+)([kmgKMG]?)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer: write 4096, 4K (the same) or 4k (4000)")
    return int(found[1]) * UNITS.get(found[2], 1)


def _compression(text: str) -> CompressionConfig | None:
    try:
        return parse_compression(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--compression: ")) from None
