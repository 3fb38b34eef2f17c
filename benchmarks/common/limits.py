"""Physical limits: a step takes at least the time to read its bytes once, and to compute its products."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from benchmarks.common import machine
from kvllm.models.config import ModelConfig
from kvllm.simulation.workload import Lengths

BYTES_PER_WEIGHT = {"f32": 4, "bf16": 2, "int8": 34 / 32, "int4": 18 / 32}
"""By the format: 8 and 4 bits have a scale of 16 bits for 32 weights, as Q8_0 and Q4_0."""


def matrix_numbers(model: ModelConfig) -> int:
    """Numbers of all matrices that a step reads whole: the matrices of the layers, and the one of the logits."""
    heads = model.num_query_heads + 2 * model.num_kv_heads
    attention = model.hidden_size * model.head_dim * (heads + model.num_query_heads)
    layer = attention + 3 * model.hidden_size * model.intermediate_size
    return model.num_layers * layer + model.vocab_size * model.hidden_size


class Peak(Struct, frozen=True):
    """The rates of this machine: bytes that it reads, and products and sums of 8 bits."""

    read_bytes_per_s: float
    operations_per_s: float


class Floor(Struct, frozen=True):
    """The least seconds until all requests have their first tokens, and the highest rate of all other tokens."""

    prompt_seconds: float
    decode_tokens_per_s: float


def floor(model: ModelConfig, lengths: Sequence[Lengths], weight_bytes: float, kv_itemsize: float, peak: Peak) -> Floor:
    """That of requests with these lengths of prompts and outputs that all run at once.

    weight_bytes: read by each step; in the last-level cache, they cost nothing. kv_itemsize: bytes of a number there.
    """
    read = 0.0 if weight_bytes <= (machine.last_level_cache() or 0) else weight_bytes
    windows = [layer.window for layer in model.layers] or [None] * model.num_layers
    logits = model.vocab_size * model.hidden_size
    layers = matrix_numbers(model) - logits

    def pairs(positions: range) -> int:
        """KV pairs that all layers attend at these positions."""
        return sum(min(p + 1, window or p + 1) for window in windows for p in positions)

    def products(tokens: int, sampled: int, attended: int) -> float:
        of_attention = 2 * model.num_query_heads * model.head_dim * attended
        return 2 * (layers * tokens + logits * sampled + of_attention) / peak.operations_per_s

    prompt = sum(products(length, 1, pairs(range(length))) for length, _ in lengths)
    steps = max(output for _, output in lengths) - 1
    attended = sum(pairs(range(length, length + output - 1)) for length, output in lengths)
    moved = steps * read + attended * 2 * model.num_kv_heads * model.head_dim * kv_itemsize
    tokens = sum(output - 1 for _, output in lengths)
    decode = max(moved / peak.read_bytes_per_s, products(tokens, tokens, attended))
    return Floor(max(prompt, read / peak.read_bytes_per_s), tokens / decode)
