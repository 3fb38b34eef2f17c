"""The reasoner as a Hugging Face checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import save_file

from benchmarks.reasoner.model import Reasoner
from kvllm.engine_args import DEFAULT_MODEL

FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
"""Of the package's model, which all reasoners share."""


def save_checkpoint(model: Reasoner, out: Path) -> None:
    """Write config, float32 weights and tokenizer as transformers' Qwen3ForCausalLM and AutoTokenizer read them."""
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if not (out / name).exists() or not (out / name).samefile(DEFAULT_MODEL / name):
            shutil.copyfile(DEFAULT_MODEL / name, out / name)
    weights = {f"model.{name}": p.detach().float().contiguous() for name, p in model.named_parameters()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
