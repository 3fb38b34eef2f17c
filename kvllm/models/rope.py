"""The keys of `config.json` for the rotary embedding: the base of its frequencies, and how they are scaled.

Three keys say it: `rope_theta`, `rope_scaling`, and the newest, `rope_parameters`, which holds the base as well. Which
one wins where they contradict each other differs among versions of transformers, so such a checkpoint is refused.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import msgspec

from kvllm.errors import CheckpointError

DEFAULT_THETA = 10000.0
FULL, SLIDING = "full_attention", "sliding_attention"
NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
    "longrope": ("original_max_position_embeddings",),
    "proportional": (),
}
"""The types of scaling that are computed, and the numbers that each needs."""


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """How rotary frequencies are stretched beyond the pretraining length.

    linear: every frequency is divided by `factor`.
    dynamic: the base grows with the longest text, beyond `original_max_position_embeddings` tokens (NTK).
    llama3: only low frequencies are divided, with a smooth transition between the wavelengths
        `original_max_position_embeddings / low_freq_factor` and `... / high_freq_factor`.
    yarn: the same with a transition between `beta_slow` and `beta_fast` turns over the pretraining length; `truncate`
        moves its ends to whole channels.
    longrope: each frequency is divided by its number of `short_factor`, or of `long_factor` if texts may be longer than
        `original_max_position_embeddings`.

    attention_factor: cosines and sines are multiplied by it.
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


class Rope(msgspec.Struct, frozen=True):
    """A rotary embedding: the base of its frequencies, their scaling, and the part of each head that it rotates.

    interleaved: the checkpoint's pairs are neighbouring channels, and not a channel of either half of that part.
    proportional: pairs are a channel of either half of the head; frequencies are those that it has if all are rotated.
    """

    theta: float = DEFAULT_THETA
    scaling: RopeScaling | None = None
    partial_factor: float = 1.0
    interleaved: bool = False
    proportional: bool = False

    def rotated_channels(self, head_dim: int) -> int:
        """Channels of a head that are rotated, the first ones of the checkpoint's."""
        return int(head_dim * self.partial_factor + 1e-6)  # the factor may be a quotient

    def longest_text(self, max_position_embeddings: int) -> int:
        """Positions of the longest text: more than the config says where the scaling is for longer texts (as vLLM)."""
        if self.scaling is None or self.scaling.kind not in ("linear", "dynamic", "yarn"):
            return max_position_embeddings
        original = self.scaling.original_max_position_embeddings or max_position_embeddings
        return max(max_position_embeddings, int(self.scaling.factor * original))


NO_ROPE = Rope(partial_factor=0.0)
"""Of layers that rotate nothing."""


class TopKeys(msgspec.Struct, kw_only=True):
    """The keys of `config.json` itself that concern the rotary embedding. Older ones stand beside `rope_scaling`.

    PARTIAL: the family may rotate a part of each head alone. DEFAULT_PARTIAL: the part where the config names none.
    INTERLEAVED: as in `Rope`. RENAMED: other names of types.
    SCALED: max_position_embeddings is the longest text with the scaling already. THETA: the base where none is given.
    """

    PARTIAL: ClassVar[bool] = False
    DEFAULT_PARTIAL: ClassVar[float] = 1.0
    INTERLEAVED: ClassVar[bool] = False
    SCALED: ClassVar[bool] = False
    RENAMED: ClassVar[dict[str, str]] = {}
    THETA: ClassVar[float] = DEFAULT_THETA

    max_position_embeddings: int
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: int | None = None

    def rope_keys(self) -> TopKeys:
        """The keys of the RoPE of layers that attend all tokens, where a family has several."""
        return self

    def rope_of_layers(self, kind: str) -> dict[str, Any] | None:
        """`rope_parameters` of the layers FULL or SLIDING. Raises CheckpointError if there are others."""
        every = self.rope_parameters or {}
        others = [name for name in every if name not in (FULL, SLIDING)]
        if others:
            raise CheckpointError(
                f"rope_parameters has {', '.join(others)}, beside those of {FULL} and {SLIDING}, which kvllm does not "
                "support: use another checkpoint"
            )
        found = every.get(kind)
        if found is not None and not isinstance(found, dict):
            raise CheckpointError(f"rope_parameters has {found!r} for {kind}, but must have an object")
        return found


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
    attention_factor: float | None = None
    attn_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    short_factor: list[float] | None = None
    long_factor: list[float] | None = None


