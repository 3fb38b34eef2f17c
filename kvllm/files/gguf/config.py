"""The metadata of a GGUF file as the keys of transformers' `config.json`.

transformers' own table leaves out the scaling of RoPE, windows and head sizes, so it is not used. What an absent key
means is what llama.cpp assumes. Keys that change what a model computes, and that kvllm does not compute, are refused.
"""

from __future__ import annotations

import math
import re
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
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
GEMMA_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of the models whose scores are scaled by their hidden size, which the metadata does not say."""
DENSE = re.compile(r"blk\.(\d{1,6})\.ffn_gate\.weight")
"""What a layer without experts has."""
SOFTMAX, SIGMOID = 1, 2
"""Numbers of the functions of routers."""


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

    def token_id(self, name: str) -> int | None:
        found = self.values.get(f"tokenizer.ggml.{name}_token_id")
        return found if isinstance(found, int) else None

    def has(self, tensor: str) -> bool:
        return tensor in self.header.tensors


def base_config(data: Metadata, computed: Collection[str] = (), kv_heads: int | None = None) -> dict[str, Any]:
    """The keys that all architectures share. computed: those of NEUTRAL that this one reads itself. kv_heads: where the
    metadata does not have one number for all layers."""
    for key, neutral in NEUTRAL.items():
        if key not in computed and data.number(key, neutral[0]) not in neutral:
            raise CheckpointError(f"{data.architecture}.{key} is {data.number(key)}, which kvllm does not support")
    if not data.has(EMBEDDING) or len(data.header.tensors[EMBEDDING].shape) != 2:
        raise CheckpointError(f"it has no matrix {EMBEDDING}")
    hidden, heads = data.number("embedding_length"), data.number("attention.head_count")
    head_dim = data.number("attention.key_length", None) or hidden // max(1, heads)
    if data.number("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{data.architecture}.attention.value_length is not key_length, {head_dim}")
    rotated = data.number("rope.dimension_count", head_dim)
    return {
        "vocab_size": data.header.tensors[EMBEDDING].shape[0],
        "hidden_size": hidden,
        "intermediate_size": data.number("feed_forward_length"),
        "num_hidden_layers": data.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or data.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "partial_rotary_factor": None if rotated == head_dim else rotated / max(1, head_dim),
        "rms_norm_eps": data.number("attention.layer_norm_rms_epsilon"),
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


def llama(data: Metadata) -> dict[str, Any]:
    config = base_config(data)
    if data.number("expert_count", 0):
        _check_router(data)
        return config | {
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": data.number("expert_count"),
            "num_experts_per_tok": data.number("expert_used_count"),
        }
    return config | {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": data.has("blk.0.attn_q.bias"),
        "mlp_bias": data.has("blk.0.ffn_up.bias"),
    }


def glm4(data: Metadata) -> dict[str, Any]:
    config = base_config(data)
    return config | {
        "architectures": ["Glm4ForCausalLM"],
        "attention_bias": data.has("blk.0.attn_q.bias"),
        "partial_rotary_factor": config["partial_rotary_factor"] or 1.0,
    }


def glm4_moe(data: Metadata) -> dict[str, Any]:
    config = base_config(data, ("expert_shared_count", "expert_weights_scale", "nextn_predict_layers"))
    _check_router(data, SIGMOID)
    return config | {
        "architectures": ["Glm4MoeForCausalLM"],
        "num_hidden_layers": config["num_hidden_layers"] - data.number("nextn_predict_layers", 0),
        "attention_bias": data.has("blk.0.attn_q.bias"),
        "partial_rotary_factor": config["partial_rotary_factor"] or 1.0,
        "use_qk_norm": data.has("blk.0.attn_q_norm.weight"),
        "n_routed_experts": data.number("expert_count"),
        "n_shared_experts": data.number("expert_shared_count"),
        "num_experts_per_tok": data.number("expert_used_count"),
        "moe_intermediate_size": data.number("expert_feed_forward_length"),
        "norm_topk_prob": data.values.get("glm4moe.expert_weights_norm", False),
        "routed_scaling_factor": data.number("expert_weights_scale", 1.0),
        "first_k_dense_replace": data.number("leading_dense_block_count", 0),
    }


def granite(data: Metadata) -> dict[str, Any]:
    keys = {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    config = base_config(data, keys)
    # Without a scale of scores, llama.cpp takes that of Llama.
    defaults = {"attention.scale": max(1, config["head_dim"]) ** -0.5}
    return config | {
        "architectures": ["GraniteForCausalLM"],
        "attention_bias": data.has("blk.0.attn_q.bias"),
        "mlp_bias": data.has("blk.0.ffn_up.bias"),
        **{name: data.number(key, 0) or defaults.get(key, 1.0) for key, name in keys.items()},
    }


def qwen2(data: Metadata) -> dict[str, Any]:
    return base_config(data) | {"architectures": ["Qwen2ForCausalLM"]}


def qwen3(data: Metadata) -> dict[str, Any]:
    return base_config(data) | {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": data.has("blk.0.attn_q.bias"),
    }


def qwen3_moe(data: Metadata) -> dict[str, Any]:
    _check_router(data)
    return base_config(data) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": data.number("expert_count"),
        "num_experts_per_tok": data.number("expert_used_count"),
        "moe_intermediate_size": data.number("expert_feed_forward_length"),
        "norm_topk_prob": data.values.get(f"{data.architecture}.expert_weights_norm", True),
        "mlp_only_layers": [int(match[1]) for name in data.header.tensors if (match := DENSE.fullmatch(name))],
    }


def olmo2(data: Metadata) -> dict[str, Any]:
    """OLMo 3 has the same name, and windows."""
    config = base_config(data) | {"attention_bias": data.has("blk.0.attn_q.bias")}
    pattern = data.values.get("olmo2.attention.sliding_window_pattern")
    if not isinstance(pattern, np.ndarray):
        return config | {"architectures": ["Olmo2ForCausalLM"]}
    return config | {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": data.number("attention.sliding_window"),
        "layer_types": _layer_types(pattern),
    }


def lfm2(data: Metadata) -> dict[str, Any]:
    """Layers without KV heads are convolutions."""
    of_layers = data.values.get("lfm2.attention.head_count_kv")
    of_layers = of_layers.tolist() if isinstance(of_layers, np.ndarray) else []
    numbers = {number for number in of_layers if number}
    if len(numbers) != 1:
        raise CheckpointError("lfm2.attention.head_count_kv must have one number for layers with attention, and 0")
    config = base_config(data, kv_heads=numbers.pop())
    return config | {
        "architectures": ["Lfm2ForCausalLM"],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": data.number("shortconv.l_cache"),
        "layer_types": ["full_attention" if number else "conv" for number in of_layers],
        "norm_eps": config["rms_norm_eps"],
    }


def smollm3(data: Metadata) -> dict[str, Any]:
    return llama(data) | {"architectures": ["SmolLM3ForCausalLM"]}


def phi3(data: Metadata) -> dict[str, Any]:
    config = base_config(data)
    return config | {
        "architectures": ["Phi3ForCausalLM"],
        "original_max_position_embeddings": (config["rope_scaling"] or {}).get("original_max_position_embeddings"),
        "sliding_window": data.number("attention.sliding_window", 0) or None,
    }


def gemma2(data: Metadata) -> dict[str, Any]:
    return _gemma(data) | {
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": data.number("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": data.number("final_logit_softcapping", 30.0) or None,
    }


def gemma3(data: Metadata) -> dict[str, Any]:
    config = _gemma(data)
    pattern = data.values.get("gemma3.attention.sliding_window_pattern", 6)
    layers = {"sliding_window_pattern": pattern}
    if isinstance(pattern, np.ndarray):
        layers = {"layer_types": _layer_types(pattern)}
    return (
        config
        | layers
        | {
            "architectures": ["Gemma3ForCausalLM"],
            "rope_local_base_freq": data.number("rope.freq_base_swa", 10000.0),
            "final_logit_softcapping": data.number("final_logit_softcapping", 0) or None,
        }
    )


def gpt_oss(data: Metadata) -> dict[str, Any]:
    config = base_config(data)
    scaling = config["rope_scaling"]
    if scaling is not None and scaling["rope_type"] == "yarn":
        scaling["truncate"] = False  # the model was trained so, and the metadata does not say it
    return config | {
        "architectures": ["GptOssForCausalLM"],
        "intermediate_size": data.number("expert_feed_forward_length"),
        "num_local_experts": data.number("expert_count"),
        "num_experts_per_tok": data.number("expert_used_count"),
        "sliding_window": data.number("attention.sliding_window"),
    }


def _gemma(data: Metadata) -> dict[str, Any]:
    config = base_config(data)
    scaled_by_hidden = config["num_hidden_layers"] == GEMMA_27B[data.architecture or ""]
    per_head = config["hidden_size"] // max(1, config["num_attention_heads"])
    return config | {
        "query_pre_attn_scalar": per_head if scaled_by_hidden else config["head_dim"],
        "sliding_window": data.number("attention.sliding_window", 4096),
    }


def _layer_types(pattern: np.ndarray) -> list[str]:
    return ["sliding_attention" if slides else "full_attention" for slides in pattern]


def _check_router(data: Metadata, computed: int = SOFTMAX) -> None:
    function = data.number("expert_gating_func", computed)
    if function not in (0, computed):
        raise CheckpointError(
            f"{data.architecture}.expert_gating_func is {function}: kvllm computes {computed}, of "
            f"{SOFTMAX}, softmax, and {SIGMOID}, sigmoid"
        )


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
