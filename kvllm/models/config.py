"""The description of a model, read from the `config.json` of a Hugging Face checkpoint.

A decoder is accepted if all that its `config.json` asks for is computed. Everything else is refused by name: a model
that runs with one feature ignored gives fluent nonsense. Sizes are checked before anything is allocated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, NoReturn

import msgspec

from kvllm.attention.layer import LayerAttention
from kvllm.errors import CheckpointError, ConfigError
from kvllm.files.checkpoint import open_checkpoint
from kvllm.files.directory import some
from kvllm.models import CLASSIFIER, MODELS, model_family, what_is_not_computed
from kvllm.models.latent import Latent
from kvllm.models.mamba import Mamba
from kvllm.models.mixture import Experts
from kvllm.models.multimodal import TEXT_TYPES, text_config
from kvllm.models.nearest import nearest_family
from kvllm.models.recurrent import RecurrentLayers
from kvllm.models.rope import Rope, TopKeys, read_rope
from kvllm.models.two_sizes import TwoSizes
from kvllm.models.weight_format import METHODS, WeightFormat, read_weight_format

DTYPES = ("bfloat16", "float16", "float32")
DTYPE_NAMES = {"half": "float16", "float": "float32"}
"""Other names of dtypes, as in vLLM."""
EXPANDED = "dtype"
QUANTIZATIONS = {"int8": 8, "int4": 4, EXPANDED: None}
"""Bits of the weights that are made when a model is loaded; None for those of `dtype`, whatever a GGUF file has."""
LARGEST = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 11,
    "head_dim": 1 << 11,
    "max_position_embeddings": 1 << 24,
}
"""Bounds of sizes, far above those of any published model. A larger number is a mistake, or an attack."""
MOST_WEIGHTS = 1 << 42
MOST_KV_NUMBERS = 1 << 22
"""Numbers in the KV pairs of one token, of all layers together. Published models have up to 1.3 million."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One model, as kvllm computes it.

    architecture: a key of `kvllm.models.MODELS`. text_of: that of a multimodal checkpoint whose text model it is.
    num_layers: those with attention, which all that is said of layers is about, but `recurrent` and `experts`.
    num_query_heads, num_kv_heads: of the whole model; each has `head_dim` numbers.
    weight_format: None unless the checkpoint is quantized.
    layers: the options of each layer's attention; none: all attend all earlier tokens, with a plain softmax.
    softmax_scale: what products of queries and keys are multiplied by; None: `head_dim ** -0.5`.
    max_position_embeddings: tokens of the longest text, those that the scaling of `rope` adds among them.
    qkv_bias: a bias is added to queries, keys and values. output_bias: to the output of attention, mlp_bias: to all
        projections of the MLP. qk_norm: heads of queries and keys are normalized before RoPE.
    fused_projections: the checkpoint has one tensor of queries, keys and values, and one of gate and up projection.
    second_rope: of the layers `second_rope_layers`, where they have another.
    norm_offset: what is added to the checkpoint's weights of norms. float32_norms: these are of float32, whatever dtype
        the model is computed in, as they are where norm_offset is not 0.
    embedding_scale: embedded tokens are multiplied by it. logit_cap: logits are bounded by it (`LayerAttention`).
    residual_multiplier: what attention and MLP add to the residual is multiplied by it. logit_divisor: logits are
        divided by it.
    query_scaling_beta: queries grow by it with the logarithm of their position, in pretraining lengths (Ministral 3).
    experts: None unless layers have a mixture of experts, whose size is then not `intermediate_size`.
    latent: None unless heads share latents: the one KV head and its head_dim are then those of the cache.
    two_sizes: None unless heads have two sizes: num_kv_heads and head_dim are then those of the cache, and num_layers
        counts those that have KV pairs.
    recurrent: None unless other layers hold a state in the place of KV pairs.
    mamba: None unless all layers have Mamba-2 heads beside attention, and so KV pairs and the state of `recurrent`.
    dtype: the checkpoint's own, one of DTYPES.
    eos_token_ids: all tokens that end a text, perhaps none: those of both files, and in an engine the tokenizer's, too.
    generates: without it, the model ends with hidden states: it has no head, and the checkpoint's, if any, is not its.
    mtp_prefix: of the names of a layer's tensors that predicts later tokens, if the checkpoint has one of a known form.
        is_mtp: this is that layer alone (`MTPDecoder`).
    causal: without it, tokens attend those after them, too; a window of w tokens then reaches w - 1 to either side.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    tie_word_embeddings: bool
    weight_format: WeightFormat | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layers: tuple[LayerAttention, ...] = ()
    softmax_scale: float | None = None
    fused_projections: bool = False
    second_rope: Rope | None = None
    second_rope_layers: tuple[int, ...] = ()
    norm_offset: float = 0.0
    float32_norms: bool = False
    embedding_scale: float = 1.0
    logit_cap: float | None = None
    residual_multiplier: float = 1.0
    logit_divisor: float = 1.0
    query_scaling_beta: float = 0.0
    experts: Experts | None = None
    latent: Latent | None = None
    two_sizes: TwoSizes | None = None
    recurrent: RecurrentLayers | None = None
    mamba: Mamba | None = None
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    text_of: str | None = None
    mtp_prefix: str | None = None
    is_mtp: bool = False
    generates: bool = True
    causal: bool = True

    @property
    def mlp_columns(self) -> dict[str, int]:
        """Sizes of the model's MLPs, which ranks share out, by their names."""
        dense = self.experts is None or bool(self.experts.dense_layers)
        columns = {"MLP columns": self.intermediate_size} if dense else {}
        if self.experts is not None:
            columns["MLP columns of an expert"] = self.experts.intermediate_size
            if self.experts.shared_intermediate_size:
                columns["MLP columns of the shared expert"] = self.experts.shared_intermediate_size
        return columns

    @property
    def num_decoder_layers(self) -> int:
        """All layers, those without attention among them."""
        if self.two_sizes:
            return len(self.two_sizes.slides)
        return self.num_layers + (len(self.recurrent.indices) if self.recurrent and not self.mamba else 0)

    @property
    def recurrent_parts(self) -> dict[str, int]:
        """What ranks share out of layers with a state, by its name."""
        if self.recurrent is None:
            return {}
        if self.mamba:
            return {"Mamba-2 heads": self.recurrent.value_heads}
        if self.recurrent.key_heads:
            return {"key heads of linear attention": self.recurrent.key_heads}
        return {"channels of convolutions": self.recurrent.channels}

    @property
    def mtp(self) -> ModelConfig:
        """The layer that predicts later tokens, as a model of one layer. Raises ConfigError if there is none."""
        if self.mtp_prefix is None:
            raise ConfigError(
                "speculative_config: method='mtp' is not allowed: the checkpoint has no layer for it that kvllm knows, "
                "as those of Qwen3.5, or with num_nextn_predict_layers in config.json, of GLM and DeepSeek-V3: use "
                "another method"
            )
        experts = self.experts and msgspec.structs.replace(self.experts, dense_layers=())
        return msgspec.structs.replace(self, num_layers=1, layers=(), recurrent=None, experts=experts, is_mtp=True)

    @property
    def shares_kv_pairs(self) -> bool:
        """Whether layers attend the KV pairs of others."""
        return self.two_sizes is not None and self.two_sizes.shares

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None: it attends all earlier tokens."""
        return tuple(layer.window for layer in self.layers) or (None,) * self.num_layers

    @property
    def residual_eps(self) -> float:
        """That of norms of the residual. A residual that is kept divided by the multiplier needs no multiplications,
        and its norm is the same with this."""
        return self.rms_norm_eps / self.residual_multiplier**2

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale


class ConfigKeys(TopKeys, kw_only=True):
    """The keys of `config.json` that all families share, and what transformers assumes where one is absent.

    A family with keys or defaults of its own extends this class.

    DTYPE: the dtype where none is given. QUANTIZED: values of `quant_method` that the family computes. LAYER_TYPES:
        what `layer_types` may say beside kinds of attention.
    """

    DTYPE: ClassVar[str] = "float32"
    QUANTIZED: ClassVar[tuple[str, ...]] = METHODS
    LAYER_TYPES: ClassVar[tuple[str, ...]] = ()

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    model_type: str | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    hidden_act: str | msgspec.UnsetType = msgspec.UNSET
    mlp_bias: bool | None = None
    is_causal: bool = True
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    attention_chunk_size: int | None = None
    kv_sharing_modes: list[str] | None = None
    per_layer_config: Any = None
    num_nextn_predict_layers: int | None = None
    quantization_config: dict[str, Any] | None = None
    text_of: str | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None


class _GenerationConfig(msgspec.Struct):
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None


def load_model_config(path: Path, overrides: dict[str, Any] | None = None, *, generates: bool = True) -> ModelConfig:
    """The config of the checkpoint `path`, and tokens that its `generation_config.json` names, if there is one.

    overrides: keys with other values than `config.json` has. generates: without it, the checkpoint may be a classifier,
        and its tokens may attend those after them.

    Raises CheckpointError if the directory or `config.json` is missing, a file is malformed or has sizes that cannot
    be, or asks for a feature that kvllm does not compute.
    """
    checkpoint = open_checkpoint(path)
    try:
        generation = msgspec.convert(checkpoint.generation_config(), _GenerationConfig)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path / 'generation_config.json'}: {error}") from error
    try:
        raw = text_config(checkpoint.config()) | (overrides or {})
        return _model_config(raw, generation) if generates else _encoder_config(raw, generation)
    except (CheckpointError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{checkpoint.config_file}: {error}") from error


def refuse(what: str, advice: str = "use another checkpoint") -> NoReturn:
    """Raise CheckpointError for `what` a checkpoint asks for."""
    raise CheckpointError(f"{what}, which kvllm does not support: {advice}")


def _model_config(raw: dict[str, Any], generation: _GenerationConfig) -> ModelConfig:
    architecture = _architecture(raw)
    family = model_family(architecture)
    keys = msgspec.convert(raw, family.keys)
    if keys.model_type not in (None, family.model_type):
        refuse(f"model_type is {keys.model_type!r} instead of {family.model_type!r}, that of {architecture}")
    if keys.hidden_act not in (msgspec.UNSET, family.hidden_act):
        refuse(f"hidden_act is {keys.hidden_act!r} instead of {family.hidden_act!r}")
    _check_sizes(keys)
    heads, kv_heads, head_dim = _heads(keys)
    rope = read_rope(keys.rope_keys(), head_dim)
    if not keys.SCALED:
        keys.max_position_embeddings = rope.longest_text(keys.max_position_embeddings)
        check_size("max_position_embeddings", keys.max_position_embeddings)
    _refuse_unsupported(keys)
    fields = family.read(keys)
    if keys.mlp_bias and not fields.get("mlp_bias"):
        refuse("mlp_bias is true: the MLP projections have a bias")
    common: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": keys.vocab_size,
        "hidden_size": keys.hidden_size,
        "intermediate_size": keys.intermediate_size,
        "num_layers": keys.num_hidden_layers,
        "num_query_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": keys.rms_norm_eps,
        "rope": rope,
        "max_position_embeddings": keys.max_position_embeddings,
        "tie_word_embeddings": keys.tie_word_embeddings,
        "weight_format": _weight_format(keys),
        "dtype": _dtype(keys),
        "bos_token_id": keys.bos_token_id if keys.bos_token_id is not None else generation.bos_token_id,
        "eos_token_ids": _eos_token_ids(keys, generation),
        "text_of": keys.text_of,
        "mtp_prefix": _mtp_prefix(keys) if family.extra_layers else None,
    }
    config = ModelConfig(**common | fields)
    _check_totals(config)
    _check_token_ids(config)
    return config


def _encoder_config(raw: dict[str, Any], generation: _GenerationConfig) -> ModelConfig:
    """The config of what comes before a head."""
    names = [str(name).replace(CLASSIFIER, "ForCausalLM") for name in raw.get("architectures") or ()]
    names = [name.replace("TextForCausalLM", "ForCausalLM") for name in names]
    causal = raw.get("use_bidirectional_attention") not in (True, "all") and raw.get("is_causal") is not False
    changed: dict[str, Any] = {} if causal else {"use_bidirectional_attention": None, "is_causal": True}
    if not causal and isinstance(window := raw.get("sliding_window"), int):
        changed["sliding_window"] = window // 2 + 1  # as transformers reads Gemma's
    config = _model_config(raw | {"architectures": names} | changed, generation)
    config = msgspec.structs.replace(config, generates=False, causal=causal)
    return config if causal else _both_ways(config, raw)


def _both_ways(config: ModelConfig, raw: dict[str, Any]) -> ModelConfig:
    """The config of a model whose tokens attend those after them, too."""
    if any(layer.soft_cap is not None or layer.sinks for layer in config.layers):
        refuse("tokens attend to those after them, and scores of attention are bounded or have sinks")
    if raw.get("is_causal") is False and any(config.windows):
        refuse("is_causal is false, and layers have windows")
    return msgspec.structs.replace(config, layers=tuple(LayerAttention(layer.window) for layer in config.layers))


def _architecture(raw: dict[str, Any]) -> str:
    found = raw.get("architectures") or []
    if not isinstance(found, list):
        raise CheckpointError(f"architectures is {found!r}, but must be a list of names")
    for name in MODELS:
        if name in found or _is_base_class(raw, found, name):
            return name
    reasons = [what_is_not_computed(name) for name in map(str, found)]
    reason = "".join(f", which has {each}" for each in reasons if each)
    raise CheckpointError(
        f"unsupported architecture {', '.join(map(str, found)) or '(none named)'}{reason}: kvllm runs "
        f"{', '.join(MODELS)}, and the text models of {', '.join(TEXT_TYPES)}{_nearest(raw)}"
    )


def _nearest(raw: dict[str, Any]) -> str:
    """The family that is most like a config that is refused, and what differs."""

    text = raw.get("text_config")
    config = raw | (text if isinstance(text, dict) else {})

    def refusal(name: str) -> str | None:
        try:
            _model_config({**config, "architectures": [name], "model_type": None}, _GenerationConfig())
        except (CheckpointError, msgspec.ValidationError) as error:
            return str(error)
        return None

    nearest = nearest_family(config, refusal)
    if nearest is None:
        return ""
    reasons = [f"it does not read {some(nearest.unread)}"] if nearest.unread else []
    reasons += [nearest.refusal] if nearest.refusal else []
    return (
        f". By config.json, the nearest is {nearest.name}: {'; '.join(reasons) or 'it reads all keys'}. Whether they "
        "are one, only their code says: docs/add-a-model.md"
    )


def _is_base_class(raw: dict[str, Any], found: list[Any], architecture: str) -> bool:
    """Whether the checkpoint was saved from the model without its head: its config names `LlamaModel`, for example."""
    base = architecture.removesuffix("ForCausalLM")
    named = f"{base}Model" in found or f"{base}TextModel" in found
    return named and raw.get("model_type") == model_family(architecture).model_type


def _refuse_unsupported(keys: ConfigKeys) -> None:
    """Refuse the features that no family computes. transformers reads these keys for every family."""
    if not keys.is_causal:
        refuse("is_causal is false: tokens attend to those after them, too")
    if keys.attention_chunk_size is not None and keys.attention_chunk_size < keys.max_position_embeddings:
        refuse(f"attention_chunk_size is {keys.attention_chunk_size}: tokens attend only their own chunk of the text")
    if keys.kv_sharing_modes is not None:
        refuse("kv_sharing_modes is given: layers may share their KV pairs")
    if keys.per_layer_config is not None:
        refuse("per_layer_config is given: layers may have other sizes than config.json itself says")
    if keys.layer_types is not None:
        _check_layer_types(keys, keys.layer_types)


def _check_layer_types(keys: ConfigKeys, layer_types: list[str]) -> None:
    for kind in layer_types:
        if kind not in (*keys.LAYER_TYPES, "full_attention", "attention", "sliding_attention"):
            refuse(f"layer_types has {kind!r}", "all layers must have attention, and none Mamba or linear attention")
    if len(layer_types) != keys.num_hidden_layers:
        raise CheckpointError(
            f"layer_types names {len(layer_types)} layers, but num_hidden_layers is {keys.num_hidden_layers}"
        )


def _check_sizes(keys: ConfigKeys) -> None:
    for name in LARGEST:
        check_size(name, getattr(keys, name))
    if not 0 <= keys.rms_norm_eps <= 1:
        raise CheckpointError(f"rms_norm_eps is {keys.rms_norm_eps}, but must be at least 0 and at most 1")


def check_size(name: str, size: int | None) -> None:
    """Raise CheckpointError for a size that cannot be. name: a key of LARGEST."""
    if size is not None and not 1 <= size <= LARGEST[name]:
        raise CheckpointError(f"{name} is {size}, but must be at least 1 and at most {LARGEST[name]}")


def _heads(keys: ConfigKeys) -> tuple[int, int, int]:
    """Query heads, KV heads and head_dim, after checking that they fit together."""
    heads = keys.num_attention_heads
    kv_heads = keys.num_key_value_heads if keys.num_key_value_heads is not None else heads
    if kv_heads < 1 or heads % kv_heads:
        raise CheckpointError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if keys.head_dim is None and keys.hidden_size % heads:
        raise CheckpointError(
            f"hidden_size {keys.hidden_size} is not a multiple of num_attention_heads {heads}, and no head_dim is given"
        )
    head_dim = keys.head_dim if keys.head_dim is not None else keys.hidden_size // heads
    check_size("head_dim", head_dim)
    if head_dim % 2:
        raise CheckpointError(f"head_dim is {head_dim}, but rotary embedding needs a positive even number")
    return heads, kv_heads, head_dim


def _check_totals(config: ModelConfig) -> None:
    """Sizes that are possible one by one may be absurd together."""
    heads = 2 * (config.num_query_heads + config.num_kv_heads)
    experts = config.experts
    inner = config.intermediate_size
    if experts:
        inner += experts.count * experts.intermediate_size + experts.shared_intermediate_size
    layer = config.hidden_size * (heads * config.head_dim + 3 * inner)
    weights = config.num_layers * layer + config.vocab_size * config.hidden_size
    if recurrent := config.recurrent:
        recurrent.check()
        weights += len(recurrent.indices) * config.hidden_size * (4 * recurrent.channels + 3 * inner)
    if config.num_layers < 1:
        refuse("no layer has attention")
    if weights > MOST_WEIGHTS:
        raise CheckpointError(f"its sizes imply {weights:,} weights, more than the {MOST_WEIGHTS:,} that kvllm allows")
    numbers = (1 if config.latent else 2) * config.num_layers * config.num_kv_heads * config.head_dim
    if numbers > MOST_KV_NUMBERS:
        raise CheckpointError(
            f"its sizes imply {numbers:,} numbers for the keys and values of one token, more than the "
            f"{MOST_KV_NUMBERS:,} that kvllm allows"
        )


def _mtp_prefix(keys: ConfigKeys) -> str | None:
    return f"model.layers.{keys.num_hidden_layers}" if keys.num_nextn_predict_layers else None


def _weight_format(keys: ConfigKeys) -> WeightFormat | None:
    settings = keys.quantization_config
    return None if settings is None else read_weight_format(settings, keys.QUANTIZED)


def _dtype(keys: ConfigKeys) -> str:
    dtype = (keys.dtype or keys.torch_dtype or keys.DTYPE).removeprefix("torch.")
    if dtype not in DTYPES:
        raise CheckpointError(f"unsupported dtype {dtype!r}: kvllm reads {', '.join(DTYPES)}")
    return dtype


def _eos_token_ids(keys: ConfigKeys, generation: _GenerationConfig) -> tuple[int, ...]:
    """Those of both files: chat models often name the end of a turn in one of them alone."""
    found: list[int] = []
    for named in (generation.eos_token_id, keys.eos_token_id):
        found += [named] if isinstance(named, int) else named or []
    return tuple(dict.fromkeys(found))


def _check_token_ids(config: ModelConfig) -> None:
    bos = () if config.bos_token_id is None else (config.bos_token_id,)
    for name, token_ids in (("bos_token_id", bos), ("eos_token_id", config.eos_token_ids)):
        for token_id in token_ids:
            if not 0 <= token_id < config.vocab_size:
                raise CheckpointError(
                    f"{name} {token_id}, here or in generation_config.json, is not in the vocabulary: it must be at "
                    f"least 0 and below vocab_size {config.vocab_size}"
                )
