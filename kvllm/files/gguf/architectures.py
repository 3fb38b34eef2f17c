"""The architectures of GGUF files: how their tensors are called in transformers' checkpoints, and what was changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvllm.errors import CheckpointError
from kvllm.files.gguf import changes, config
from kvllm.files.gguf.metadata import VECTORS, Metadata
from kvllm.files.gguf.tensors import ExpertStack, GGUFTensor, HeadProjections, RenamedTensor

TOP = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
    "output_norm": "model.norm",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    **{f"nextn.{name}": name for name in ("enorm", "hnorm", "eh_proj", "embed_tokens")},
    **{f"nextn.shared_head_{name}": f"shared_head.{name}" for name in ("norm", "head")},
}
"""Names in a layer, `blk.0.` there and `model.layers.0.` here. Other names stay, and are refused where they end up."""
GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    config: makes the keys of `config.json`. names: beside those of TOP and LAYER, or instead. whole: of tensors without
        a suffix here, by the name there with its suffix or without. undo: what llama.cpp's converter has done.
    experts: the name of a matrix of one expert, by that of the tensor of all.
    stacked: tensors here of several tensors there, which `stack` puts together: those of all experts, too.
    joined: one tensor there that is several here, with the names that these would have there.
    mtp: names in the layer after the last one, which is called `mtp` here; empty where it is called as the others.
    """

    config: Callable[[Metadata], dict[str, Any]]
    names: dict[str, str] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    undo: changes.Undo = changes.as_it_is
    experts: dict[str, str] = field(default_factory=dict)
    stacked: dict[str, tuple[str, ...]] = field(default_factory=dict)
    stack: type[ExpertStack | HeadProjections] = ExpertStack
    joined: dict[str, tuple[str, ...]] = field(default_factory=dict)
    mtp: dict[str, str] = field(default_factory=dict)


