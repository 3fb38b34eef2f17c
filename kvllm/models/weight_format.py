"""The form of the weights of a quantized checkpoint, read from `quantization_config` in its config.json."""

from __future__ import annotations

from typing import Any, NoReturn

import msgspec

from kvllm.errors import CheckpointError

METHODS = ("awq", "gptq", "fp8", "compressed-tensors")
"""Values of `quant_method` that most families compute."""
FORMATS = ("float-quantized", "int-quantized", "pack-quantized", "naive-quantized")
"""Of compressed-tensors."""


class WeightFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a checkpoint stores the matrices of its layers that it quantizes. Which ones these are, its tensors tell.

    method: "awq", "gptq", "packed" and "bytes" for the integers of compressed-tensors, "float8", or "mxfp4" where only
        experts are quantized.
    bits: of a weight.
    group_size: weights of a row that share a scale; None for the whole row.
    zero_points: a group has a zero point, too. plain_zeros: it is stored as it is, and not less one.
    ordered: a tensor says which group each column is in.
    block: rows and columns that share a scale, with "float8"; None for one scale to a row or to the matrix.
    """

    method: str
    bits: int
    group_size: int | None = None
    zero_points: bool = False
    plain_zeros: bool = False
    ordered: bool = False
    block: tuple[int, int] | None = None

    @property
    def integers(self) -> bool:
        """Whether weights stay integers on a CPU. Those of other forms are expanded while they are read."""
        return self.method in ("awq", "gptq", "packed", "bytes")

    @property
    def transposed(self) -> bool:
        """Whether a file has columns of a matrix in the place of rows, and numbers of several rows in a word."""
        return self.method in ("awq", "gptq")


class _Awq(msgspec.Struct):
    bits: int
    group_size: int
    zero_point: bool = True
    version: str = "gemm"


class _Gptq(msgspec.Struct):
    bits: int
    group_size: int
    sym: bool = True
    checkpoint_format: str = "gptq"
    lm_head: bool = False
    rotation: str | None = None
    dynamic: dict[str, Any] | None = None


class _Fp8(msgspec.Struct):
    weight_block_size: tuple[int, int] | None = None
    fmt: str = "e4m3"
    weight_scale_semantics: str | None = None


class _CompressedWeights(msgspec.Struct):
    num_bits: int
    type: str
    strategy: str
    symmetric: bool = True
    group_size: int | None = None
    block_structure: tuple[int, int] | None = None
    actorder: str | bool | None = None


class _CompressedGroup(msgspec.Struct):
    weights: _CompressedWeights


class _Compressed(msgspec.Struct):
    format: str
    config_groups: dict[str, _CompressedGroup]


def read_weight_format(settings: dict[str, Any], methods: tuple[str, ...] = METHODS) -> WeightFormat:
    """The form that `quantization_config` describes, with one of `methods`.

    Raises CheckpointError for what is not computed, and msgspec.ValidationError for a key of another type.
    """
    method = settings.get("quant_method")
    if method not in methods:
        raise CheckpointError(
            f"the weights are quantized by {method!r}: kvllm computes {', '.join(methods)}; use such a checkpoint, or "
            "one that is not quantized"
        )
    if method == "awq":
        return _awq(msgspec.convert(settings, _Awq))
    if method == "gptq":
        return _gptq(msgspec.convert(settings, _Gptq))
    if method == "fp8":
        return _fp8(msgspec.convert(settings, _Fp8))
    if method == "compressed-tensors":
        return _compressed(msgspec.convert(settings, _Compressed))
    return WeightFormat(method="mxfp4", bits=4)


def _awq(keys: _Awq) -> WeightFormat:
    _require("bits", keys.bits, (4,))
    _require("version", keys.version.lower(), ("gemm",))
    _require("zero_point", keys.zero_point, (True,))
    return WeightFormat(
        method="awq", bits=4, group_size=_group_size(keys.group_size, 4), zero_points=True, plain_zeros=True
    )


def _gptq(keys: _Gptq) -> WeightFormat:
    _require("bits", keys.bits, (4, 8))
    _require("checkpoint_format", keys.checkpoint_format, ("gptq", "gptq_v2"))
    _require("lm_head", keys.lm_head, (False,))
    _require("rotation", keys.rotation, (None,))
    if changed := [name for name in keys.dynamic or () if not name.startswith("-")]:
        _refuse("dynamic", changed[0], "patterns that begin with '-', whose modules are not quantized")
    return WeightFormat(
        method="gptq",
        bits=keys.bits,
        group_size=_group_size(keys.group_size, keys.bits),
        zero_points=not keys.sym,
        plain_zeros=keys.checkpoint_format == "gptq_v2",
        ordered=True,
    )


def _fp8(keys: _Fp8) -> WeightFormat:
    _require("fmt", keys.fmt, ("e4m3",))
    _require("weight_scale_semantics", keys.weight_scale_semantics, (None,))  # GPTQModel divides by its scales
    return WeightFormat(method="float8", bits=8, block=keys.weight_block_size and _block(keys.weight_block_size))


def _compressed(keys: _Compressed) -> WeightFormat:
    _require("format", keys.format, FORMATS)
    _require("config_groups", len(keys.config_groups), (1,))
    (group,) = keys.config_groups.values()
    weights = group.weights
    _require("type", weights.type, ("float", "int"))
    if weights.type == "float":
        _require("num_bits", weights.num_bits, (8,))
        _require("symmetric", weights.symmetric, (True,))
        _require("strategy", weights.strategy, ("tensor", "channel", "block"))
        block = _block(weights.block_structure) if weights.strategy == "block" else None
        return WeightFormat(method="float8", bits=8, block=block)
    packed = keys.format == "pack-quantized"
    _require("num_bits", weights.num_bits, (4, 8) if packed else (8,))
    _require("strategy", weights.strategy, ("tensor", "channel", "group"))
    size = weights.group_size if weights.strategy == "group" else -1
    return WeightFormat(
        method="packed" if packed else "bytes",
        bits=weights.num_bits,
        group_size=_group_size(0 if size is None else size, weights.num_bits),
        zero_points=not weights.symmetric,
        ordered=weights.actorder in (True, "group", "dynamic"),
    )


def _group_size(size: int, bits: int) -> int | None:
    word = 32 // bits
    if size != -1 and (size < word or size % word):
        _refuse("group_size", size, f"-1, or a multiple of {word}")
    return None if size == -1 else size


def _block(size: tuple[int, int] | None) -> tuple[int, int]:
    if size is None or min(size) < 1:
        _refuse("the size of a block", size, "two numbers of at least 1")
    return size


def _require(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        _refuse(name, value, " or ".join(map(repr, allowed)))


def _refuse(name: str, value: Any, allowed: str) -> NoReturn:
    raise CheckpointError(
        f"quantization_config: {name} is {value!r}, and kvllm computes {allowed}: use another checkpoint"
    )