def read_rope(keys: TopKeys, head_dim: int) -> Rope:
    """The rotary embedding of heads of `head_dim` channels.

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
    _check_channels(found[0], head_dim)
    return found[0]


def _read(name: str, given: dict[str, Any], keys: TopKeys) -> Rope:
    """The meaning of one of the two places, together with the keys that stand beside it."""
    kind = _agreed("rope_type", given.get("rope_type"), given.get("type")) or "default"
    kind = keys.RENAMED.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in NEEDED:
        raise CheckpointError(f"unsupported rope type {kind!r}: kvllm computes {', '.join(NEEDED)}")
    unknown = [key for key, value in given.items() if value is not None and key not in _Rope.__struct_fields__]
    if unknown:
        raise CheckpointError(f"{name} has {', '.join(unknown)}, which kvllm does not support: use another checkpoint")
    try:
        rope = msgspec.convert(given, _Rope)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{name}: {error}") from error
    partial = _agreed("partial_rotary_factor", rope.partial_rotary_factor, keys.partial_rotary_factor)
    partial = keys.DEFAULT_PARTIAL if partial is None else partial
    if partial != 1.0 and not keys.PARTIAL:
        raise CheckpointError(
            f"partial_rotary_factor is {partial}: only a part of each head is rotated, which kvllm does not support "
            "for this architecture: use another checkpoint"
        )
    theta = _agreed("rope_theta", rope.rope_theta, keys.rope_theta)
    theta = keys.THETA if theta is None else theta
    if not _positive(theta):
        raise CheckpointError(f"rope_theta is {theta}, but must be a positive number")
    rope.original_max_position_embeddings = _agreed(
        "original_max_position_embeddings", rope.original_max_position_embeddings, keys.original_max_position_embeddings
    )
    proportional = kind == "proportional"
    if proportional and (keys.INTERLEAVED or rope.factor not in (None, 1)):
        raise CheckpointError(f"rope type 'proportional' has factor {rope.factor}, which kvllm does not support")
    scaling = _scaling(kind, rope, keys.max_position_embeddings)
    return Rope(theta, scaling, partial, keys.INTERLEAVED, proportional)


def _scaling(kind: str, rope: _Rope, max_position_embeddings: int) -> RopeScaling | None:
    """The scaling of a type. Numbers that are absent are what transformers assumes."""
    if kind == "yarn":
        rope.beta_fast, rope.beta_slow = rope.beta_fast or 32.0, rope.beta_slow or 1.0
    if kind in ("yarn", "longrope"):
        rope.original_max_position_embeddings = rope.original_max_position_embeddings or max_position_embeddings
    if rope.attn_factor is not None and kind != "yarn":
        raise CheckpointError(f"rope type {kind!r} has attn_factor, which kvllm knows of 'yarn' alone")
    values = {name: getattr(rope, name) for name in NEEDED[kind]}
    for name, value in values.items():
        if value is None or not _positive(value):
            raise CheckpointError(f"rope type {kind!r} needs {name}, a positive number, but has {value}")
    if kind == "llama3" and values["low_freq_factor"] >= values["high_freq_factor"]:
        raise CheckpointError(
            f"rope low_freq_factor {values['low_freq_factor']} must be below "
            f"high_freq_factor {values['high_freq_factor']}"
        )
    if kind == "dynamic":
        values["original_max_position_embeddings"] = max_position_embeddings
    if kind == "yarn":
        values |= {"truncate": rope.truncate is not False, "attention_factor": _yarn_attention_factor(rope)}
    if kind == "longrope":
        values |= _longrope(rope, max_position_embeddings)
    return msgspec.convert({"kind": kind, **values}, RopeScaling) if values else None


def yarn_strength(factor: float, scale: float) -> float:
    """What YaRN multiplies scores of attention by, twice, for texts `factor` times as long (arXiv 2309.00071, 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _yarn_attention_factor(rope: _Rope) -> float:
    assert rope.factor is not None
    if rope.attention_factor is not None:
        return _attention_factor(rope.attention_factor)
    if rope.attn_factor is not None:  # of what YaRN has by itself, as llama.cpp and vLLM read it
        return _attention_factor(rope.attn_factor * yarn_strength(rope.factor, 1.0))
    if rope.mscale and rope.mscale_all_dim:
        strengths = (yarn_strength(rope.factor, scale) for scale in (rope.mscale, rope.mscale_all_dim))
        return _attention_factor(next(strengths) / next(strengths))
    return yarn_strength(rope.factor, 1.0)


def _longrope(rope: _Rope, max_position_embeddings: int) -> dict[str, Any]:
    original = rope.original_max_position_embeddings
    assert original is not None
    factor = max_position_embeddings / original if rope.factor is None else rope.factor
    attention_factor = rope.attention_factor
    if attention_factor is None:
        grown = factor > 1 and original > 1
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if grown else 1.0
    lists = {"short_factor": rope.short_factor or [], "long_factor": rope.long_factor or []}
    for name, factors in lists.items():
        if not factors or not all(map(_positive, factors)):
            raise CheckpointError(f"rope type 'longrope' needs {name}, a list of positive numbers, but has {factors}")
    return {**lists, "attention_factor": _attention_factor(attention_factor)}


def _attention_factor(number: float) -> float:
    if not _positive(number):
        raise CheckpointError(f"rope attention_factor is {number}, but must be a positive number")
    return number


def _check_channels(rope: Rope, head_dim: int) -> None:
    """Raise CheckpointError unless the rotated channels are pairs, each with the numbers that the scaling needs."""
    rotated = rope.rotated_channels(head_dim)
    if rotated % 2 or not 2 <= rotated <= head_dim:
        raise CheckpointError(
            f"partial_rotary_factor is {rope.partial_factor}: it rotates {rotated} of {head_dim} channels, but must be "
            "an even number of them, at least 2"
        )
    if rope.scaling is None:
        return
    if rope.scaling.kind == "yarn" and rope.theta <= 1:
        raise CheckpointError(f"rope type 'yarn' needs a rope_theta above 1, but has {rope.theta}")
    if rope.scaling.kind == "dynamic" and rotated < 4:
        raise CheckpointError(f"rope type 'dynamic' needs at least 4 rotated channels, but has {rotated}")
    for name in ("short_factor", "long_factor"):
        count = len(getattr(rope.scaling, name))
        if rope.scaling.kind == "longrope" and count != rotated // 2:
            raise CheckpointError(
                f"rope {name} has {count} numbers, but {rotated} rotated channels need {rotated // 2}"
            )


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
