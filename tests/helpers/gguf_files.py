"""GGUF files of tiny models of transformers, written as llama.cpp's converter does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

from tests.helpers.gguf_quantizers import fitting, quantize

NAMES = {
    "cohere2": "cohere2",
    "deepseek_v3": "deepseek2",
    "falcon_h1": "falcon-h1",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
    "glm4_moe_lite": "deepseek2",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "smollm3": "smollm3",
}
WITH_WINDOWS = ("cohere2", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "olmo3", "phi3")
LATENT = ("deepseek_v3", "glm4_moe_lite")
WITH_EXPERTS = (
    *("glm4_moe", "gpt_oss", "lfm2_moe", "mixtral", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"),
    *LATENT,
)
NORMS_PLUS_ONE = ("gemma2", "gemma3_text", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
BUFFERS = ("e_score_correction_bias", "expert_bias", "layer_scalar")
ROUTERS = (
    ".router.weight",
    ".router.proj.weight",
    "mlp.gate.weight",
    "block_sparse_moe.gate.weight",
    "feed_forward.gate.weight",
)
RENAMED = {
    "proj_bias": "proj.bias",
    "correction_bias": "correction.bias",
    "expert_bias": "expert_bias.bias",
    "linear_attn.dt_bias": "linear_attn.dt_proj.bias",
    "mamba.dt_bias": "mamba.dt_proj.bias",
    "layer_scalar": "layer_scalar.weight",
}
"""Ends of names as the converter has them before it asks for those in a file."""
SCALES = {"router.scale": "ffn_gate_inp", "router.per_expert_scale": "ffn_down_exps"}
"""Of Gemma 4, by the matrices that have them in a file."""
PERMUTED = ("granite", "llama", "smollm3")
"""Those whose queries and keys the converter permutes."""


def write_gguf(
    path: Path,
    model: torch.nn.Module,
    type: Type | Callable[[str], Type] = Type.F32,
    *,
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    split_heads: bool = True,
    **writer_options: Any,
) -> None:
    """Write the model, its matrices in a type, and give it the weights that they mean then.

    type: of all, or by a tensor's name in transformers. What has no whole blocks gets the type that llama.cpp gives it.
    change: adds to the metadata. split_heads: of latent attention, the keys and values of heads are two matrices, as in
        all newer files. writer_options: of GGUFWriter, such as `split_max_tensors`.
    """
    config: Any = model.config
    writer = gguf.GGUFWriter(path, NAMES[config.model_type], **writer_options)
    _write_config(writer, config, split_heads)
    if change is not None:
        change(writer)
    for name, raw, kind in _tensors(model, type, split_heads):
        writer.add_tensor(name, np.ascontiguousarray(raw), raw_dtype=None if kind == Type.F32 else kind)
    for name, factors in _rope_factors(config):
        writer.add_tensor(name, np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_config(writer: gguf.GGUFWriter, config: Any, split_heads: bool) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if config.model_type == "gemma4_text":
        _write_gemma4(writer, config)
    elif config.model_type in LATENT:
        _write_latent(writer, config, split_heads)
    else:
        _write_heads(writer, config, rope.get("partial_rotary_factor", 1))
    if config.model_type == "cohere2":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_logit_scale(config.logit_scale)
    else:
        writer.add_layer_norm_rms_eps(getattr(config, "norm_eps", None) or config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if "beta_fast" in rope:
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if rope["rope_type"] in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0)
    if getattr(config, "sliding_window", None) and config.model_type in WITH_WINDOWS:
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type == "olmo3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_attn_factors(0.1 * math.log(rope["factor"]) + 1)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type in ("glm4_moe", *LATENT):
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        dense = getattr(config, "mlp_layer_types", []).count("dense")
        writer.add_leading_dense_block_count(dense or config.first_k_dense_replace)
    if config.model_type == "lfm2_moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_leading_dense_block_count(config.num_dense_layers)
    if config.model_type == "falcon_h1":
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_inner_size(config.mamba_d_ssm)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
        writer.add_ssm_group_count(config.mamba_n_groups)
    if config.model_type.startswith(("qwen3_5", "qwen3_next")):
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(4)
    if config.model_type in ("qwen3_5_moe_text", "qwen3_next"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.model_type in WITH_EXPERTS:
        writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        inner = getattr(config, "moe_intermediate_size", config.intermediate_size)
        writer.add_expert_feed_forward_length(inner)


def _write_heads(writer: gguf.GGUFWriter, config: Any, rotated: float) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = config.num_key_value_heads
    if config.model_type in ("lfm2", "lfm2_moe"):
        kv_heads = [0 if kind == "conv" else kv_heads for kind in config.layer_types]
        writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rotated))


def _write_latent(writer: gguf.GGUFWriter, config: Any, split_heads: bool) -> None:
    """As DeepseekV2Model.set_gguf_parameters of llama.cpp's converter, and as it was before it split heads."""
    key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    writer.add_vocab_size(config.vocab_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_head_count_kv(1 if split_heads else config.num_attention_heads)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim if split_heads else key)
    writer.add_value_length(config.kv_lora_rank if split_heads else value)
    if split_heads:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if config.n_group > 1:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if strength := config.rope_parameters.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * strength)


