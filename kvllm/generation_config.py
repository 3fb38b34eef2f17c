"""Defaults of sampling that come with a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvllm.errors import CheckpointError, ConfigError
from kvllm.sampling_params import SamplingParams

FILE = "generation_config.json"
OPTIONS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""The keys that count, as vLLM has them, and the options of SamplingParams that they stand for."""


def named_eos_tokens(source: str) -> tuple[int, ...]:
    """Tokens that end a text as another directory's file says; those of the checkpoint's are in its ModelConfig."""
    file = Path(source) / FILE
    if source in ("auto", "vllm") or not file.is_file():
        return ()
    try:
        found = msgspec.json.decode(file.read_bytes(), type=_EosTokens).eos_token_id
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: {error}") from None
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)


class _EosTokens(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def sampling_defaults(model: Path, source: str) -> dict[str, Any]:
    """Options of SamplingParams.

    model: directory of the checkpoint. source: "auto" for its file, if it has one, "vllm" for none, or the directory
    of another one.

    Raises:
        ConfigError: `source` has no such file.
        CheckpointError: the file is malformed, or asks for what SamplingParams refuse.
    """
    if source == "vllm":
        return {}
    file = (model if source == "auto" else Path(source)) / FILE
    if not file.is_file():
        if source == "auto":
            return {}
        raise ConfigError(
            f"generation_config={source!r} is not allowed: {file} does not exist. Give 'auto', 'vllm' or the directory "
            f"of a {FILE}"
        )
    try:
        found = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        defaults = {option: found[key] for key, option in OPTIONS.items() if found.get(key) is not None}
        SamplingParams(**defaults)
    except (msgspec.DecodeError, UnicodeDecodeError, ConfigError) as error:
        raise CheckpointError(f"{file}: {error}") from None
    return defaults
