"""The physical limit of decoding: a step cannot be shorter than reading the weights, and the KV cache, once."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.common import machine
from benchmarks.common.measurement import Measurement
from kvllm.models.config import ModelConfig


def itemsize(model: ModelConfig, dtype: str) -> int:
    """Bytes of a weight, and of a number in the KV cache."""
    return 2 if "bfloat16" in (dtype, model.dtype if dtype == "auto" else None) else 4


def weight_bytes(model: ModelConfig, dtype: str) -> int:
    """Bytes of all matrices that a step reads whole: those of the layers, and the one that gives the logits."""
    heads = model.num_query_heads + 2 * model.num_kv_heads
    attention = model.hidden_size * model.head_dim * (heads + model.num_query_heads)
    layer = attention + 3 * model.hidden_size * model.intermediate_size
    return (model.num_layers * layer + model.vocab_size * model.hidden_size) * itemsize(model, dtype)


def physical_limit(model: ModelConfig, dtype: str, device: str) -> dict[str, float | None]:
    """Tokens/s at which one sequence could decode if a step cost no more than reading the weights once from memory.

    None in place of the rate for weights that fit into the CPU's last-level cache: memory is not what limits them.
    """
    size, bandwidth = weight_bytes(model, dtype), machine.read_bandwidth(device)
    cached = device == "cpu" and size <= (machine.last_level_cache() or 0)
    return {
        "weight_bytes": size,
        "read_bytes_per_s": bandwidth,
        "one_sequence_tokens_per_s": None if cached else bandwidth / size,
    }


def memory_limit(limit: Mapping[str, float | None], run: Measurement) -> float | None:
    """Output tokens/s that a run's own steps would allow if each took no longer than reading the weights and the blocks
    in use once from memory. None if all of that fits into the CPU's last-level cache."""
    weights, bandwidth = limit["weight_bytes"], limit["read_bytes_per_s"]
    assert weights is not None and bandwidth is not None
    step = weights + run.mean_blocks * run.block_bytes
    if run.device == "cpu" and step <= (machine.last_level_cache() or 0):
        return None
    return run.output_tokens * bandwidth / (run.steps * step)


def show_memory_limit(limit: Mapping[str, float | None]) -> str:
    weights, bandwidth = limit["weight_bytes"], limit["read_bytes_per_s"]
    assert weights is not None and bandwidth is not None
    return (
        f"Weights read in a step: {weights / 1e6:,.0f} MB; memory is read at {bandwidth / 1e9:,.1f} GB/s. The column "
        "'memory allows' is what\na run's steps would reach if reading the weights and the KV blocks in use once were "
        "all that they cost."
    )
