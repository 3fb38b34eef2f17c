"""What llama.cpp's converter has changed of tensors, undone: they are as transformers has them again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kvllm.errors import CheckpointError
from kvllm.files.gguf.tensors import GGUFTensor

Undo = Callable[[str, GGUFTensor, dict[str, Any]], GGUFTensor]
"""Of a name in the file, the tensor there, and the config: the tensor of the checkpoint."""
AFTER_KEYS = ("attn_qkv", "ssm_conv1d")
OF_CHANNELS = (*AFTER_KEYS, "attn_gate")
OF_VALUES = (*OF_CHANNELS, "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt", "ssm_out")
"""Of Gated DeltaNet, what has a part for each value head. The first ones have all queries and keys before these."""


def as_it_is(name: str, tensor: GGUFTensor, config: dict[str, Any]) -> GGUFTensor:
    return tensor


def norms(name: str, tensor: GGUFTensor, config: dict[str, Any]) -> GGUFTensor:
    """Weights of norms have one more."""
    return replace(tensor, undo=_less_one) if name.endswith("norm.weight") else tensor


def halves_of_heads(name: str, tensor: GGUFTensor, config: dict[str, Any]) -> GGUFTensor:
    """The rows of both halves of each head of queries and keys alternate, as llama.cpp's RoPE wants them."""
    counts = {".attn_q.": "num_attention_heads", ".attn_k.": "num_key_value_heads"}
    for part, key in counts.items():
        if part in name:
            rows, heads = tensor.shape[0], config[key]
            if rows % (2 * heads):
                raise CheckpointError(f"{tensor.file}: {name} has {rows} rows, which {heads} heads cannot share")
            return replace(tensor, order=torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten())
    return tensor


def convolutions(name: str, tensor: GGUFTensor, config: dict[str, Any]) -> GGUFTensor:
    """Convolutions lack the dimension of one."""
    return _with_one(tensor, 1) if ".shortconv.conv." in name and len(tensor.shape) == 2 else tensor


def gated_delta_net(name: str, tensor: GGUFTensor, config: dict[str, Any]) -> GGUFTensor:
    """As below; and the first value head of every key head comes first, then the second of each."""
    tensor, module = _delta(name, tensor), _module(name)
    if module not in OF_VALUES:
        return tensor
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    order = torch.arange(heads).view(-1, key_heads).T.flatten()
    if module == "ssm_out":
        return replace(tensor, column_parts=order)
    size = config["linear_value_head_dim"] if module in OF_CHANNELS else 1
    first = 2 * key_heads * config["linear_key_head_dim"] if module in AFTER_KEYS else 0
    rows = first + (order.unsqueeze(1) * size + torch.arange(size)).flatten()
    return replace(tensor, order=torch.cat((torch.arange(first), rows)))


def gated_delta_net_in_turns(name: str, tensor: GGUFTensor, config: dict[str, Any]) -> GGUFTensor:
    """Norms but that of the recurrent layers have one more; decays are `-exp(A_log)`; dimensions of one are absent; the
    projection to strengths and decays has those of each key head in turn."""
    tensor, module = _delta(name, tensor), _module(name)
    if module not in ("ssm_beta", "ssm_alpha"):
        return tensor
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if tensor.shape[0] != 2 * heads:
        raise CheckpointError(f"{tensor.file}: {name} has {tensor.shape[0]} rows, not two for each of {heads} heads")
    order = torch.arange(2 * heads).view(key_heads, 2, -1)[:, int(module == "ssm_alpha")].flatten()
    return replace(tensor, order=order, shape=(heads, *tensor.shape[1:]))


def _delta(name: str, tensor: GGUFTensor) -> GGUFTensor:
    """What is as in other files of Gated DeltaNet."""
    module = _module(name)
    if module == "ssm_conv1d" and len(tensor.shape) == 2:
        return _with_one(tensor, 1)
    if module == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:
        return _with_one(tensor, 0)
    if module == "ssm_a":
        return replace(tensor, undo=_logarithm)
    return tensor if module == "ssm_norm" else norms(name, tensor, {})


def mamba(name: str, tensor: GGUFTensor, config: dict[str, Any]) -> GGUFTensor:
    """Decays are `-exp(A_log)`; vectors of heads have a dimension of one, and norms one of groups; convolutions lack
    one. Multipliers are part of the weights."""
    module = name.removeprefix("blk.").partition(".")[2]
    if module == "ssm_conv1d.weight" and len(tensor.shape) == 2:
        return _with_one(tensor, 1)
    if module not in ("ssm_a", "ssm_d", "ssm_norm.weight"):
        return tensor
    flat = replace(tensor, shape=(math.prod(tensor.shape),), blocks=tensor.blocks.flatten())
    return replace(flat, undo=_logarithm) if module == "ssm_a" else flat


def _module(name: str) -> str:
    return name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]


def _with_one(tensor: GGUFTensor, dim: int) -> GGUFTensor:
    """The tensor with one dimension more, of size one."""
    shape = (*tensor.shape[:dim], 1, *tensor.shape[dim:])
    return replace(tensor, shape=shape, blocks=tensor.blocks.unsqueeze(dim))


def _less_one(values: torch.Tensor) -> torch.Tensor:
    return values - 1


def _logarithm(values: torch.Tensor) -> torch.Tensor:
    return (-values).log()
