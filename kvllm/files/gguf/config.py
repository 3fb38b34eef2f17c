"""The config of a GGUF file's architecture: its metadata as the keys of transformers' `config.json`.

transformers' own table leaves out the scaling of RoPE, windows and head sizes, so it is not used.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from kvllm.errors import CheckpointError
from kvllm.files.gguf.metadata import FACTORS, Metadata, base_config

GEMMA_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of the models whose scores are scaled by their hidden size, which the metadata does not say."""
DENSE = re.compile(r"blk\.(\d{1,6})\.ffn_gate\.weight")
"""What a layer without experts has."""
STOPPED = 1e20
"""From here on, what a frequency of RoPE is divided by leaves nothing of it."""
SOFTMAX, SIGMOID = 1, 2
"""Numbers of the functions of routers."""


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
    return (
        config
        | _experts_beside_an_mlp(data)
        | {
            "architectures": ["Glm4MoeForCausalLM"],
            "attention_bias": data.has("blk.0.attn_q.bias"),
            "partial_rotary_factor": config["partial_rotary_factor"] or 1.0,
            "use_qk_norm": data.has("blk.0.attn_q_norm.weight"),
        }
    )


def deepseek2(data: Metadata) -> dict[str, Any]:
    """DeepSeek-V3, and what llama.cpp calls so, too, and is the same with other numbers, such as GLM-4.7-Flash.

    Where keys and values of heads are two matrices, `key_length` is that of the cache, and the heads' has a name of its
    own.
    """
    computed = (
        *("expert_shared_count", "expert_group_count", "expert_weights_scale", "nextn_predict_layers"),
        "rope.scaling.yarn_log_multiplier",
    )
    rotated = data.number("rope.dimension_count")
    config = base_config(data, computed, head_dim=rotated)
    # Without a function, DeepSeek-V2's: that of GLM-4.7-Flash was not written at first.
    corrected = any(".exp_probs_b" in name for name in data.header.tensors)
    _check_router(data, SIGMOID, default=SIGMOID if corrected else SOFTMAX)
    key, value = (
        data.number(f"attention.{name}_length_mla", 0) or data.number(f"attention.{name}_length")
        for name in ("key", "value")
    )
    strength = round(10 * data.number("rope.scaling.yarn_log_multiplier", 0), 6)  # a tenth is in the file
    if config["rope_scaling"] and strength:
        config["rope_scaling"] |= {"mscale": strength, "mscale_all_dim": strength}
    return (
        config
        | _experts_beside_an_mlp(data)
        | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "q_lora_rank": data.number("attention.q_lora_rank", 0) or None,
            "kv_lora_rank": data.number("attention.kv_lora_rank"),
            "qk_rope_head_dim": rotated,
            "qk_nope_head_dim": key - rotated,
            "v_head_dim": value,
            "n_group": data.number("expert_group_count", 0) or 1,
            "topk_group": data.number("expert_group_used_count", 0) or 1,
        }
    )


