"""The keys of `config.json` for the rotary embedding: the base of its frequencies, and how they are scaled.

Three keys say it: `rope_theta`, `rope_scaling`, and the newest, `rope_parameters`, which holds the base as well. Which
one wins where they contradict each other differs among versions of transformers, so such a checkpoint is refused.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from kvllm.errors import CheckpointError

DEFAULT_THETA = 10000.0
NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""The types of scaling that are computed, and the numbers that each needs."""


class RopeScaling(msgspec.Struct, frozen=True):
    """How rotary frequencies are stretched beyond the pretraining length.

    linear: every frequency is divided by `factor`. llama3: only low frequencies are, with a smooth transition between
    the wavelengths `original_max_position_embeddings / low_freq_factor` and `... / high_freq_factor`.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


class TopKeys(msgspec.Struct, kw_only=True):
    """The keys of `config.json` itself that concern the rotary embedding. Older ones stand beside `rope_scaling`."""

    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: int | None = None


class _Rope(msgspec.Struct):
    """The keys inside `rope_parameters` or `rope_scaling`. Every other key belongs to what is not computed."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None


def read_rope(keys: TopKeys) -> tuple[float, RopeScaling | None]:
    """The base of the frequencies, and their scaling.

    Raises CheckpointError for types of scaling that are not computed, numbers that are missing or not positive, and
    keys that contradict each other.
    """
    places = {"rope_parameters": keys.rope_parameters, "rope_scaling": keys.rope_scaling}
    given = {name: rope for name, rope in places.items() if rope}
    found = [_read(name, rope, keys) for name, rope in given.items()] or [_read("rope_parameters", {}, keys)]
    if found[0] != found[-1]:
        raise CheckpointError(
            f"rope_parameters {keys.rope_parameters} and rope_scaling {keys.rope_scaling} contradict each other: "
            "keep the right one, with rope_theta in it"
        )
    return found[0]


def _read(name: str, given: dict[str, Any], keys: TopKeys) -> tuple[float, RopeScaling | None]:
    """The meaning of one of the two places, together with the keys that stand beside it."""
    kind = _agreed("rope_type", given.get("rope_type"), given.get("type")) or "default"
    if not isinstance(kind, str) or kind not in NEEDED:
        raise CheckpointError(f"unsupported rope type {kind!r}: kvllm computes default, linear and llama3")
    unknown = [key for key, value in given.items() if value is not None and key not in _Rope.__struct_fields__]
    if unknown:
        raise CheckpointError(f"{name} has {', '.join(unknown)}, which kvllm does not support: use another checkpoint")
    try:
        rope = msgspec.convert(given, _Rope)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{name}: {error}") from error
    partial = _agreed("partial_rotary_factor", rope.partial_rotary_factor, keys.partial_rotary_factor)
    if partial not in (None, 1.0):
        raise CheckpointError(
            f"partial_rotary_factor is {partial}: only a part of each head is rotated, which kvllm does not support: "
            "use another checkpoint"
        )
    theta = _agreed("rope_theta", rope.rope_theta, keys.rope_theta)
    theta = DEFAULT_THETA if theta is None else theta
    if not _positive(theta):
        raise CheckpointError(f"rope_theta is {theta}, but must be a positive number")
    rope.original_max_position_embeddings = _agreed(
        "original_max_position_embeddings",
        rope.original_max_position_embeddings,
        keys.original_max_position_embeddings,
    )
    return theta, _scaling(kind, rope)


def _scaling(kind: str, rope: _Rope) -> RopeScaling | None:
    values = {name: getattr(rope, name) for name in NEEDED[kind]}
    for name, value in values.items():
        if value is None or not _positive(value):
            raise CheckpointError(f"rope type {kind!r} needs {name}, a positive number, but has {value}")
    if kind == "llama3" and values["low_freq_factor"] >= values["high_freq_factor"]:
        raise CheckpointError(
            f"rope low_freq_factor {values['low_freq_factor']} must be below "
            f"high_freq_factor {values['high_freq_factor']}"
        )
    return msgspec.convert({"kind": kind, **values}, RopeScaling) if values else None


def _positive(number: float) -> bool:
    return 0 < number < math.inf


def _agreed(name: str, *values: Any) -> Any:
    """The value that a key has wherever it is given, or None where it is not."""
    given = [value for value in values if value is not None]
    if any(value != given[0] for value in given):
        raise CheckpointError(
            f"{name} is {given[0]!r} in one place and {given[1]!r} in another: keep the right one, in rope_parameters"
        )
    return given[0] if given else None
