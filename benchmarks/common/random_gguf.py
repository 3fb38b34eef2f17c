"""A GGUF file of a shape of Qwen3 whose weights are random blocks, in the types that Q4_K_M mixes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFWriter
from gguf import GGMLQuantizationType as Type

SCALES = {Type.Q4_K: (6e-5, 4.5e-4), Type.Q6_K: (1.5e-5,)}
"""Of every block, at which weights have a mean of 0 and a standard deviation of 0.02: d, and dmin."""


def write(shape: dict[str, Any], path: Path) -> None:
    """Write the file, without a tokenizer."""
    writer, layers = GGUFWriter(path, "qwen3"), shape["num_hidden_layers"]
    writer.add_block_count(layers)
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_tokenizer_model("none")
    generator = np.random.default_rng(0)
    hidden, inner, head_dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, pairs = (shape[f"num_{name}_heads"] * head_dim for name in ("attention", "key_value"))

    def matrix(name: str, rows: int, columns: int, kind: Type = Type.Q4_K) -> None:
        writer.add_tensor(f"{name}.weight", _blocks(generator, kind, rows, columns), raw_dtype=kind)

    def norm(name: str, length: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(length, np.float32))

    matrix("token_embd", shape["vocab_size"], hidden, Type.Q6_K)
    norm("output_norm", hidden)
    for layer in range(layers):
        block, wide = f"blk.{layer}", Type.Q6_K if _in_six_bits(layer, layers) else Type.Q4_K
        for name, length in {
            "attn_norm": hidden,
            "ffn_norm": hidden,
            "attn_q_norm": head_dim,
            "attn_k_norm": head_dim,
        }.items():
            norm(f"{block}.{name}", length)
        matrix(f"{block}.attn_q", queries, hidden)
        matrix(f"{block}.attn_k", pairs, hidden)
        matrix(f"{block}.attn_v", pairs, hidden, wide)
        matrix(f"{block}.attn_output", hidden, queries)
        matrix(f"{block}.ffn_gate", inner, hidden)
        matrix(f"{block}.ffn_up", inner, hidden)
        matrix(f"{block}.ffn_down", hidden, inner, wide)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _in_six_bits(layer: int, layers: int) -> bool:
    """Whether llama.cpp gives the layer's values and last product more bits: the ends, and one of three between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _blocks(generator: np.random.Generator, kind: Type, rows: int, columns: int) -> np.ndarray:
    """Random bytes but for the scales of blocks, which stand first in Q4_K and last in Q6_K: [rows, bytes]."""
    size, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (rows * columns // size, num_bytes), np.uint8)
    scales = np.array(SCALES[kind], np.float16).view(np.uint8)
    place = slice(len(scales)) if kind == Type.Q4_K else slice(num_bytes - len(scales), num_bytes)
    blocks[:, place] = scales
    return blocks.reshape(rows, -1)