def _experts_beside_an_mlp(data: Metadata) -> dict[str, Any]:
    return {
        "num_hidden_layers": data.layers(),
        "num_nextn_predict_layers": data.number("nextn_predict_layers", 0) or None,
        "n_routed_experts": data.number("expert_count"),
        "n_shared_experts": data.number("expert_shared_count"),
        "num_experts_per_tok": data.number("expert_used_count"),
        "moe_intermediate_size": data.number("expert_feed_forward_length"),
        "norm_topk_prob": data.values.get(f"{data.architecture}.expert_weights_norm", False),
        "routed_scaling_factor": data.number("expert_weights_scale", 0) or 1.0,
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


def falcon_h1(data: Metadata) -> dict[str, Any]:
    """With all multipliers one, as the weights have them."""
    return base_config(data) | {
        "architectures": ["FalconH1ForCausalLM"],
        "attention_bias": data.has("blk.0.attn_q.bias"),
        "mlp_bias": data.has("blk.0.ffn_up.bias"),
        "mamba_d_ssm": data.number("ssm.inner_size"),
        "mamba_n_heads": data.number("ssm.time_step_rank"),
        "mamba_n_groups": data.number("ssm.group_count"),
        "mamba_d_state": data.number("ssm.state_size"),
        "mamba_d_conv": data.number("ssm.conv_kernel"),
        "mamba_conv_bias": data.has("blk.0.ssm_conv1d.bias"),
        "mamba_rms_norm": data.has("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def qwen35(data: Metadata) -> dict[str, Any]:
    return (
        base_config(data, ("nextn_predict_layers",)) | _delta_layers(data) | {"architectures": ["Qwen3_5ForCausalLM"]}
    )


def qwen35_moe(data: Metadata) -> dict[str, Any]:
    """Qwen3-Next, too: with its projections in separate tensors, it is Qwen3.5."""
    _check_router(data)
    config = base_config(data, ("nextn_predict_layers",), intermediate_size=1)  # of no layer
    return (
        config
        | _delta_layers(data)
        | {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "num_experts": data.number("expert_count"),
            "num_experts_per_tok": data.number("expert_used_count"),
            "moe_intermediate_size": data.number("expert_feed_forward_length"),
            "shared_expert_intermediate_size": data.number("expert_shared_feed_forward_length"),
        }
    )


def _delta_layers(data: Metadata) -> dict[str, Any]:
    """The keys of Gated DeltaNet, with the names that the metadata has for Mamba's."""
    heads, layers = data.number("ssm.time_step_rank"), range(data.layers())
    linear = [data.has(f"blk.{i}.ssm_out.weight") for i in layers]
    return {
        "num_hidden_layers": len(layers),
        "layer_types": ["linear_attention" if each else "full_attention" for each in linear],
        "linear_conv_kernel_dim": data.number("ssm.conv_kernel"),
        "linear_key_head_dim": data.number("ssm.state_size"),
        "linear_value_head_dim": data.number("ssm.inner_size") // max(1, heads),
        "linear_num_key_heads": data.number("ssm.group_count"),
        "linear_num_value_heads": heads,
    }


def lfm2(data: Metadata) -> dict[str, Any]:
    return _lfm2(data) | {"architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": False}


def lfm2_moe(data: Metadata) -> dict[str, Any]:
    _check_router(data, SIGMOID)
    return _lfm2(data) | {
        "architectures": ["Lfm2MoeForCausalLM"],
        "num_dense_layers": data.number("leading_dense_block_count", 0),
        "num_experts": data.number("expert_count"),
        "num_experts_per_tok": data.number("expert_used_count"),
        "moe_intermediate_size": data.number("expert_feed_forward_length"),
    }


def _lfm2(data: Metadata) -> dict[str, Any]:
    """Layers without KV heads are convolutions."""
    kv_heads = data.of_layers("attention.head_count_kv")
    config = base_config(
        data, num_key_value_heads=_one(data, "attention.head_count_kv", [number for number in kv_heads if number])
    )
    return config | {
        "conv_L_cache": data.number("shortconv.l_cache"),
        "layer_types": ["full_attention" if number else "conv" for number in kv_heads],
        "norm_eps": config["rms_norm_eps"],
    }


def cohere2(data: Metadata) -> dict[str, Any]:
    eps = data.number("attention.layer_norm_epsilon")
    return base_config(data, ("logit_scale",), rms_norm_eps=eps) | {
        "architectures": ["Cohere2ForCausalLM"],
        "layer_norm_eps": eps,
        "logit_scale": data.number("logit_scale", 0) or 1.0,
        "sliding_window": data.number("attention.sliding_window"),
        "sliding_window_pattern": data.number("attention.sliding_window_pattern", 4),
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


def gemma4(data: Metadata) -> dict[str, Any]:
    """Layers with a window have heads of another size; the last ones share KV pairs, and may have wider MLPs."""
    slides, kv_heads = data.of_layers("attention.sliding_window_pattern"), data.of_layers("attention.head_count_kv")
    sliding_heads, full_heads = (
        _one(data, "attention.head_count_kv", [heads for i, heads in enumerate(kv_heads) if bool(slides[i]) == window])
        for window in (True, False)
    )
    sizes = data.of_layers("feed_forward_length")
    computed = ("attention.shared_kv_layers",)
    config = base_config(data, computed, num_key_value_heads=sliding_heads, intermediate_size=sizes[0])
    shared = data.number("attention.shared_kv_layers", 0)
    own = [i < len(slides) - shared for i in range(len(slides))]
    wide = sizes[-1] != sizes[0]
    if sizes != [sizes[0] * (2 if wide and not each else 1) for each in own]:
        raise CheckpointError(f"gemma4.feed_forward_length differs between layers, but not as in Gemma 4: {sizes}")
    inputs = data.header.tensors.get("per_layer_token_embd.weight")
    return config | {
        "architectures": ["Gemma4ForCausalLM"],
        "enable_moe_block": data.number("expert_count", 0) > 0,
        "num_experts": data.number("expert_count", 0),
        "top_k_experts": data.number("expert_used_count", 0),
        "moe_intermediate_size": data.number("expert_feed_forward_length", 0),
        "head_dim": data.number("attention.key_length_swa"),
        "global_head_dim": config["head_dim"],
        "num_global_key_value_heads": full_heads,
        "attention_k_eq_v": any(
            not data.has(f"blk.{i}.attn_v.weight") for i, each in enumerate(own) if each and not slides[i]
        ),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": wide,
        "hidden_size_per_layer_input": data.number("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": inputs.shape[0] if inputs else config["vocab_size"],
        "sliding_window": data.number("attention.sliding_window"),
        "layer_types": _layer_types(slides),
        "final_logit_softcapping": data.number("final_logit_softcapping", 0) or None,
        "rope_theta": None,
        "rope_scaling": None,
        "partial_rotary_factor": None,
        "rope_parameters": _gemma4_rope(data, config["rope_theta"]),
    }


def _gemma4_rope(data: Metadata, theta: float) -> dict[str, Any]:
    """In full layers, the last frequencies of heads are divided by a number that stops them."""
    factors = data.read(FACTORS) if data.has(FACTORS) else [1.0]
    turning = [factor for factor in factors if factor < STOPPED]
    if any(factor != 1 for factor in turning):
        raise CheckpointError(
            f"{FACTORS} has other numbers than 1 and those that stop RoPE, which kvllm does not support"
        )
    full = {
        "rope_type": "proportional",
        "rope_theta": theta,
        "partial_rotary_factor": len(turning) / max(1, len(factors)),
    }
    head_dim = data.number("attention.key_length_swa")
    sliding = {
        "rope_type": "default",
        "rope_theta": data.number("rope.freq_base_swa", 10000.0),
        "partial_rotary_factor": data.number("rope.dimension_count_swa", head_dim) / max(1, head_dim),
    }
    return {"full_attention": full, "sliding_attention": sliding}


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


def _one(data: Metadata, key: str, numbers: Collection[Any]) -> Any:
    """The number that layers of one kind share. Raises CheckpointError if they have several or none."""
    found = set(numbers)
    if len(found) != 1:
        raise CheckpointError(
            f"{data.architecture}.{key} must have one number for all layers of a kind, but has {found}"
        )
    return found.pop()


def _layer_types(pattern: Iterable[bool]) -> list[str]:
    return ["sliding_attention" if slides else "full_attention" for slides in pattern]


def _check_router(data: Metadata, computed: int = SOFTMAX, default: int | None = None) -> None:
    """default: the function of a file that names none, if not what is computed."""
    function = data.number("expert_gating_func", 0) or default or computed
    if function != computed:
        raise CheckpointError(
            f"{data.architecture}.expert_gating_func is {function}: kvllm computes {computed}, of "
            f"{SOFTMAX}, softmax, and {SIGMOID}, sigmoid"
        )
