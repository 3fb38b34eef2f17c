"""The architectures of GGUF files: how their tensors are called in transformers' checkpoints, and what was changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from kvllm.errors import CheckpointError
from kvllm.files.gguf import config
from kvllm.files.gguf.tensors import ExpertStack, GGUFTensor

TOP = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
    "output_norm": "model.norm",
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
}
"""Names in a layer, `blk.0.` there and `model.layers.0.` here. Other names stay, and are refused where they end up."""
GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
WHOLE = {"attn_sinks": "self_attn.sinks", "exp_probs_b": "mlp.gate.e_score_correction_bias"}
"""Names without a suffix here."""
IGNORED = (config.FACTORS, config.SHORT, config.LONG)
"""Tensors that the config has."""


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    config: makes the keys of `config.json`. names: beside those of LAYER.
    norm_offset: what llama.cpp's converter has added to the weights of norms.
    permuted: it has put the two halves of each head of queries and keys between each other, as its RoPE wants them.
    experts: the name of a matrix of one expert, by that of the tensor of all.
    stacked: all experts have one tensor here, too, of several tensors there.
    """

    config: Callable[[config.Metadata], dict[str, Any]]
    names: dict[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0
    permuted: bool = False
    experts: dict[str, str] = field(default_factory=dict)
    stacked: dict[str, tuple[str, ...]] = field(default_factory=dict)


PROJECTIONS = ("gate", "up", "down")
EXPERTS = {f"ffn_{name}_exps": f"mlp.experts.{{}}.{name}_proj" for name in PROJECTIONS}
W = {"gate": 1, "up": 3, "down": 2}
"""Numbers of projections that are called w1, w2 and w3."""
MIXTRAL = {f"ffn_{name}_exps": f"block_sparse_moe.experts.{{}}.w{i}" for name, i in W.items()}
ARCHITECTURES = {
    "gemma2": Architecture(config.gemma2, GEMMA, norm_offset=1.0),
    "gemma3": Architecture(config.gemma3, GEMMA, norm_offset=1.0),
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
            "ffn_gate_inp": "mlp.gate",
            **{f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in PROJECTIONS},
        },
        experts=EXPERTS,
    ),
    "gpt-oss": Architecture(
        config.gpt_oss,
        {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
        stacked={
            "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
            "mlp.experts.down_proj": ("ffn_down_exps",),
        },
    ),
    "granite": Architecture(config.granite, permuted=True),
    "lfm2": Architecture(
        config.lfm2,
        {
            "attn_norm": "operator_norm",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "ffn_norm": "ffn_norm",
            **{f"ffn_{name}": f"feed_forward.w{i}" for name, i in W.items()},
            **{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
        },
    ),
    "llama": Architecture(config.llama, {"ffn_gate_inp": "block_sparse_moe.gate"}, permuted=True, experts=MIXTRAL),
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
    "smollm3": Architecture(config.smollm3, permuted=True),
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
    architecture: Architecture, tensors: dict[str, GGUFTensor], heads: tuple[int, int]
) -> Iterator[tuple[str, GGUFTensor | ExpertStack]]:
    """The tensors as transformers has them, with their names there. heads: of queries, and of keys."""
    stacks: dict[str, dict[str, GGUFTensor]] = {}
    for name, tensor in tensors.items():
        if name in IGNORED:
            continue
        if not name.startswith("blk."):
            module, _, suffix = name.rpartition(".")
            yield f"{TOP.get(module, module)}.{suffix}", _changed(architecture, name, tensor, heads)
            continue
        number, _, rest = name.removeprefix("blk.").partition(".")
        module, _, suffix = rest.rpartition(".")
        prefix = f"model.layers.{number}"
        if module in WHOLE:
            yield f"{prefix}.{WHOLE[module]}", tensor
        elif module in architecture.experts and len(tensor.shape) == 3:
            for expert in range(tensor.shape[0]):
                yield f"{prefix}.{architecture.experts[module].format(expert)}.{suffix}", tensor.expert(expert)
        elif any(module in parts for parts in architecture.stacked.values()):
            stacks.setdefault(f"{prefix} {suffix}", {})[module] = tensor
        else:
            known = (LAYER | architecture.names).get(module, module)
            yield f"{prefix}.{known}.{suffix}", _changed(architecture, name, tensor, heads)
    for place, parts in stacks.items():
        yield from _stacked(architecture, place, parts)


def _changed(architecture: Architecture, name: str, tensor: GGUFTensor, heads: tuple[int, int]) -> GGUFTensor:
    """The tensor without what the converter has done to it."""
    offset, order, shape, blocks = tensor.offset, tensor.order, tensor.shape, tensor.blocks
    if name.endswith("norm.weight"):
        offset = architecture.norm_offset
    if architecture.permuted and ".attn_q." in name:
        order = _halves(tensor, name, heads[0])
    if architecture.permuted and ".attn_k." in name:
        order = _halves(tensor, name, heads[1])
    if ".shortconv.conv." in name and len(shape) == 2:
        shape, blocks = (shape[0], 1, shape[1]), blocks.unsqueeze(1)
    return GGUFTensor(tensor.file, tensor.type, shape, blocks, order, offset)


def _halves(tensor: GGUFTensor, name: str, heads: int) -> torch.Tensor:
    """The rows of a file in which those of the two halves of a head alternate, one half after the other."""
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise CheckpointError(f"{tensor.file}: {name} has {rows} rows, which {heads} heads cannot share")
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def _stacked(architecture: Architecture, place: str, parts: dict[str, GGUFTensor]) -> Iterator[tuple[str, ExpertStack]]:
    prefix, suffix = place.split(" ")
    for name, needed in architecture.stacked.items():
        found = tuple(parts[part] for part in needed if part in parts)
        if len(found) == len(needed) and len({part.shape for part in found}) == 1 and len(found[0].shape) in (2, 3):
            yield f"{prefix}.{name}" + ("_bias" if suffix == "bias" else ""), ExpertStack(found)
