"""The configs of published checkpoints: those that are supported as they are, and those that are refused with a reason.

Each has the keys of the published file that say what is computed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvllm.entrypoints.cli import main
from kvllm.errors import CheckpointError
from kvllm.models.config import load_model_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
LLAMA_8B = {
    **LLAMA,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}

OLMO: dict[str, Any] = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 100352,
}

GLM: dict[str, Any] = {
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151552,
}

LFM2: dict[str, Any] = {
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "dtype": "bfloat16",
    "eos_token_id": 7,
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "vocab_size": 65536,
}


def qwen3(hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        **QWEN,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_window_layers": layers,
        "tie_word_embeddings": tied,
    }


PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {
        **LLAMA,
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "rope_scaling": {**LLAMA["rope_scaling"], "factor": 32.0},
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    },
    "Meta-Llama-3.1-8B": LLAMA_8B,
    "Qwen2.5-7B": {
        **QWEN,
        "architectures": ["Qwen2ForCausalLM"],
        "eos_token_id": 151643,
        "head_dim": ...,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "use_mrope": False,
        "vocab_size": 152064,
    },
    "Qwen3-0.6B": qwen3(1024, 3072, 28, 16, True),
    "Qwen3-4B": qwen3(2560, 9728, 36, 32, True),
    "Qwen3-8B": qwen3(4096, 12288, 36, 32, False),
    "Qwen3-14B": qwen3(5120, 17408, 40, 40, False),
    "Mistral-7B-v0.1": {
        **LLAMA_8B,
        "architectures": ["MistralForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_position_embeddings": 32768,
        "rope_scaling": ...,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 32000,
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "max_position_embeddings": 131072,
        "model_type": "gemma3_text",
        "num_attention_heads": 8,
        "num_hidden_layers": 34,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"factor": 8.0, "type": "linear"},
        "rope_theta": 1000000.0,
        "sliding_window": 1024,
        "torch_dtype": "bfloat16",
        "vocab_size": 262208,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
    "Qwen3-30B-A3B-FP8": {
        **qwen3(2048, 6144, 48, 32, False),
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "model.layers.0.mlp.gate"],
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
    },
    "Phi-4-mini": {
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 199999,
        "eos_token_id": 199999,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "model_type": "phi3",
        "num_attention_heads": 24,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"long_factor": [2.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 200064,
    },
    "Qwen3.5-27B": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "attention_bias": False,
        "attn_output_gate": True,
        "bos_token_id": 248044,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    },
    "LFM2-1.2B": {
        **LFM2,
        "architectures": ["Lfm2ForCausalLM"],
        "block_auto_adjust_ff_dim": True,
        "block_ff_dim": 12288,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "model_type": "lfm2",
        "num_hidden_layers": 16,
    },
    "LFM2-8B-A1B": {
        **LFM2,
        "architectures": ["Lfm2MoeForCausalLM"],
        "intermediate_size": 7168,
        "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
        "model_type": "lfm2_moe",
        "moe_intermediate_size": 1792,
        "norm_topk_prob": True,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "routed_scaling_factor": 1.0,
        "use_expert_bias": True,
    },
    "SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": 128012,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "mlp_bias": False,
        "model_type": "smollm3",
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 128256,
    },
    "OLMo-2-1124-7B": OLMO,
    "Olmo-3-1025-7B": {
        **OLMO,
        "architectures": ["Olmo3ForCausalLM"],
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
        "max_position_embeddings": 65536,
        "model_type": "olmo3",
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "sliding_window": 4096,
        "torch_dtype": "bfloat16",
        "vocab_size": 100278,
    },
    "granite-3.3-2b-instruct": {
        "architectures": ["GraniteForCausalLM"],
        "attention_bias": False,
        "attention_multiplier": 0.015625,
        "bos_token_id": 0,
        "embedding_multiplier": 12.0,
        "eos_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "logits_scaling": 8.0,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "granite",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 49159,
    },
    "granite-4.0-h-tiny": {
        **LLAMA_8B,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
        "num_hidden_layers": 40,
        "num_local_experts": 64,
    },
    "GLM-4-9B-0414": {
        **GLM,
        "architectures": ["Glm4ForCausalLM"],
        "intermediate_size": 13696,
        "max_position_embeddings": 32768,
        "model_type": "glm4",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
    },
    "GLM-4.5-Air": {
        **GLM,
        "architectures": ["Glm4MoeForCausalLM"],
        "first_k_dense_replace": 1,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "model_type": "glm4_moe",
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "use_qk_norm": False,
    },
    "DeepSeek-V3": {"architectures": ["DeepseekV3ForCausalLM"]},
    "gemma-4-31B-it": {"architectures": ["Gemma4ForConditionalGeneration"]},
    "InternVL3-1B-hf": {"architectures": ["InternVLForConditionalGeneration"]},
}
SUPPORTED = {
    "Llama-3.2-1B": (16, 32, 8, 64, True, "float32"),
    "Meta-Llama-3.1-8B": (32, 32, 8, 128, False, "bfloat16"),
    "Qwen2.5-7B": (28, 28, 4, 128, False, "bfloat16"),
    "Qwen3-0.6B": (28, 16, 8, 128, True, "bfloat16"),
    "Qwen3-4B": (36, 32, 8, 128, True, "bfloat16"),
    "Qwen3-8B": (36, 32, 8, 128, False, "bfloat16"),
    "Qwen3-14B": (40, 40, 8, 128, False, "bfloat16"),
    "gemma-3-4b": (34, 8, 4, 256, True, "bfloat16"),
    "gpt-oss-20b": (24, 64, 8, 64, False, "bfloat16"),
    "Qwen3-30B-A3B-FP8": (48, 32, 4, 128, False, "bfloat16"),
    "Phi-4-mini": (32, 24, 8, 128, True, "bfloat16"),
    "Qwen3.5-27B": (16, 24, 4, 256, False, "bfloat16"),
    "LFM2-1.2B": (6, 32, 8, 64, True, "bfloat16"),
    "LFM2-8B-A1B": (6, 32, 8, 64, True, "bfloat16"),
    "Mistral-7B-v0.1": (32, 32, 8, 128, False, "bfloat16"),
    "OLMo-2-1124-7B": (32, 32, 32, 128, False, "float32"),
    "Olmo-3-1025-7B": (32, 32, 32, 128, False, "bfloat16"),
    "granite-3.3-2b-instruct": (40, 32, 8, 64, True, "bfloat16"),
    "GLM-4-9B-0414": (40, 32, 2, 128, False, "bfloat16"),
    "GLM-4.5-Air": (46, 96, 8, 128, False, "bfloat16"),
    "SmolLM3-3B": (36, 16, 4, 128, True, "bfloat16"),
}
REFUSED = {
    "granite-4.0-h-tiny": "layer_types has 'mamba', which kvllm does not support: all layers must have attention",
    "DeepSeek-V3": r"DeepseekV3ForCausalLM, which has multi-head latent attention \(MLA\): kvllm runs Gemma2For",
    "gemma-4-31B-it": "Gemma4ForConditionalGeneration, which has heads of one size in layers with a window and of an",
    "InternVL3-1B-hf": "InternVLForConditionalGeneration, which has images or sound beside text",
}
WINDOWS = {
    "Mistral-7B-v0.1": {4096},
    "gemma-3-4b": {None, 1024},
    "gpt-oss-20b": {None, 128},
    "Olmo-3-1025-7B": {None, 4096},
}
SCALINGS = {
    "Llama-3.2-1B": "llama3",
    "Meta-Llama-3.1-8B": "llama3",
    "gemma-3-4b": "linear",
    "gpt-oss-20b": "yarn",
    "Olmo-3-1025-7B": "yarn",
}


def write_config(path: Path, name: str) -> None:
    config = {key: value for key, value in PUBLISHED[name].items() if value is not ...}
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported(tmp_path: Path, name: str) -> None:
    write_config(tmp_path, name)
    c = load_model_config(tmp_path)
    found = (c.num_layers, c.num_query_heads, c.num_kv_heads, c.head_dim, c.tie_word_embeddings, c.dtype)
    assert found == SUPPORTED[name]
    assert c.qkv_bias == name.startswith(("Qwen2", "gpt", "GLM"))
    assert c.qk_norm == name.startswith(("Qwen3", "gemma-3", "LFM2"))
    assert (c.rope.scaling and c.rope.scaling.kind) == {**SCALINGS, "Phi-4-mini": "longrope"}.get(name)
    assert c.rope.theta == PUBLISHED[name].get("rope_parameters", PUBLISHED[name])["rope_theta"]
    assert {layer.window for layer in c.layers} == WINDOWS.get(name, set())
    assert c.max_position_embeddings == PUBLISHED[name]["max_position_embeddings"]  # with the scaling already
    eos = PUBLISHED[name]["eos_token_id"]
    assert c.eos_token_ids == (tuple(eos) if isinstance(eos, list) else (eos,))


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path: Path, name: str) -> None:
    write_config(tmp_path, name)
    with pytest.raises(CheckpointError, match=REFUSED[name]):
        load_model_config(tmp_path)


MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma-3-4b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    },
    "Mistral-Small-3.1-24B-Instruct-2503": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": {
            "attention_dropout": 0.0,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "intermediate_size": 32768,
            "max_position_embeddings": 131072,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000000.0,
            "sliding_window": None,
            "vocab_size": 131072,
        },
        "torch_dtype": "bfloat16",
    },
    "Qwen2.5-VL-7B-Instruct": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 128000,
        "max_window_layers": 28,
        "model_type": "qwen2_5_vl",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vision_config": {"depth": 32, "hidden_size": 1280},
        "vocab_size": 152064,
    },
    "Qwen3-VL-4B-Instruct-FP8": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": ["lm_head", "model.visual.blocks.0.attn.proj", "visual.merger.linear_fc1"],
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "text_config": {
            "attention_bias": False,
            "bos_token_id": 151643,
            "dtype": "bfloat16",
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5000000,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
        "tie_word_embeddings": True,
    },
}
TEXTS = {
    "gemma-3-4b-it": ("Gemma3ForCausalLM", 34, 8, 4, 256, True, 1e6, (1, 106)),
    "Mistral-Small-3.1-24B-Instruct-2503": ("MistralForCausalLM", 40, 32, 8, 128, False, 1e9, ()),
    "Qwen2.5-VL-7B-Instruct": ("Qwen2ForCausalLM", 28, 28, 4, 128, False, 1e6, (151645,)),
    "Qwen3-VL-4B-Instruct-FP8": ("Qwen3ForCausalLM", 36, 32, 8, 128, True, 5e6, (151645,)),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_models_of_multimodal_checkpoints(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MULTIMODAL[name]))
    c = load_model_config(tmp_path)
    sizes = (c.architecture, c.num_layers, c.num_query_heads, c.num_kv_heads, c.head_dim, c.tie_word_embeddings)
    assert (*sizes, c.rope.theta, c.eos_token_ids) == TEXTS[name]
    assert c.dtype == "bfloat16" and [c.text_of] == MULTIMODAL[name]["architectures"]
    assert (c.weight_format is not None) == name.endswith("FP8")
    assert load_model_config(tmp_path, {"max_position_embeddings": 512}).max_position_embeddings == 512


WEIGHTS = {
    "LFM2-1.2B": 1.170e9,
    "LFM2-8B-A1B": 8.340e9,
    "SmolLM3-3B": 3.075e9,
    "OLMo-2-1124-7B": 7.299e9,
    "Olmo-3-1025-7B": 7.298e9,
    "granite-3.3-2b-instruct": 2.534e9,
    "GLM-4-9B-0414": 9.400e9,
    "GLM-4.5-Air": 106.85e9,
    "gemma-3-4b-it": 3.880e9,
    "Qwen2.5-VL-7B-Instruct": 7.616e9,
}
"""Weights of published models, of those with images the text's."""


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_plan_counts_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    config = {key: value for key, value in (PUBLISHED | MULTIMODAL)[name].items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(config))
    main(["plan", str(tmp_path), "--dtype", "bfloat16", "--json"])
    assert json.loads(capsys.readouterr().out)["weights_bytes"] / 2 == pytest.approx(WEIGHTS[name], rel=1e-3)
