"""Engine variants that a benchmark runs side by side."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec
from msgspec import Struct

from kvllm import CompressionConfig
from kvllm.attention.registry import BACKENDS
from kvllm.compression.specs import AUTO, SPECS
from kvllm.config.compression import DEFAULT_POLICY, option_types
from kvllm.errors import ConfigError
from kvllm.kvcache.formats import KV_CACHE_DTYPES
from kvllm.worker.build import DTYPES

VANILLA = "vanilla"
ENGINE_OPTIONS = {
    "block_size": int,
    "dtype": Literal["auto", *DTYPES],
    "kv_cache_dtype": Literal[KV_CACHE_DTYPES],
    "kv_residual_tokens": int,
    "attention_backend": Literal["auto", *BACKENDS],
    "enable_prefix_caching": bool,
    "kv_offloading_size": float,
    "max_num_seqs": int,
    "max_num_batched_tokens": int,
    "num_gpu_blocks_override": int,
}


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
    given = [setting for setting in settings.split(",") if setting]
    policy = next((each.removeprefix("policy=") for each in given if each.startswith("policy=")), DEFAULT_POLICY)
    fields = {} if method == VANILLA else option_types(policy, method)
    fields.pop("method", None)
    compression: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    for setting in given:
        name, equals, value = setting.partition("=")
        if not equals or name not in (*fields, *ENGINE_OPTIONS):
            allowed = ", ".join((*fields, *ENGINE_OPTIONS))
            raise ConfigError(f"variant {text!r}: {setting!r} is no setting: write name=value with one of {allowed}")
        target, type_ = (compression, fields[name]) if name in fields else (engine, ENGINE_OPTIONS[name])
        try:
            target[name] = msgspec.convert(value, type_, strict=False)
        except msgspec.ValidationError as error:
            choices = f": choose one of {', '.join(get_args(type_))}" if get_args(type_) else ""
            raise ConfigError(f"variant {text!r}: {setting!r}: {error}{choices}") from None
    if method == VANILLA:
        return Variant(text, None, engine)
    return Variant(text, CompressionConfig(method=method, **compression), engine)
