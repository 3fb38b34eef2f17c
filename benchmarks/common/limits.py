"""The physical limit: a decoding step takes at least the time to read the weights once."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from benchmarks.common import machine
from kvllm.models.config import ModelConfig


def weight_bytes(model: ModelConfig, dtype: str) -> int:
    """Bytes of all matrices that a step reads whole: the matrices of the layers, and the one of the logits."""
    heads = model.num_query_heads + 2 * model.num_kv_heads
    attention = model.hidden_size * model.head_dim * (heads + model.num_query_heads)
    layer = attention + 3 * model.hidden_size * model.intermediate_size
    itemsize = 2 if "bfloat16" in (dtype, model.dtype if dtype == "auto" else None) else 4
    return (model.num_layers * layer + model.vocab_size * model.hidden_size) * itemsize


class PhysicalLimit(Struct, frozen=True):
    """The bytes that every step reads, and the rate at which this machine reads them."""

    weight_bytes: float
    read_bytes_per_s: float


def show_weights_limit(limit: PhysicalLimit, tokens_per_s: Mapping[str, float], alone: bool) -> str:
    """What reading the weights allows one sequence and, where one runs alone, the share of it that each run reached."""
    rate = limit.read_bytes_per_s / limit.weight_bytes
    text = f"{limit.weight_bytes / 1e6:.0f} MB of weights, read at {limit.read_bytes_per_s / 1e9:.1f} GB/s"
    if limit.weight_bytes <= (machine.last_level_cache() or 0):
        return f"{text}, fit into the last-level cache, so reading them sets no limit."
    text += f": one sequence alone decodes at most {rate:.0f} tokens/s"
    reached = ", ".join(f"{name} {each / rate:.0%}" for name, each in tokens_per_s.items())
    return f"{text}; reached, prompt included: {reached}." if alone else f"{text}."
