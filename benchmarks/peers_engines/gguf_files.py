"""Checkpoints of safetensors as GGUF files for llama.cpp: Qwen2, Qwen3, Llama and Mistral, without a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy

ARCHITECTURES = {"qwen2": "QWEN2", "qwen3": "QWEN3", "llama": "LLAMA", "mistral": "LLAMA"}
Tensor = tuple[str, str, numpy.ndarray]
"""Name, dtype as in safetensors, and numbers; bfloat16 numbers are their 16 bits."""


def write_gguf(checkpoint: Path, path: Path) -> None:
    """Write the weights in bfloat16, vectors in float32."""
    config = json.loads((checkpoint / "config.json").read_text())
    model_type = config["model_type"]
    if model_type not in ARCHITECTURES:
        raise ValueError(f"{model_type} cannot be converted: choose one of {', '.join(ARCHITECTURES)}")
    arch = gguf.MODEL_ARCH[ARCHITECTURES[model_type]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _add_settings(writer, config)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, dtype, numbers in _tensors(checkpoint):
        if arch == gguf.MODEL_ARCH.LLAMA and ("q_proj" in name or "k_proj" in name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            numbers = _interleaved(numbers, heads)
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if new_name is None:
            raise ValueError(f"the tensor {name} has no place in a GGUF file of {model_type}")
        if numbers.ndim == 1:
            writer.add_tensor(new_name, _float32(numbers, dtype))
        else:
            writer.add_tensor(
                new_name, _bfloat16(numbers, dtype).view(numpy.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    scaling = (config.get("rope_scaling") or rope).get("rope_type", "default")
    if scaling != "default":
        raise ValueError(f"rotary embeddings of the type {scaling} cannot be converted")
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def _tensors(checkpoint: Path) -> Iterator[Tensor]:
    """The format's header is JSON behind its length in 8 bytes; the numbers follow it."""
    types = {"BF16": numpy.uint16, "F16": numpy.float16, "F32": numpy.float32}
    for file in sorted(checkpoint.glob("*.safetensors")):
        data = numpy.memmap(file, mode="r")
        start = 8 + int(data[:8].view("<u8")[0])
        header = json.loads(bytes(data[8:start]))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            numbers = data[start + begin : start + end].view(types[entry["dtype"]])
            yield name, entry["dtype"], numbers.reshape(entry["shape"])


def _interleaved(numbers: numpy.ndarray, heads: int) -> numpy.ndarray:
    """The outputs of a projection, from halves that are rotated together to neighbours that are."""
    shape = numbers.shape
    return numbers.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def _float32(numbers: numpy.ndarray, dtype: str) -> numpy.ndarray:
    if dtype == "BF16":
        return (numbers.astype(numpy.uint32) << 16).view(numpy.float32)
    return numbers.astype(numpy.float32)


def _bfloat16(numbers: numpy.ndarray, dtype: str) -> numpy.ndarray:
    """The 16 bits of each number, rounded to nearest, ties to even."""
    if dtype == "BF16":
        return numpy.ascontiguousarray(numbers)
    bits = numbers.astype(numpy.float32).view(numpy.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)
