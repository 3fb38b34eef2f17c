"""What the live page is told of the server once: facts that do not change while it runs."""

from __future__ import annotations

from msgspec import Struct

from kvllm.config import CompressionConfig, EngineConfig
from kvllm.core.policies import Threshold, WindowOptions
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.serving.state import ServerState


class Info(Struct):
    """The server and its model.

    compression: the settings, one line; "" without compression.
    has_chat_template: whether the model takes conversations; else it completes text.
    kept_option: the field of a request's `compression` that says how much is kept; "" without compression.
    kept_default: the engine's own value of it. kept_of: the value that keeps all.
    pair_bytes: of a token's KV pairs in all layers. stored: the bits that their numbers have in the pool, in words.
    dropped_to: where dropped ones go, and with how many bits; "" if nowhere.
    key: the name of the viewer's key; "" if the server needs none.
    """

    model: str
    max_model_len: int
    block_size: int
    max_num_seqs: int
    compression: str
    has_chat_template: bool
    kept_option: str
    kept_default: int
    kept_of: int
    pair_bytes: float
    stored: str
    dropped_to: str
    needs_key: bool
    key: str


def make_info(state: ServerState, key: str) -> Info:
    config = state.llm.config
    compression = config.active_compression
    kept_option, kept_default, kept_of = _kept_option(compression)
    return Info(
        state.model_name,
        config.max_model_len,
        config.block_size,
        config.max_num_seqs,
        _describe(compression),
        state.chat_template.exists,
        kept_option,
        kept_default,
        kept_of,
        round(state.llm.stats().block_bytes / config.block_size, 1),
        _stored(config, state.llm.model_config.dtype),
        _dropped_to(config, state.llm.model_config.dtype),
        bool(state.options.keys),
        key,
    )


def _kept_option(compression: CompressionConfig | None) -> tuple[str, int, int]:
    if compression is None:
        return "", 0, 0
    policy = compression.policy
    if isinstance(policy, Threshold):
        return "budget_tokens", policy.budget_tokens, policy.threshold_tokens
    if isinstance(policy, WindowOptions):
        return "retain_blocks", policy.blocks_kept, policy.window_blocks
    return "", 0, 0


def _bits(name: str, dtype: str) -> str:
    """The bits of a number in a KV cache dtype. dtype: of activations."""
    kv_format = KV_FORMATS.get(name)
    if kv_format is None:
        return "32 bits" if dtype == "float32" else "16 bits"
    keys, values = kv_format.keys.bits, kv_format.values.bits
    return f"{keys} bits" if keys == values else f"keys of {keys} bits, values of {values}"


def _stored(config: EngineConfig, dtype: str) -> str:
    residual = config.kv_residual_tokens
    recent = f", the last {residual} tokens of {_bits('auto', dtype)}" if residual else ""
    return _bits(config.kv_cache_dtype, dtype) + recent


def _dropped_to(config: EngineConfig, dtype: str) -> str:
    compression = config.active_compression
    if compression is None or not compression.recalls:
        return ""
    name = config.kv_cache_dtype if compression.recall_dtype == "auto" else compression.recall_dtype
    return f"host memory, {_bits(name, dtype)}"


def _describe(compression: CompressionConfig | None) -> str:
    """The settings of a compression in one line."""
    if compression is None:
        return ""
    policy = compression.policy
    name = f"{compression.method}, {policy.name}"
    if isinstance(policy, Threshold):
        return f"{name}: at {policy.threshold_tokens} KV pairs {policy.budget_tokens} are kept"
    if not isinstance(policy, WindowOptions):
        return name
    tokens = policy.retain_tokens
    kept = f"{policy.blocks_kept} blocks" if tokens is None else f"{tokens} KV pairs"
    if compression.named_groups:
        by_group = sorted({group.retain_blocks for group in compression.named_groups})
        kept = f"{' or '.join(map(str, by_group))} blocks, by layer,"
    return f"{name}: of a window of {policy.window_blocks} blocks, {kept} are kept"
