"""Small pooling models with random weights, as they are published, and what transformers makes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

from tests.helpers.checkpoints import SIZES

GEMMA = {
    "family": "gemma3_text",
    "head_dim": 16,
    "sliding_window": 8,  # a token attends four to either side
    "num_hidden_layers": 7,
    "use_bidirectional_attention": True,
}


def save(path: Path, kind: str, family: str, **options: Any) -> Any:
    """Write a model of transformers' class `AutoModel` + `kind`, and return it."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, "pad_token_id": 0, **options})
    model = getattr(transformers, f"AutoModel{kind}").from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(path)
    return model


def add_modules(path: Path, mode: str, *, dense: Sequence[tuple[int, int]] = (), normalize: bool = True) -> list[Any]:
    """Write what sentence-transformers keeps beside a model, and return the dense layers. dense: their sizes."""
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), *["Normalize"] * normalize]
    names = [f"{i}_{kind}" if i else "" for i, kind in enumerate(kinds)]
    modules = [
        {"idx": i, "name": str(i), "path": name, "type": f"sentence_transformers.models.{kind}"}
        for i, (name, kind) in enumerate(zip(names, kinds, strict=True))
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 64, f"pooling_mode_{mode}": True, "pooling_mode_max_tokens": False})
    )
    layers = []
    for i, (inner, outer) in enumerate(dense, start=2):
        layer = torch.nn.Linear(inner, outer, bias=False)
        (path / f"{i}_Dense").mkdir()
        keys = {"in_features": inner, "out_features": outer, "bias": False}
        keys["activation_function"] = "torch.nn.modules.linear.Identity"
        (path / f"{i}_Dense" / "config.json").write_text(json.dumps(keys))
        save_file({"linear.weight": layer.weight.detach()}, path / f"{i}_Dense" / "model.safetensors")
        layers.append(layer)
    return layers


@torch.inference_mode()
def hidden_states(model: Any, prompt: list[int]) -> torch.Tensor:
    """The last ones `[tokens, hidden_size]`, of a prompt alone: nothing is padded."""
    inner = getattr(model, "model", model)
    return inner(input_ids=torch.tensor([prompt])).last_hidden_state[0]


@torch.inference_mode()
def embedding(model: Any, prompt: list[int], pooling: str, layers: Sequence[Any] = ()) -> torch.Tensor:
    """The normalized embedding of a prompt."""
    states = hidden_states(model, prompt)
    pooled = {"LAST": states[-1], "CLS": states[0], "MEAN": states.mean(0)}[pooling]
    for layer in layers:
        pooled = layer(pooled)
    return F.normalize(pooled, dim=0)


@torch.inference_mode()
def logits(model: Any, prompt: list[int]) -> torch.Tensor:
    """The scores of a classifier `[labels]`."""
    return model(input_ids=torch.tensor([prompt])).logits[0]
