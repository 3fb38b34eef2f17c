"""The metadata of a GGUF file, and the keys of transformers' `config.json` that all architectures have.

What an absent key means is what llama.cpp assumes. Keys that change what a model computes, and that kvllm does not
compute, are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from kvllm.errors import CheckpointError
from kvllm.files.gguf.header import Header

NEUTRAL: dict[str, tuple[float, ...]] = {
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.temperature_scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.indexer.top_k": (0,),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "logit_scale": (0, 1),
    "router_logit_softcapping": (0,),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.alpha": (0,),
}
"""Keys that are not computed, with the values of those that mean nothing."""
FACTORS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
VECTORS = (FACTORS, SHORT, LONG)
"""Tensors that the config has."""
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
MOST_LAYERS = 1 << 10


class Metadata:
    """The values of one architecture, whose keys begin with its name, with errors that name them.

    read: reads a tensor of numbers, such as the factors of RoPE.
    """

    def __init__(self, header: Header, read: Callable[[str], list[float]]) -> None:
        self.header, self.read = header, read
        self.values = header.metadata
        self.architecture = self.values.get("general.architecture")

    def number(self, key: str, default: Any = ...) -> Any:
        """A number; where layers have one each, that of all. Raises CheckpointError without one or a default."""
        name = f"{self.architecture}.{key}"
        value = self.values.get(name, default)
        if isinstance(value, np.ndarray):
            if len(value) == 0 or np.any(value != value[0]):
                raise CheckpointError(f"{name} differs between layers, which kvllm does not support")
            value = value[0].item()
        if value is ...:
            raise CheckpointError(f"the metadata has no {name}, which a model of {self.architecture} needs")
        is_number = isinstance(value, int | float) and math.isfinite(value)
        if value is not default and (isinstance(value, bool) or not is_number):
            raise CheckpointError(f"{name} is {value!r:.80}, but must be a number")
        return value

    def layers(self) -> int:
        """Those of the decoder, without further ones that predict later tokens. Raises CheckpointError."""
        found = self.number("block_count") - self.number("nextn_predict_layers", 0)
        if not isinstance(found, int) or not 1 <= found <= MOST_LAYERS:
            raise CheckpointError(
                f"{self.architecture}.block_count says {found} layers, but must say 1 to {MOST_LAYERS}"
            )
        return found

    def of_layers(self, key: str) -> list[Any]:
        """A number of each layer. Raises CheckpointError without, or for a list of other numbers than layers."""
        name = f"{self.architecture}.{key}"
        value = self.values.get(name)
        if not isinstance(value, np.ndarray):
            return [self.number(key)] * self.layers()
        if len(value) != self.layers():
            raise CheckpointError(f"{name} has {len(value)} numbers, but there are {self.layers()} layers")
        return value.tolist()

    def token_id(self, name: str) -> int | None:
        found = self.values.get(f"tokenizer.ggml.{name}_token_id")
        return found if isinstance(found, int) else None

    def has(self, tensor: str) -> bool:
        return tensor in self.header.tensors


def base_config(data: Metadata, computed: Collection[str] = (), **given: float) -> dict[str, Any]:
    """The keys that all architectures share. computed: those of NEUTRAL that this one reads itself. given: values of
    keys of which the metadata does not have one for all layers."""
    for key, neutral in NEUTRAL.items():
        if key not in computed and data.number(key, neutral[0]) not in neutral:
            raise CheckpointError(f"{data.architecture}.{key} is {data.number(key)}, which kvllm does not support")
    if not data.has(EMBEDDING) or len(data.header.tensors[EMBEDDING].shape) != 2:
        raise CheckpointError(f"it has no matrix {EMBEDDING}")
    hidden, heads = data.number("embedding_length"), data.number("attention.head_count")
    head_dim = given.get("head_dim") or data.number("attention.key_length", None) or hidden // max(1, heads)
    if "head_dim" not in given and data.number("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{data.architecture}.attention.value_length is not key_length, {head_dim}")
    rotated = data.number("rope.dimension_count", head_dim)
    return {
        "vocab_size": data.header.tensors[EMBEDDING].shape[0],
        "hidden_size": hidden,
        "intermediate_size": given.get("intermediate_size") or data.number("feed_forward_length"),
        "num_hidden_layers": data.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": given.get("num_key_value_heads") or data.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "partial_rotary_factor": None if rotated == head_dim else rotated / max(1, head_dim),
        "rms_norm_eps": given.get("rms_norm_eps") or data.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": data.number("context_length"),
        "is_causal": data.values.get(f"{data.architecture}.attention.causal", True),
        "tie_word_embeddings": not data.has(HEAD),
        "dtype": _dtype(data.header),
        "bos_token_id": data.token_id("bos"),
        "eos_token_id": _eos_token_ids(data),
        "rope_theta": data.number("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(data),
    }


def rope_scaling(data: Metadata) -> dict[str, Any] | None:
    kind = data.values.get(f"{data.architecture}.rope.scaling.type", "linear")
    factor = data.number("rope.scaling.factor", 0) or data.number("rope.scale_linear", 0) or 1.0
    original = data.number("rope.scaling.original_context_length", None)
    attention_factor = data.number("rope.scaling.attn_factor", None)
    if data.has(LONG) and data.has(SHORT):
        short, long = data.read(SHORT), data.read(LONG)
    elif data.has(FACTORS):  # Llama 3's scaling: llama.cpp has a number for each frequency
        short = long = data.read(FACTORS)
        attention_factor = 1.0
        original = data.number("context_length")
    elif kind == "none" or (kind == "linear" and factor == 1):
        return None
    else:
        return _named_scaling(data, kind, factor, original, attention_factor)
    if kind == "yarn" or factor != 1:
        raise CheckpointError(f"RoPE has factors for each frequency beside scaling of type {kind!r:.80}")
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": attention_factor,
        "original_max_position_embeddings": original,
    }


def _named_scaling(
    data: Metadata, kind: Any, factor: float, original: int | None, attention_factor: float | None
) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind != "yarn":
        return scaling
    factors = [1.0]
    if data.architecture == "olmo2" and factor > 1:  # its converter writes what all others leave to llama.cpp
        factors.append(0.1 * math.log(factor) + 1)
    if not any(math.isclose(attention_factor or 1.0, each, rel_tol=1e-5) for each in factors):
        raise CheckpointError(f"rope.scaling.attn_factor of YaRN is {attention_factor}, which kvllm does not support")
    return scaling | {
        "original_max_position_embeddings": original,
        "beta_fast": data.number("rope.scaling.yarn_beta_fast", None),
        "beta_slow": data.number("rope.scaling.yarn_beta_slow", None),
    }


def _dtype(header: Header) -> str:
    """That of the matrices, which were of bfloat16 as a rule where they are quantized now."""
    types = {info.type.name for info in header.tensors.values() if len(info.shape) > 1} - {"F32"}
    if not types:
        return "float32"
    return "float16" if types == {"F16"} else "bfloat16"


def _eos_token_ids(data: Metadata) -> list[int]:
    """Those of a text, of a turn and of a message to a tool. With gpt-oss, a turn has parts, and the text goes on."""
    names = ("eos",) if data.architecture == "gpt-oss" else ("eos", "eot", "eom")
    return [token_id for name in names if (token_id := data.token_id(name)) is not None]
