"""The form of the weights of a quantized checkpoint, read from `quantization_config` in its config.json."""

from __future__ import annotations

from typing import Any, NoReturn

import msgspec

from kvllm.errors import CheckpointError

METHODS = ("awq", "gptq", "fp8", "compressed-tensors")
"""Values of `quant_method` that most families compute."""
UNQUANTIZED = ("lm_head", "embed_tokens", "norm")
"""What a list of modules that are not quantized may name: no method quantizes them here anyway."""


class WeightFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How the matrices of all layers are stored; the embedding, the norms and the head are as in other checkpoints.

    method: "awq", "gptq", "float8", or "mxfp4" where only experts are quantized.
    bits: of a weight.
    group_size: weights of a row that share a scale; None for the whole row.
    zero_points: a group has a zero point, too. plain_zeros: it is stored as it is, and not less one.
    block: rows and columns that share a scale, with "float8"; None for one scale to a row or to the matrix.
    scale: the name of the tensor of scales.
    """

    method: str
    bits: int
    group_size: int | None = None
    zero_points: bool = False
    plain_zeros: bool = False
    block: tuple[int, int] | None = None
    scale: str = "scales"

    @property
    def integers(self) -> bool:
        """Whether weights stay integers. Those of other forms are expanded while they are read."""
        return self.method in ("awq", "gptq")


class _Awq(msgspec.Struct):
    bits: int
    group_size: int
    zero_point: bool = True
    version: str = "gemm"
    modules_to_not_convert: list[str] | None = None


class _Gptq(msgspec.Struct):
    bits: int
    group_size: int
    sym: bool = True
    checkpoint_format: str = "gptq"
    lm_head: bool = False
    dynamic: dict[str, Any] | None = None
    modules_to_not_convert: list[str] | None = None


class _Fp8(msgspec.Struct):
    weight_block_size: tuple[int, int] | None = None
    fmt: str = "e4m3"
    activation_scheme: str = "dynamic"
    modules_to_not_convert: list[str] | None = None


class _CompressedWeights(msgspec.Struct):
    num_bits: int
    type: str
    strategy: str
    symmetric: bool = True
    block_structure: tuple[int, int] | None = None


class _CompressedInputs(msgspec.Struct):
    dynamic: bool | str = True


class _CompressedGroup(msgspec.Struct):
    targets: list[str]
    weights: _CompressedWeights
    input_activations: _CompressedInputs | None = None


class _Compressed(msgspec.Struct):
    format: str
    config_groups: dict[str, _CompressedGroup]
    ignore: list[str] | None = None
    kv_cache_scheme: dict[str, Any] | None = None


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
    _check_unquantized(keys.modules_to_not_convert)
    return WeightFormat(
        method="awq", bits=4, group_size=_group_size(keys.group_size, 4), zero_points=True, plain_zeros=True
    )


def _gptq(keys: _Gptq) -> WeightFormat:
    _require("bits", keys.bits, (4, 8))
    _require("checkpoint_format", keys.checkpoint_format, ("gptq", "gptq_v2"))
    _require("lm_head", keys.lm_head, (False,))
    _require("dynamic", keys.dynamic or None, (None,))
    _check_unquantized(keys.modules_to_not_convert)
    return WeightFormat(
        method="gptq",
        bits=keys.bits,
        group_size=_group_size(keys.group_size, keys.bits),
        zero_points=not keys.sym,
        plain_zeros=keys.checkpoint_format == "gptq_v2",
    )


def _fp8(keys: _Fp8) -> WeightFormat:
    _require("fmt", keys.fmt, ("e4m3",))
    _require("activation_scheme", keys.activation_scheme, ("dynamic",))
    if keys.weight_block_size is None:
        _refuse("weight_block_size", None, "the size of a block, such as [128, 128]")
    _check_unquantized(keys.modules_to_not_convert)
    return WeightFormat(method="float8", bits=8, block=_block(keys.weight_block_size), scale="weight_scale_inv")


def _compressed(keys: _Compressed) -> WeightFormat:
    _require("format", keys.format, ("float-quantized",))
    _require("config_groups", len(keys.config_groups), (1,))
    _require("kv_cache_scheme", keys.kv_cache_scheme, (None,))
    (group,) = keys.config_groups.values()
    _require("targets", group.targets, (["Linear"],))
    _require("num_bits", group.weights.num_bits, (8,))
    _require("type", group.weights.type, ("float",))
    _require("symmetric", group.weights.symmetric, (True,))
    _require("strategy", group.weights.strategy, ("tensor", "channel", "block"))
    if group.input_activations is not None:
        _require("dynamic", bool(group.input_activations.dynamic), (True,))
    _check_unquantized(keys.ignore)
    block = _block(group.weights.block_structure) if group.weights.strategy == "block" else None
    return WeightFormat(method="float8", bits=8, block=block, scale="weight_scale")


def _group_size(size: int, bits: int) -> int | None:
    word = 32 // bits
    if size != -1 and (size < word or size % word):
        _refuse("group_size", size, f"-1, or a multiple of {word}")
    return None if size == -1 else size


def _block(size: tuple[int, int] | None) -> tuple[int, int]:
    if size is None or min(size) < 1:
        _refuse("the size of a block", size, "two numbers of at least 1")
    return size


def _check_unquantized(names: list[str] | None) -> None:
    for name in names or []:
        router = name.rstrip("$").endswith("gate")
        if not router and not any(kind in name for kind in UNQUANTIZED):
            _refuse("a list of modules that are not quantized", name, "lm_head, embeddings, norms and routers")


def _require(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        _refuse(name, value, " or ".join(map(repr, allowed)))


def _refuse(name: str, value: Any, allowed: str) -> NoReturn:
    raise CheckpointError(
        f"quantization_config: {name} is {value!r}, and kvllm computes {allowed}: use another checkpoint"
    )
