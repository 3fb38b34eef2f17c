"""Random LoRA adapters as PEFT writes them, and the same models with merged weights."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


def matrices(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint in one file."""
    return load_file(checkpoint / "model.safetensors")


def make_adapter(
    path: Path,
    checkpoint: Path,
    modules: tuple[str, ...] = (*ATTENTION, *MLP),
    *,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    std: float = 0.15,
    **config: Any,
) -> Path:
    """Write an adapter of the matrices whose names end with `modules`, and return its directory."""
    generator = torch.Generator().manual_seed(seed)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, weight in sorted(matrices(checkpoint).items()):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in modules:
            continue
        own = rank
        for key, value in (config.get("rank_pattern") or {}).items():
            if re.match(rf"(.*\.)?({key})$", module):
                own = value
                break
        for half, shape in (("A", (own, weight.shape[1])), ("B", (weight.shape[0], own))):
            values = torch.randn(shape, generator=generator) * std
            tensors[f"base_model.model.{module}.lora_{half}.weight"] = values
    save_file(tensors, path / "adapter_model.safetensors")
    written = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(modules), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(written | config))
    return path


def merge(path: Path, checkpoint: Path, adapter: Path) -> Path:
    """Write a checkpoint to `path` whose weights are W + B @ A * scale, and return it."""
    shutil.copytree(checkpoint, path)
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors, weights = load_file(adapter / "adapter_model.safetensors"), matrices(checkpoint)
    for name, a in tensors.items():
        if ".lora_A." not in name:
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        alpha, rank = config["lora_alpha"], a.shape[0]
        for key, value in (config.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({key})$", module):
                alpha = value
                break
        scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
        weight = weights[f"{module}.weight"]
        merged = weight.double() + tensors[name.replace("lora_A", "lora_B")].double() @ a.double() * scale
        weights[f"{module}.weight"] = merged.to(weight.dtype)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def copied(adapter: Path, path: Path, renamed: dict[str, str] | None = None, **config: Any) -> Path:
    """Write a copy of an adapter to `path` and return it. renamed: parts of the names of tensors. config: other values
    of keys of its configuration."""
    shutil.copytree(adapter, path)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for old, new in (renamed or {}).items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, path / "adapter_model.safetensors")
    written = json.loads((adapter / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(written | config))
    return path
