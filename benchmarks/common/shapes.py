"""Shapes of the models that are measured with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvllm.engine_args import DEFAULT_MODEL

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "head_dim": 64,
}


def _qwen3(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int
) -> dict[str, Any]:
    return QWEN3 | {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "50m": _qwen3(8192, 512, 1536, 12, 8, 2, 64),
    "0.6b": _qwen3(151936, 1024, 3072, 28, 16, 8, 128),
    "1.7b": _qwen3(151936, 2048, 6144, 28, 16, 8, 128),
    "4b": _qwen3(151936, 2560, 9728, 36, 32, 8, 128),
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
