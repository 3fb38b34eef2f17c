"""Random checkpoints of every model family, as arguments of `make_checkpoint`."""

from __future__ import annotations

import random
from typing import Any

from tests.helpers.checkpoints import LINEAR, LLAMA3

SLIDING, FULL, LINEAR_ATTENTION = "sliding_attention", "full_attention", "linear_attention"
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 128}
DEEPSEEK_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
OSS_YARN = {**YARN, "truncate": False}
MINISTRAL3 = {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}
PHI3 = {"family": "phi3", "pad_token_id": 0}
COHERE2 = {"family": "cohere2", "pad_token_id": 0, "logit_scale": 0.4}
EXPERTS = {"num_experts_per_tok": 3, "num_local_experts": 8}
DELTA = {
    "initializer_range": 0.15,  # states add up what is rounded
    "num_hidden_layers": 4,
    "layer_types": [LINEAR_ATTENTION, FULL, LINEAR_ATTENTION, FULL],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
QWEN_EXPERTS = {"num_experts_per_tok": 3, "num_experts": 8, "moe_intermediate_size": 48, "head_dim": 16}
LFM2 = {
    "initializer_range": 0.15,
    "num_hidden_layers": 5,
    "layer_types": ["conv", FULL, "conv", "conv", FULL],
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
FALCON_H1 = {
    "family": "falcon_h1",
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "num_hidden_layers": 2,
    "mamba_d_ssm": 48,
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
GEMMA4 = {
    "family": "gemma4_text",
    "initializer_range": 0.15,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 7,
    "num_hidden_layers": 5,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL],
    "pad_token_id": 0,
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.22,
    "logits_scaling": 0.6,
}
GRANITE4 = {
    "layer_types": [FULL] * 3,
    "num_local_experts": 0,
    "shared_intermediate_size": 80,
    "mamba_n_heads": 4,
}
GLM4_MOE = {
    "family": "glm4_moe",
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "routed_scaling_factor": 1.7,
}
DEEPSEEK = {
    "family": "deepseek_v3",
    "q_lora_rank": 24,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_VL = {
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 1]},
}


def longrope(original: int, pairs: int) -> dict[str, Any]:
    generator = random.Random(0)
    short, long = ([1 + span * generator.random() for _ in range(pairs)] for span in (1, 8))
    return {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original,
        },
        "original_max_position_embeddings": original,
    }


def partial(options: dict[str, Any], factor: float) -> dict[str, Any]:
    rope = {**options["rope_parameters"], "partial_rotary_factor": factor}
    return {**options, "rope_parameters": rope, "partial_rotary_factor": factor}