def _write_gemma4(writer: gguf.GGUFWriter, config: Any) -> None:
    """As Gemma4Model.set_gguf_parameters of llama.cpp's converter."""
    own, size = config.num_hidden_layers - config.num_kv_shared_layers, config.intermediate_size
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    sliding, full = (config.per_layer_config[slides.index(each)] for each in (True, False))
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(full.head_dim)
    for add in (writer.add_key_length_swa, writer.add_value_length_swa, writer.add_rope_dimension_count_swa):
        add(sliding.head_dim)
    wide = [size * (1 if i < own else 2) for i in range(len(slides))]
    writer.add_feed_forward_length(wide if config.use_double_wide_mlp else size)
    heads = [(sliding if each else full).num_key_value_heads for each in slides]
    writer.add_head_count_kv(heads if len(set(heads)) > 1 else heads[0])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _rope_factors(config: Any) -> Iterator[tuple[str, Any]]:
    rope = config.rope_parameters
    if config.model_type == "gemma4_text":  # as Gemma4Model.generate_extra_tensors
        pairs = config.per_layer_config[config.layer_types.index("full_attention")].head_dim // 2
        turning = int(pairs * rope["full_attention"]["partial_rotary_factor"])
        yield "rope_freqs.weight", [1.0] * turning + [1e30] * (pairs - turning)
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", rope["long_factor"]
        yield "rope_factors_short.weight", rope["short_factor"]
    if rope.get("rope_type") == "llama3":  # as LlamaModel.generate_extra_tensors of convert_hf_to_gguf.py
        head_dim = config.hidden_size // config.num_attention_heads
        frequencies = 1.0 / (rope["rope_theta"] ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim))
        low, high, length = (
            rope[name] for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        )
        factors = []
        for wavelength in 2 * np.pi / frequencies:
            smooth = (length / wavelength - low) / (high - low)
            if wavelength < length / high:
                factors.append(1)
            elif wavelength > length / low:
                factors.append(rope["factor"])
            else:
                factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
        yield "rope_freqs.weight", factors


def _tensors(
    model: torch.nn.Module, type: Type | Callable[[str], Type], split_heads: bool
) -> Iterator[tuple[str, np.ndarray, Type]]:
    """Names, blocks and types of all tensors."""
    config: Any = model.config
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[NAMES[config.model_type]]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    buffers = (each for each in model.named_buffers() if each[0].endswith(BUFFERS))
    for name, parameter in (*model.named_parameters(), *buffers):
        transposed = config.model_type == "gpt_oss" and parameter.dim() == 3
        rows = parameter.detach().transpose(1, 2) if transposed else parameter.detach()
        columns_move = name.endswith("linear_attn.out_proj.weight") and config.model_type.startswith("qwen3_5")
        rows = value_heads(rows, 1, config) if columns_move else rows
        convolution = name.endswith(("conv.conv.weight", "conv1d.weight"))
        quantized = parameter.dim() > 1 and "bias" not in name and not name.endswith(ROUTERS) and not convolution
        asked = type if isinstance(type, Type) else type(name)
        if split_heads and name.endswith("kv_b_proj.weight"):
            yield from _split_heads(name, parameter, asked, config)
            continue
        kind = fitting(asked, rows.shape[-1]) if quantized else Type.F32
        raw = quantize(rows.contiguous().numpy(), kind)
        values = torch.from_numpy(gguf.dequantize(raw, kind)).view_as(rows)
        values = value_heads(values, 1, config, back=True) if columns_move else values
        with torch.no_grad():
            parameter.copy_(values.transpose(1, 2) if transposed else values)
        if "experts.gate_up_proj" in name and config.model_type != "gemma4_text":
            halves = (raw[:, ::2], raw[:, 1::2]) if config.model_type == "gpt_oss" else np.split(raw, 2, axis=1)
            suffix = "bias" if name.endswith("bias") else "weight"
            for part, half in zip(("gate", "up"), halves, strict=True):
                yield f"blk.{name.split('.')[2]}.ffn_{part}_exps.{suffix}", half, kind
            continue
        if name.endswith("in_proj_qkvz.weight"):
            for part, rows in zip(("qkv", "gate"), _separated(config), strict=True):
                yield f"blk.{name.split('.')[2]}.attn_{part}.weight", raw[rows], kind
            continue
        for end, renamed in RENAMED.items():
            name = name.removesuffix(end) + renamed if name.endswith(end) else name
        found = names.get_name(name, (".weight", ".bias"))
        for end, module in SCALES.items():
            found = f"blk.{name.split('.')[2]}.{module}.scale" if name.endswith(end) else found
        assert found is not None, name
        found += "" if found.endswith((".weight", ".bias", ".scale", ".ssm_a", ".ssm_d", ".ffn_norm")) else ".weight"
        yield found, _converted(found, raw, config), kind


