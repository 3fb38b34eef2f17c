"""The physical limit: a decoding step takes at least the time to read the weights, and the KV cache, once."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from benchmarks.common import machine
from kvllm.models.config import ModelConfig


def itemsize(model: ModelConfig, dtype: str) -> int:
    """Bytes of a weight, and of a number in the KV cache."""
    return 2 if "bfloat16" in (dtype, model.dtype if dtype == "auto" else None) else 4


def weight_bytes(model: ModelConfig, dtype: str) -> int:
    """Bytes of all matrices that a step reads whole: the matrices of the layers, and the one of the logits."""
    heads = model.num_query_heads + 2 * model.num_kv_heads
    attention = model.hidden_size * model.head_dim * (heads + model.num_query_heads)
    layer = attention + 3 * model.hidden_size * model.intermediate_size
    return (model.num_layers * layer + model.vocab_size * model.hidden_size) * itemsize(model, dtype)


class PhysicalLimit(Struct, frozen=True):
    """The bytes that every step reads, and the rate at which this machine reads them.

    one_sequence_tokens_per_s: of a sequence whose steps did nothing but read the weights once. None for weights that
        fit into the CPU's last-level cache, because memory does not limit them.
    """

    weight_bytes: float
    read_bytes_per_s: float
    one_sequence_tokens_per_s: float | None = None


def physical_limit(model: ModelConfig, dtype: str, device: str) -> PhysicalLimit:
    """Measures the memory bandwidth."""
    size, bandwidth = weight_bytes(model, dtype), machine.read_bandwidth(device)
    return PhysicalLimit(size, bandwidth, None if _in_cache(size, device) else bandwidth / size)


def _in_cache(num_bytes: float, device: str) -> bool:
    return device == "cpu" and num_bytes <= (machine.last_level_cache() or 0)


def show_weights_limit(limit: PhysicalLimit, tokens_per_s: Mapping[str, float], alone: bool) -> str:
    """What reading the weights allows one sequence and, where one runs alone, the share of it that each run reached."""
    rate = limit.one_sequence_tokens_per_s
    read = f"memory is read at {limit.read_bytes_per_s / 1e9:.1f} GB/s"
    text = f"Weights read in a step: {limit.weight_bytes / 1e6:.0f} MB; {read}.\n"
    if rate is None:
        return text + "The weights fit into the last-level cache, so reading them sets no limit."
    text += f"So one sequence alone decodes at most {rate:.0f} tokens/s"
    reached = ", ".join(f"{name} {each / rate:.0%}" for name, each in tokens_per_s.items())
    return f"{text}; reached, prompt included: {reached}." if alone else f"{text}."
