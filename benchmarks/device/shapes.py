"""The shapes of models that are measured with random weights, and the bytes that a step over them must read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.common import limits, shapes
from benchmarks.device.target import Target
from kvllm.models.config import ModelConfig

LLAMA_8B = "R1-Distill-Llama-8B"
QWEN3_4B = "Qwen3-4B"
TINY = {
    **shapes.QWEN3,
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
SHAPES: dict[str, dict[str, Any]] = {
    LLAMA_8B: shapes.SHAPES["8b"],
    QWEN3_4B: {
        **shapes.QWEN3,
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}


def write_shape(target: Target, name: str, directory: Path) -> Path:
    """A directory with the config.json of a shape, for `load_format="dummy"`; of a tiny model in a dry run."""
    path = directory / name
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(target.size(SHAPES[name], TINY)))
    return path


def kv_pair_bytes(model: ModelConfig) -> int:
    """Bytes of one token's keys and values in bfloat16, all layers."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * 2


def held_weight_bytes(model: ModelConfig) -> int:
    """Bytes of all matrices in bfloat16: those that a step reads, and input embeddings of their own."""
    embedding = 0 if model.tie_word_embeddings else 2 * model.vocab_size * model.hidden_size
    return limits.weight_bytes(model, "bfloat16") + embedding


def decode_cost(model: ModelConfig, batch: int, context: float) -> tuple[float, float]:
    """Bytes that a decode step must read, and operations it must do, at `context` KV pairs for each sequence."""
    weights = limits.weight_bytes(model, "bfloat16")
    attended = 4 * model.num_layers * model.num_query_heads * model.head_dim * context
    return weights + batch * context * kv_pair_bytes(model), batch * (weights + attended)
