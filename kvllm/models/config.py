"""What kvllm needs to know of a model, read from the `config.json` of a Hugging Face checkpoint.

Only decoders that are computed exactly as Llama, with a bias on the query, key and value projections (Qwen2) or with
normalized query and key heads (Qwen3), are accepted. Everything else is refused by name: a model that runs with one
feature ignored gives fluent nonsense.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from kvllm.errors import CheckpointError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DTYPES = ("bfloat16", "float16", "float32")
ROPE_SCALINGS = ("linear", "llama3")

T = TypeVar("T")


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


class ModelConfig(msgspec.Struct, frozen=True):
    """One model. `dtype` is the checkpoint's own; `eos_token_ids` are all tokens that end a text, perhaps none."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


class _Rope(msgspec.Struct):
    """`rope_parameters` (transformers 5, which also holds the base) or `rope_scaling` (older)."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None


class _Config(msgspec.Struct):
    """The keys of `config.json` that matter here, and what transformers assumes where one is absent."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    partial_rotary_factor: float | None = None
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    sliding_window: int | None = None
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None


class _GenerationConfig(msgspec.Struct):
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None


def load_model_config(path: Path) -> ModelConfig:
    """Read `config.json` and, if there is one, `generation_config.json` of the model directory `path`.

    Raises CheckpointError if the directory or `config.json` is missing or malformed, or asks for a feature that kvllm
    does not compute.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory: give the directory of a checkpoint in Hugging Face format")
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{path} has no config.json: give the directory of a checkpoint in Hugging Face format")
    raw = _read(file, dict[str, Any])
    architecture = _architecture(file, raw)
    config = _convert(file, raw, _Config)
    _refuse_unsupported(file, architecture, config)
    generation_file = path / "generation_config.json"
    generation = _read(generation_file, _GenerationConfig) if generation_file.is_file() else _GenerationConfig()
    heads, kv_heads, head_dim = _heads(file, config)
    rope = config.rope_parameters or _Rope()
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=rope.rope_theta or config.rope_theta or 10000.0,
        rope_scaling=_rope_scaling(file, config),
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        dtype=_dtype(file, config),
        bos_token_id=config.bos_token_id if config.bos_token_id is not None else generation.bos_token_id,
        eos_token_ids=_eos_token_ids(config, generation),
    )


def _read(file: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{file}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}): download it again") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def _convert(file: Path, raw: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _architecture(file: Path, raw: dict[str, Any]) -> str:
    found = raw.get("architectures") or []
    for name in found:
        if name in ARCHITECTURES:
            return name
    raise CheckpointError(
        f"{file}: unsupported architecture {', '.join(map(str, found)) or '(none named)'}: "
        f"kvllm runs {', '.join(ARCHITECTURES)}"
    )


def _refuse_unsupported(file: Path, architecture: str, config: _Config) -> None:
    def refuse(what: str, advice: str = "use another checkpoint") -> None:
        raise CheckpointError(f"{file}: {what}, which kvllm does not support: {advice}")

    if config.quantization_config is not None:
        method = config.quantization_config.get("quant_method", "method not named")
        refuse(f"the weights are quantized ({method})", "use the checkpoint that is not quantized")
    if config.hidden_act != "silu":
        refuse(f"hidden_act is {config.hidden_act!r} instead of 'silu'")
    if config.mlp_bias:
        refuse("mlp_bias is true: the MLP projections have a bias")
    if config.attention_bias and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        refuse("attention_bias is true: all four attention projections, o_proj too, have a bias")
    if _uses_sliding_window(architecture, config):
        refuse(f"some layers attend only a sliding window (of {config.sliding_window} tokens)")
    for rope in (config, config.rope_parameters, config.rope_scaling):
        if rope is not None and rope.partial_rotary_factor not in (None, 1.0):
            refuse(f"partial_rotary_factor is {rope.partial_rotary_factor}: only a part of each head is rotated")


def _uses_sliding_window(architecture: str, config: _Config) -> bool:
    if architecture == "LlamaForCausalLM":
        return False
    if config.layer_types is not None:
        return any(kind != "full_attention" for kind in config.layer_types)
    if architecture == "MistralForCausalLM":
        return config.sliding_window is not None
    return config.use_sliding_window and config.max_window_layers < config.num_hidden_layers


def _heads(file: Path, config: _Config) -> tuple[int, int, int]:
    """Query heads, KV heads and head_dim, after checking that all sizes fit together."""
    sizes = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings"
    for name in sizes.split():
        if getattr(config, name) < 1:
            raise CheckpointError(f"{file}: {name} is {getattr(config, name)}, but must be at least 1")
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads if config.num_key_value_heads is not None else heads
    if kv_heads < 1 or heads % kv_heads:
        raise CheckpointError(
            f"{file}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if config.head_dim is None and config.hidden_size % heads:
        raise CheckpointError(
            f"{file}: hidden_size {config.hidden_size} is not a multiple of num_attention_heads {heads}, "
            "and no head_dim is given"
        )
    head_dim = config.head_dim if config.head_dim is not None else config.hidden_size // heads
    if head_dim < 2 or head_dim % 2:
        raise CheckpointError(f"{file}: head_dim is {head_dim}, but rotary embedding needs a positive even number")
    return heads, kv_heads, head_dim


def _rope_scaling(file: Path, config: _Config) -> RopeScaling | None:
    rope = config.rope_parameters or config.rope_scaling or _Rope()
    kind = rope.rope_type or rope.type or "default"
    if kind == "default":
        return None
    if kind not in ROPE_SCALINGS:
        raise CheckpointError(f"{file}: unsupported rope type {kind!r}: kvllm computes default, linear and llama3")
    needed = ["factor"]
    if kind == "llama3":
        needed += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    values = {name: getattr(rope, name) for name in needed}
    for name, value in values.items():
        if value is None or value <= 0:
            raise CheckpointError(f"{file}: rope type {kind!r} needs {name}, a positive number, but has {value}")
    if kind == "llama3" and values["low_freq_factor"] >= values["high_freq_factor"]:
        raise CheckpointError(
            f"{file}: rope low_freq_factor {values['low_freq_factor']} must be below "
            f"high_freq_factor {values['high_freq_factor']}"
        )
    return RopeScaling(kind, **values)


def _dtype(file: Path, config: _Config) -> str:
    dtype = (config.dtype or config.torch_dtype or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise CheckpointError(f"{file}: unsupported dtype {dtype!r}: kvllm reads {', '.join(DTYPES)}")
    return dtype


def _eos_token_ids(config: _Config, generation: _GenerationConfig) -> tuple[int, ...]:
    """Chat models often list the end of a turn in `generation_config.json` alone, so that file wins."""
    found = generation.eos_token_id if generation.eos_token_id is not None else config.eos_token_id
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(found)