PROJECTIONS = ("gate", "up", "down")
SHARED_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in PROJECTIONS},
}
CORRECTION = {"exp_probs_b": "mlp.gate.e_score_correction_bias"}
EXPERTS = {f"ffn_{name}_exps": f"mlp.experts.{{}}.{name}_proj" for name in PROJECTIONS}
W = {"gate": 1, "up": 3, "down": 2}
"""Numbers of projections that are called w1, w2 and w3."""
MIXTRAL = {f"ffn_{name}_exps": f"block_sparse_moe.experts.{{}}.w{i}" for name, i in W.items()}
LFM2 = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    **{f"ffn_{name}": f"feed_forward.w{i}" for name, i in W.items()},
    **{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
}
QWEN35 = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
QWEN_MTP = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
    "shared_head.head": "shared_head.head",
    "embed_tokens": "embed_tokens",
}
DELTA = {"ssm_a": "linear_attn.A_log", "ssm_dt": "linear_attn.dt_bias"}
QWEN_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in PROJECTIONS},
}
ARCHITECTURES = {
    "cohere2": Architecture(config.cohere2),
    "deepseek2": Architecture(
        config.deepseek2,
        {
            **{f"attn_{name}": f"self_attn.{name}_proj" for name in ("q_a", "q_b", "kv_b")},
            **{f"attn_{name}_a_norm": f"self_attn.{name}_a_layernorm" for name in ("q", "kv")},
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            **SHARED_EXPERTS,
        },
        whole=CORRECTION,
        experts=EXPERTS,
        stacked={"self_attn.kv_b_proj.weight": ("attn_k_b", "attn_v_b")},
        stack=HeadProjections,
    ),
    "falcon-h1": Architecture(
        config.falcon_h1,
        {
            "output_norm": "model.final_layernorm",
            **{f"ffn_{name}": f"feed_forward.{name}_proj" for name in PROJECTIONS},
            **{f"ssm_{name}": f"mamba.{name}_proj" for name in ("in", "out")},
            "ssm_conv1d": "mamba.conv1d",
            "ssm_norm": "mamba.norm",
        },
        whole={
            "ffn_norm": "pre_ff_layernorm.weight",
            "ssm_a": "mamba.A_log",
            "ssm_d": "mamba.D",
            "ssm_dt": "mamba.dt_bias",
        },
        undo=changes.mamba,
    ),
    "gemma2": Architecture(config.gemma2, GEMMA, undo=changes.norms),
    "gemma3": Architecture(config.gemma3, GEMMA, undo=changes.norms),
    "gemma4": Architecture(
        config.gemma4,
        GEMMA
        | {
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "ffn_gate_inp": "router.proj",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        },
        whole={
            "layer_output_scale": "layer_scalar",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "ffn_gate_up_exps.weight": "experts.gate_up_proj",
            "ffn_down_exps.weight": "experts.down_proj",
        },
    ),
    "glm4": Architecture(
        config.glm4,
        {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "glm4moe": Architecture(
        config.glm4_moe,
        {
            "post_attention_norm": "post_attention_layernorm",
            **SHARED_EXPERTS,
        },
        whole=CORRECTION,
        experts=EXPERTS,
    ),
    "gpt-oss": Architecture(
        config.gpt_oss,
        {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
        whole={"attn_sinks": "self_attn.sinks"},
        stacked={
            "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
            "mlp.experts.down_proj": ("ffn_down_exps",),
        },
    ),
    "granite": Architecture(config.granite, undo=changes.halves_of_heads),
    "lfm2": Architecture(config.lfm2, LFM2, undo=changes.convolutions),
    "lfm2moe": Architecture(
        config.lfm2_moe,
        LFM2 | {"ffn_gate_inp": "feed_forward.gate"},
        whole={"exp_probs_b": "feed_forward.expert_bias"},
        undo=changes.convolutions,
        experts={f"ffn_{name}_exps": f"feed_forward.experts.{{}}.w{i}" for name, i in W.items()},
    ),
    "llama": Architecture(
        config.llama, {"ffn_gate_inp": "block_sparse_moe.gate"}, undo=changes.halves_of_heads, experts=MIXTRAL
    ),
    "olmo2": Architecture(
        config.olmo2,
        {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    ),
    "phi3": Architecture(config.phi3, {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "qwen2": Architecture(config.qwen2),
    "qwen3": Architecture(config.qwen3),
    "qwen3moe": Architecture(
        config.qwen3_moe,
        {"ffn_gate_inp": "mlp.gate"},
        experts=EXPERTS,
    ),
    "qwen35": Architecture(config.qwen35, QWEN35, whole=DELTA, undo=changes.gated_delta_net, mtp=QWEN_MTP),
    "qwen35moe": Architecture(
        config.qwen35_moe, QWEN35 | QWEN_EXPERTS, DELTA, changes.gated_delta_net, EXPERTS, mtp=QWEN_MTP
    ),
    "qwen3next": Architecture(
        config.qwen35_moe,
        QWEN35 | QWEN_EXPERTS,
        DELTA,
        changes.gated_delta_net_in_turns,
        experts=EXPERTS,
        joined={"ssm_ba": ("ssm_beta", "ssm_alpha")},
        mtp=QWEN_MTP,
    ),
    "smollm3": Architecture(config.smollm3, undo=changes.halves_of_heads),
}


def find_architecture(name: Any) -> Architecture:
    """Raises CheckpointError for one that is not known."""
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"unsupported architecture {name!r:.80} (general.architecture): of GGUF files, kvllm runs "
            f"{', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def renamed(
    architecture: Architecture, tensors: dict[str, GGUFTensor], keys: dict[str, Any]
) -> Iterator[tuple[str, RenamedTensor]]:
    """The tensors as transformers has them, with their names there. keys: of the config."""
    last = f"model.layers.{keys['num_hidden_layers']}."
    for name, tensor in _renamed(architecture, tensors, keys):
        if not architecture.mtp or not name.startswith(last):
            yield name, tensor
            continue
        module, _, suffix = name.removeprefix(last).rpartition(".")
        yield f"mtp.{architecture.mtp.get(module, f'layers.0.{module}')}.{suffix}", tensor


def _renamed(
    architecture: Architecture, tensors: dict[str, GGUFTensor], keys: dict[str, Any]
) -> Iterator[tuple[str, RenamedTensor]]:
    """The same, with all layers called alike."""
    stacks: dict[str, dict[str, GGUFTensor]] = {}
    for name, tensor in _separate(architecture, tensors):
        if name in VECTORS:
            continue
        tensor = architecture.undo(name, tensor, keys)
        if not name.startswith("blk."):
            module, _, suffix = name.rpartition(".")
            yield f"{(TOP | architecture.names).get(module, module)}.{suffix}", tensor
            continue
        number, _, rest = name.removeprefix("blk.").partition(".")
        module, _, suffix = rest.rpartition(".") if "." in rest else (rest, "", "")
        prefix = f"model.layers.{number}"
        if whole := architecture.whole.get(rest, architecture.whole.get(module)):
            yield f"{prefix}.{whole}", tensor
        elif module in architecture.experts and len(tensor.shape) == 3:
            for expert in range(tensor.shape[0]):
                yield f"{prefix}.{architecture.experts[module].format(expert)}.{suffix}", tensor.expert(expert)
        elif any(module in parts for parts in architecture.stacked.values()):
            stacks.setdefault(f"{prefix} {suffix}", {})[module] = tensor
        else:
            yield f"{prefix}.{(LAYER | architecture.names).get(module, module)}.{suffix}", tensor
    for place, parts in stacks.items():
        yield from _stacked(architecture, place, parts)


def _separate(architecture: Architecture, tensors: dict[str, GGUFTensor]) -> Iterator[tuple[str, GGUFTensor]]:
    for name, tensor in tensors.items():
        module = name.rpartition(".")[0].rpartition(".")[2]
        for part in architecture.joined.get(module, (module,)):
            yield name.replace(f".{module}.", f".{part}."), tensor


def _stacked(
    architecture: Architecture, place: str, parts: dict[str, GGUFTensor]
) -> Iterator[tuple[str, RenamedTensor]]:
    prefix, suffix = place.split(" ")
    for name, needed in architecture.stacked.items():
        found = tuple(parts[part] for part in needed if part in parts)
        if len(found) == len(needed) and architecture.stack.fits(found):
            yield f"{prefix}.{name}" + ("_bias" if suffix == "bias" else ""), architecture.stack(found)
