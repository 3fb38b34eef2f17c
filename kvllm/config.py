"""Options of the engine, validated where they enter."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from msgspec import Struct

from kvllm.errors import ConfigError

METHODS = ("kara",)
POLICIES = ("periodic", "standalone")
ORDERS = ("most_uncompressed", "queue")


_fields = cache(msgspec.structs.fields)


def check_types(options: Struct) -> None:
    """Structs accept anything when constructed by hand: hold each field against its annotation."""
    for field in _fields(type(options)):
        value = getattr(options, field.name)
        try:
            msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{field.name}={value!r}: {error}") from None


def require(condition: bool, field: str, value: Any, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"{field}={value!r} is not allowed: {allowed}")


class CompressionConfig(Struct, frozen=True, kw_only=True):
    """How the KV cache is compressed while decoding.

    method: which entries of a window survive (`kvllm.attention.compression.METHODS`).
    policy: which sequences compress and when: "periodic" (every `period` decode steps of the engine, at most
        `max_sequences` sequences) or "standalone" (each sequence whenever its tail fills a window; block_size 1).
    window_blocks: blocks of one window, the trailing full blocks that were never compressed.
    retain_blocks: whole blocks kept of a window. A whole number of blocks leaves the partial last block in place.
    retain_tokens: entries kept of a window, buffer included; overrides `retain_blocks` (the paper: 257 of 768).
    buffer: the last entries of a window, always kept.
    chunk_budget: of the entries kept, how many go to completing chunks (alpha of Token2Chunk).
    max_chunk: longest chunk, both ends counted (gamma of Token2Chunk).
    compress_prompt: compress the prompt too, right after it is computed. By default it is kept whole.
    query_stride: recompute every `query_stride`-th query of a window (and all of the buffer) for the scores.
    order: of the eligible sequences, "most_uncompressed" or "queue" (oldest) first.
    """

    method: str = "kara"
    policy: str = "periodic"
    period: int = 128
    max_sequences: int = 30
    window_blocks: int = 3
    retain_blocks: int = 1
    retain_tokens: int | None = None
    buffer: int = 32
    chunk_budget: int = 32
    max_chunk: int = 8
    compress_prompt: bool = False
    query_stride: int = 1
    order: str = "most_uncompressed"

    def __post_init__(self) -> None:
        check_types(self)
        require(self.method in METHODS, "method", self.method, f"choose one of {', '.join(METHODS)}")
        require(self.policy in POLICIES, "policy", self.policy, f"choose one of {', '.join(POLICIES)}")
        require(self.order in ORDERS, "order", self.order, f"choose one of {', '.join(ORDERS)}")
        for field in ("period", "max_sequences", "window_blocks", "retain_blocks", "query_stride"):
            require(getattr(self, field) >= 1, field, getattr(self, field), "at least 1")
        for field in ("buffer", "chunk_budget"):
            require(getattr(self, field) >= 0, field, getattr(self, field), "at least 0")
        require(self.max_chunk >= 3, "max_chunk", self.max_chunk, "at least 3, both end points counted")
        require(
            self.retain_blocks <= self.window_blocks,
            "retain_blocks",
            self.retain_blocks,
            f"at most window_blocks={self.window_blocks} (retention 100%)",
        )

    def retained(self, block_size: int) -> int:
        """Entries kept of a window, buffer included.

        Raises:
            ConfigError: the window, what is kept of it and the buffer do not fit into each other at this block size.
        """
        window = self.window_blocks * block_size
        size = f"a window of {self.window_blocks} blocks of {block_size} has {window} entries"
        if self.retain_tokens is None:
            retained, field, value = self.retain_blocks * block_size, "retain_blocks", self.retain_blocks
        else:
            retained, field, value = self.retain_tokens, "retain_tokens", self.retain_tokens
        require(1 <= retained <= window, field, value, f"between 1 and {window}: {size}")
        require(self.buffer < window, "buffer", self.buffer, f"less than the window: {size}")
        require(
            self.buffer <= retained,
            "buffer",
            self.buffer,
            f"at most what a window keeps, {retained} entries ({field}={value}, block_size={block_size}): "
            f"lower buffer, or raise {field}, window_blocks or block_size",
        )
        if self.policy == "standalone":
            require(block_size == 1, "block_size", block_size, 'policy="standalone" moves by single entries: use 1')
        return retained


class EngineConfig(Struct, frozen=True, kw_only=True):
    """What the core needs to know.

    num_blocks: blocks in the KV pool, of `block_size` tokens each.
    max_model_len: longest sequence, prompt and output together, in tokens.
    max_num_seqs: most sequences that run at once.
    max_num_batched_tokens: most query rows of one step (prefill chunks and decodes together).
    watermark: share of the pool that admission leaves free, so that running sequences can grow.
    """

    num_blocks: int
    max_model_len: int
    block_size: int = 256
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    watermark: float = 0.01
    seed: int = 0
    compression: CompressionConfig | None = None

    def __post_init__(self) -> None:
        right = isinstance(self.compression, CompressionConfig | None)
        require(right, "compression", self.compression, "a CompressionConfig, or None")
        check_types(self)
        require(1 <= self.block_size <= 256, "block_size", self.block_size, "between 1 and 256")
        for field in ("num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            require(getattr(self, field) >= 1, field, getattr(self, field), "at least 1")
        require(0 <= self.watermark < 1, "watermark", self.watermark, "at least 0 and less than 1")
        require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            f"at least max_num_seqs={self.max_num_seqs}, so that all running sequences can decode in one step: "
            "raise it or lower max_num_seqs",
        )
        if self.compression is not None:
            self.compression.retained(self.block_size)
