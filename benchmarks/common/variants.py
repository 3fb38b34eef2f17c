"""Engine variants that a benchmark runs side by side."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from msgspec import Struct

from kvllm import CompressionConfig
from kvllm.compression.specs import AUTO, SPECS
from kvllm.engine_args import EngineArgs
from kvllm.entrypoints.engine_flags import parse_compression
from kvllm.entrypoints.settings import parse_settings
from kvllm.errors import ConfigError

VANILLA = "vanilla"
ENGINE_OPTIONS = tuple(field.name for field in fields(EngineArgs) if field.name not in ("model", "compression"))


class Variant(Struct, frozen=True):
    """One way to run the engine. `engine` holds the keywords of `LLM` that differ from the other variants'."""

    name: str
    compression: CompressionConfig | None = None
    engine: dict[str, Any] = {}


def parse_variant(text: str) -> Variant:
    """Read `vanilla`, a compression method, or either with settings: `kara:period=32,window_blocks=3,block_size=16`.

    Raises ConfigError for unknown methods and settings, and for values that CompressionConfig refuses.
    """
    method, _, settings = text.partition(":")
    if method not in (VANILLA, AUTO, *SPECS):
        allowed = ", ".join((VANILLA, AUTO, *SPECS))
        raise ConfigError(f"variant {text!r}: {method!r} is no variant: choose one of {allowed}")
    given = settings.split(",") if settings else []
    of_engine = [each for each in given if method == VANILLA or each.partition("=")[0] in ENGINE_OPTIONS]
    engine = parse_settings(f"variant {text!r}", ",".join(of_engine), ENGINE_OPTIONS)
    if method == VANILLA:
        return Variant(text, None, engine)
    compression = [f"method={method}", *(each for each in given if each not in of_engine)]
    return Variant(text, parse_compression(",".join(compression)), engine)