def _split_heads(
    name: str, parameter: torch.Tensor, asked: Type, config: Any
) -> Iterator[tuple[str, np.ndarray, Type]]:
    """DeepseekV2Model.modify_tensors: keys and values of each head, keys transposed."""
    heads = parameter.data.view(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, values = heads.split((config.qk_nope_head_dim, config.v_head_dim), 1)
    for part, matrices in (("k", keys.transpose(1, 2)), ("v", values)):
        kind = fitting(asked, matrices.shape[-1])
        raw = quantize(matrices.contiguous().numpy(), kind)
        matrices.copy_(torch.from_numpy(gguf.dequantize(raw, kind)).view_as(matrices))
        yield f"blk.{name.split('.')[2]}.attn_{part}_b.weight", raw, kind


def _converted(name: str, raw: np.ndarray, config: Any) -> np.ndarray:
    """What the converter makes of a tensor before it writes it."""
    architecture = NAMES[config.model_type]
    if architecture == "falcon-h1":
        return _of_falcon_h1(name, raw, config)
    if architecture in PERMUTED and ".attn_q." in name:
        return permute(raw, config.num_attention_heads)
    if architecture in PERMUTED and ".attn_k." in name:
        return permute(raw, config.num_key_value_heads)
    if name.endswith((".shortconv.conv.weight", ".ssm_conv1d.weight")):
        raw = raw.squeeze(1)
    if name.endswith((".attn_qkv.weight", ".ssm_conv1d.weight")) and architecture.startswith("qwen35"):
        first = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        return np.concatenate((raw[:first], value_heads(raw[first:], 0, config)))
    raw = -np.exp(raw) if name.endswith(".ssm_a") else raw
    of_heads = (".attn_gate.weight", ".ssm_alpha.weight", ".ssm_beta.weight", ".ssm_dt.bias", ".ssm_a")
    if name.endswith(of_heads) and architecture.startswith("qwen35"):
        return value_heads(raw, 0, config)
    if name.endswith(".ffn_gate_inp_shexp.weight"):
        return raw.squeeze(0)
    added = config.model_type in NORMS_PLUS_ONE and name.endswith("norm.weight") and "ssm_norm" not in name
    return raw + 1 if added else raw


def _separated(config: Any) -> tuple[np.ndarray, np.ndarray]:
    """Rows of queries, keys and values of Qwen3-Next, and of gates, which its checkpoint has for each key head."""
    values = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    widths = (config.linear_key_head_dim, config.linear_key_head_dim, values, values)
    of_heads = np.arange(config.linear_num_key_heads)[:, None] * sum(widths) + np.arange(sum(widths))
    *mixed, gates = (part.flatten() for part in np.split(of_heads, np.cumsum(widths)[:-1], axis=1))
    return np.concatenate(mixed), gates


def _of_falcon_h1(name: str, raw: np.ndarray, config: Any) -> np.ndarray:
    """FalconH1Model.modify_tensors: multipliers become part of matrices of float32."""
    factors = {
        "token_embd": config.embedding_multiplier,
        "output": config.lm_head_multiplier,
        "ffn_gate": config.mlp_multipliers[0],
        "ffn_down": config.mlp_multipliers[1],
        "attn_q": config.attention_in_multiplier,
        "attn_k": config.attention_in_multiplier * config.key_multiplier,
        "attn_v": config.attention_in_multiplier,
        "attn_output": config.attention_out_multiplier,
        "ssm_out": config.ssm_out_multiplier,
    }
    module = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    if module == "ssm_in":
        state = config.mamba_n_groups * config.mamba_d_state
        widths = (config.mamba_d_ssm, config.mamba_d_ssm, state, state, config.mamba_n_heads)
        return raw * config.ssm_in_multiplier * np.repeat(config.ssm_multipliers, widths).astype(np.float32)[:, None]
    if module == "ssm_a":
        return -np.exp(raw)[:, None]
    if module == "ssm_d":
        return raw[:, None]
    if module == "ssm_norm":
        return raw.reshape(config.mamba_n_groups, -1)
    return raw.squeeze(1) if module == "ssm_conv1d" and raw.ndim == 3 else raw * np.float32(factors.get(module, 1))


def value_heads(tensor: Any, dim: int, config: Any, *, back: bool = False) -> Any:
    """_LinearAttentionVReorderBase._reorder_v_heads of llama.cpp's converter, or its inverse: value heads by key heads,
    and then by their number among those of one."""
    keys = config.linear_num_key_heads
    heads = (keys, config.linear_num_value_heads // keys)
    shape = (*tensor.shape[:dim], *(heads[::-1] if back else heads), -1, *tensor.shape[dim + 1 :])
    return tensor.reshape(shape).swapaxes(dim, dim + 1).reshape(tensor.shape)


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """LlamaModel.permute of convert_hf_to_gguf.py."""
    shape = (heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape)
