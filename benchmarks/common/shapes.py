"""Shapes of the models that are measured with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvllm.engine_args import DEFAULT_MODEL

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "50m": {
        **QWEN3,
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
    "0.6b": {
        **QWEN3,
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "1.7b": {
        **QWEN3,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "4b": {
        **QWEN3,
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
}
"""Parameters: 40.4 M; 596 M, 1.7 G and 4.0 G, as Qwen3 has them; 8.0 G, as DeepSeek-R1-Distill-Llama-8B."""


REASONER = "reasoner"
MODEL_HELP = (
    f"directory of a checkpoint, {REASONER} (the package's), or a shape with random weights: {', '.join(SHAPES)}"
)


def find_model(name: str, directory: Path) -> Path:
    """The directory of a checkpoint, the package's model, or a shape, whose config.json is written to `directory`."""
    if name == REASONER:
        return DEFAULT_MODEL
    if name not in SHAPES:
        return Path(name).resolve()
    path = directory / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(SHAPES[name]))
    return path