FAMILIES: dict[str, dict[str, Any]] = {
    "llama-tied": {"family": "llama", "tie_word_embeddings": True},
    "llama3-rope": {"family": "llama", "rope_parameters": LLAMA3},
    "llama-linear-rope-sharded": {"family": "llama", "rope_parameters": LINEAR, "sharded": True},
    "llama-yarn": {"family": "llama", "rope_parameters": YARN},
    "llama-mha-head-dim": {"family": "llama", "num_key_value_heads": 8, "head_dim": 32},
    "llama-biases": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"family": "mistral", "sliding_window": None},
    "mistral-window-without-effect": {"family": "mistral", "max_position_embeddings": 64, "sliding_window": 64},
    "mistral-window": {"family": "mistral", "sliding_window": 7},
    "ministral": {"family": "ministral", "head_dim": 16, "sliding_window": 7, "layer_types": [SLIDING, FULL, SLIDING]},
    "ministral3": {"family": "ministral3", "head_dim": 16, "rope_parameters": {**YARN, **MINISTRAL3}},
    "mixtral": {"family": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 4},
    "mixtral-window-sharded": {"family": "mixtral", "sliding_window": 7, "num_local_experts": 5, "sharded": True},
    "qwen2": {"family": "qwen2"},
    "qwen2-last-windows": {"family": "qwen2", "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen2-tied-sharded": {"family": "qwen2", "tie_word_embeddings": True, "sharded": True},
    "qwen3": {"family": "qwen3", "head_dim": 16},
    "qwen3-biases": {"family": "qwen3", "head_dim": 16, "attention_bias": True},
    "qwen3-named-windows": {
        "family": "qwen3",
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": [SLIDING, FULL, SLIDING],
    },
    "qwen3-tied-sharded": {"family": "qwen3", "head_dim": 16, "tie_word_embeddings": True, "sharded": True},
    "qwen3-moe": {"family": "qwen3_moe", **QWEN_EXPERTS, "norm_topk_prob": True},
    "qwen3-moe-some-layers": {"family": "qwen3_moe", **QWEN_EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [2]},
    "qwen3.5": {"family": "qwen3_5_text", "head_dim": 16, **DELTA},
    "qwen3.5-moe": {
        "family": "qwen3_5_moe_text",
        **QWEN_EXPERTS,
        **DELTA,
        "num_hidden_layers": 2,
        "layer_types": [LINEAR_ATTENTION, FULL],
        "shared_expert_intermediate_size": 56,
    },
    "qwen3-next": {
        "family": "qwen3_next",
        **QWEN_EXPERTS,
        **DELTA,
        "shared_expert_intermediate_size": 56,
        "mlp_only_layers": [1],
    },
    "lfm2": {**LFM2, "family": "lfm2", "block_multiple_of": 16},
    "lfm2-moe": {
        **LFM2,
        **QWEN_EXPERTS,
        "family": "lfm2_moe",
        "num_hidden_layers": 3,
        "layer_types": ["conv", FULL, "conv"],
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.7,
    },
    "falcon-h1": {
        **FALCON_H1,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.6,
        "key_multiplier": 0.4,
        "attention_in_multiplier": 1.3,
        "attention_out_multiplier": 0.9,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.7,
        "ssm_multipliers": [0.9, 0.8, 0.7, 1.2, 0.6],
        "mlp_multipliers": [0.9, 0.6],
    },
    "falcon-h1-norm": {
        **FALCON_H1,
        "mamba_n_groups": 2,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "mamba_conv_bias": False,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "smollm3": {"family": "smollm3", "pad_token_id": 0, "num_hidden_layers": 5},
    "smollm3-untied-named-layers": {
        "family": "smollm3",
        "pad_token_id": 0,
        "no_rope_layers": [0, 1, 0, 1],
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": YARN,
    },
    "smollm3-windows": {
        "family": "smollm3",
        "pad_token_id": 0,
        "no_rope_layers": [1, 0, 1],
        "use_sliding_window": True,
        "sliding_window": 7,
    },
    "glm4": {"family": "glm4", "head_dim": 16, "pad_token_id": 0},
    "glm4-whole-heads-sharded": {
        **partial({"rope_parameters": LLAMA3}, 1.0),
        "family": "glm4",
        "head_dim": 16,
        "pad_token_id": 0,
        "attention_bias": False,
        "sharded": True,
    },
    "glm4-moe": {**GLM4_MOE, "attention_bias": True, "use_qk_norm": True, "n_shared_experts": 2},
    "glm4-moe-other-router": {**GLM4_MOE, "norm_topk_prob": False, "first_k_dense_replace": 2},
    "deepseek-v3": {**DEEPSEEK, "n_group": 4, "topk_group": 2, "rope_parameters": DEEPSEEK_YARN},
    "deepseek-v3-one-group-sharded": {
        **DEEPSEEK,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "norm_topk_prob": False,
        "sharded": True,
    },
    "glm4-moe-lite": {**DEEPSEEK, "family": "glm4_moe_lite"},
    "granite": {"family": "granite", **MULTIPLIERS},
    "granite-biases-tied": {
        "family": "granite",
        **MULTIPLIERS,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "granite4": {"family": "granitemoehybrid", **MULTIPLIERS, **GRANITE4, "position_embedding_type": "rope"},
    "granite4-without-rope": {"family": "granitemoehybrid", **MULTIPLIERS, **GRANITE4},
    "cohere2": {**COHERE2, "num_hidden_layers": 5, "sliding_window": 7},
    "cohere2-biases-named-layers": {
        **COHERE2,
        "sliding_window": 600,
        "layer_types": [FULL, SLIDING, FULL],
        "attention_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": YARN,
    },
    "olmo2": {"family": "olmo2", "num_key_value_heads": None},
    "olmo2-biases-sharded": {"family": "olmo2", "attention_bias": True, "sharded": True, "rope_parameters": LLAMA3},
    "olmo3": {
        "family": "olmo3",
        "num_hidden_layers": 5,
        "sliding_window": 7,
        "rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 500.0}},
    },
    "olmo3-named-layers": {"family": "olmo3", "sliding_window": 9, "layer_types": [FULL, SLIDING, FULL]},
    "phi3": {**PHI3},
    "phi3-window": {**PHI3, "sliding_window": 7, "num_key_value_heads": 4},
    "phi3-partial": {**PHI3, **partial({"rope_parameters": {"rope_type": "default"}}, 0.5)},
    "phi4-mini": {**PHI3, "tie_word_embeddings": True, **partial(longrope(16, 3), 0.75)},
    "phi3-short": {**PHI3, "max_position_embeddings": 512, **longrope(512, 4)},
    "gemma2": {"family": "gemma2", "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 24},
    "gemma2-without-caps": {
        "family": "gemma2",
        "head_dim": 16,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": False,
    },
    "gemma3": {"family": "gemma3_text", "head_dim": 16, "sliding_window": 7, "num_hidden_layers": 7},
    "gemma3-linear": {
        "family": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 7,
        "layer_types": [SLIDING, FULL, SLIDING],
        "rope_parameters": {FULL: {**LINEAR, "rope_theta": 1e6}, SLIDING: {"rope_type": "default", "rope_theta": 1e4}},
    },
    "gemma4": {
        **GEMMA4,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 256,
        "final_logit_softcapping": 30.0,
    },
    "gemma4-images": {
        **GEMMA4,
        "family": "gemma4",
        "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": True,
        "vision_config": {**VISION, "head_dim": 8, "num_key_value_heads": 2, "position_embedding_size": 16},
    },
    "gemma4-packed": {
        **GEMMA4,
        "layer_types": [SLIDING, SLIDING, FULL],
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
    },
    "gemma4-experts": {
        **GEMMA4,
        "layer_types": [SLIDING, SLIDING, FULL],
        "num_hidden_layers": 3,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "gemma3-images": {
        "family": "gemma3",
        "head_dim": 16,
        "sliding_window": 7,
        "tie_word_embeddings": True,
        "vision_config": {**VISION, "model_type": "siglip_vision_model"},
    },
    "mistral3-images": {
        "family": "mistral3",
        "model_type": "mistral",
        "head_dim": 16,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8},
    },
    "ministral3-images": {
        "family": "mistral3",
        "model_type": "ministral3",
        "head_dim": 16,
        "rope_parameters": {**YARN, **MINISTRAL3},
        "tie_word_embeddings": True,
        "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8},
    },
    "qwen2-vl": {"family": "qwen2_vl", **QWEN_VL, "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 64}},
    "qwen25-vl": {
        "family": "qwen2_5_vl",
        **QWEN_VL,
        "tie_word_embeddings": True,
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "out_hidden_size": 64,
            "intermediate_size": 24,
        },
    },
    "qwen3.5-vl": {
        "family": "qwen3_5",
        **DELTA,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "out_hidden_size": 64,
            "intermediate_size": 24,
        },
    },
    "qwen3-vl": {
        "family": "qwen3_vl",
        **QWEN_VL,
        "head_dim": 16,
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "out_hidden_size": 64,
            "intermediate_size": 24,
        },
    },
    "gpt-oss": {"family": "gpt_oss", "head_dim": 16, "sliding_window": 7, **EXPERTS, "rope_parameters": OSS_YARN},
    "gpt-oss-sharded": {"family": "gpt_oss", "head_dim": 16, "sliding_window": 7, **EXPERTS, "sharded": True},
}
