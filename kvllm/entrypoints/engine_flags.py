"""Flags of commands that run an engine, made from the fields of EngineArgs and the help in its docstring."""

from __future__ import annotations

import argparse
import re
from dataclasses import MISSING, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import msgspec

from kvllm.compression.specs import AUTO
from kvllm.config import CompressionConfig, LayerGroup
from kvllm.config.compression import DEFAULT_POLICY, is_option, option_types
from kvllm.config.engine import SWAP_MODES
from kvllm.engine_args import DEVICES, EXECUTOR_BACKENDS, LOAD_FORMATS, PLACEMENTS, REFUSED, EngineArgs
from kvllm.entrypoints.model_argument import add_model_argument
from kvllm.entrypoints.settings import parse_json_object, parse_settings, reader
from kvllm.entrypoints.sizes import parse_bytes, parse_count, parse_gib
from kvllm.errors import ConfigError
from kvllm.kvcache.formats import KV_CACHE_DTYPES, KV_FORMATS
from kvllm.models.config import DTYPE_NAMES, DTYPES, QUANTIZATIONS
from kvllm.pooling_config import CONVERSIONS, RUNNERS

NONE = "none"
SETTINGS = "POLICY|KEY=VALUE,...|JSON"
NO_FLAGS = ("model", "tenants", "served_model_name")
"""Options that a command adds or sets itself: tenants belong to the keys of a server."""
READERS: dict[str, dict[str, Any]] = {
    "kv_cache_memory_bytes": {"type": parse_bytes, "metavar": "SIZE"},
    "hf_overrides": {"type": reader(parse_json_object, "--hf-overrides"), "metavar": "JSON"},
    "speculative_config": {"type": reader(parse_json_object, "--speculative-config"), "metavar": "JSON"},
    "pooler_config": {"type": reader(parse_json_object, "--pooler-config"), "metavar": "JSON"},
    "kv_offloading_size": {"type": parse_gib, "metavar": "GIB"},
    "swap_space": {"type": parse_gib, "metavar": "GIB"},
    "kv_offloading_disk_size": {"type": parse_gib, "metavar": "GIB"},
}
CHOICES = {
    "dtype": ("auto", *DTYPES, *DTYPE_NAMES),
    "device": DEVICES,
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "kv_offload_dtype": ("auto", *KV_FORMATS),
    "distributed_executor_backend": EXECUTOR_BACKENDS,
    "placement_strategy": PLACEMENTS,
    "swap": SWAP_MODES,
    "load_format": LOAD_FORMATS,
    "quantization": tuple(QUANTIZATIONS),
    "runner": RUNNERS,
    "convert": CONVERSIONS,
}
"""So that a shell completes them, and a mistyped one gets the nearest name."""


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the model, and a flag for each other option of an engine."""
    texts, hints = option_texts(EngineArgs), get_type_hints(EngineArgs)
    add_model_argument(parser, texts["model"])
    group = parser.add_argument_group("engine")
    for field in fields(EngineArgs):
        if field.name in NO_FLAGS:
            continue
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            default=argparse.SUPPRESS,  # the default stands in EngineArgs
            help=f"{texts[field.name].replace('%', '%%')}{_default(field.default)}",
            **_reading(field.name, hints[field.name]),
        )
    _add_refused_flags(parser)


def _add_refused_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of vLLM without an option of this engine, which EngineArgs takes or refuses with the reason. No help
    lists them."""
    for name, (neutral, _) in REFUSED.items():
        flag = f"--{name.replace('_', '-')}"
        if name in NO_FLAGS:
            continue
        is_switch = any(isinstance(value, bool) for value in neutral)
        reading: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if is_switch else {"type": _json_or_text}
        parser.add_argument(flag, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **reading)


def engine_args_from(args: argparse.Namespace, **own: Any) -> EngineArgs:
    """The options that were given, and those that a command sets itself. Raises ConfigError."""
    names = {field.name for field in fields(EngineArgs)} | REFUSED.keys() - set(NO_FLAGS)
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    if given.get("model") is None:
        given.pop("model", None)
    return EngineArgs(**given, **own)


def parse_compression(text: str) -> CompressionConfig | None:
    """Read `key=value,...` or a JSON object with options of CompressionConfig, or `none`.

    In the list, the name of a policy alone is its setting, and `layer_groups` is written 0-2:1/3:4. Raises ConfigError
    for unknown options and for values that CompressionConfig refuses.
    """
    if text == NONE:
        return None
    options = parse_settings("--compression", text, None, bare="policy")
    policy = options.get("policy", DEFAULT_POLICY)
    if isinstance(policy, str) and is_option(policy):
        raise ConfigError(f"--compression: {policy!r} has no value: write name=value, here {policy}=...")
    types = option_types(policy, options.get("method", AUTO))
    for name, value in options.items():
        if name == "layer_groups" and isinstance(value, str) and value not in ("auto", "pyramid"):
            options[name] = _layer_groups(value)
            continue
        try:
            options[name] = msgspec.convert(value, types.get(name, Any), strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"--compression: '{name}={value}': {error}") from None
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
        return {"type": _compression, "metavar": SETTINGS}
    if name in READERS:
        return READERS[name]
    if name in CHOICES:
        return {"choices": CHOICES[name], "metavar": "NAME"}
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] if isinstance(hint, UnionType) else [hint]
    if kinds == [bool]:
        return {"action": argparse.BooleanOptionalAction}
    reader = {int: parse_count, float: float}.get(kinds[0], str)
    return {"type": reader, "metavar": {int: "N", float: "X"}.get(kinds[0], "NAME")}


def _json_or_text(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _compression(text: str) -> CompressionConfig | None:
    try:
        return parse_compression(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--compression: ")) from None
