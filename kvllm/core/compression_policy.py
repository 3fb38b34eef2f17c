"""Which sequences compress, and when. Knows lengths, never tensors.

How many entries a compression keeps depends on configuration alone, so the scheduler knows every length before a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Sequences

from kvllm.config import CompressionConfig, EngineConfig, require
from kvllm.core.sequence import Sequence


class Windows:
    """Arithmetic of compression windows: whole blocks at the end of a sequence's cache.

    size: entries of a window. retain: entries kept of each, buffer included. overlap: entries that two neighbouring
    windows share, and that stay part of the uncompressed tail (the stand-alone schedule; else 0).
    """

    def __init__(self, block_size: int, window_blocks: int, retain: int, overlap: int = 0) -> None:
        self.block_size = block_size
        self.blocks = window_blocks
        self.size = window_blocks * block_size
        self.retain = retain
        self.overlap = overlap

    @property
    def dropped(self) -> int:
        """Entries that one window loses."""
        return self.size - self.retain

    @property
    def stride(self) -> int:
        """Distance of the starts of two neighbouring windows."""
        return self.size - self.overlap

    def is_eligible(self, cached: int, tail: int) -> bool:
        """Strict: the last full blocks form a window without any entry that was compressed before or is protected."""
        full = cached // self.block_size
        return full >= self.blocks and cached - tail <= (full - self.blocks) * self.block_size

    def first_start(self, cached: int, tail: int) -> int:
        """Index in the cache at which the earliest window in the uncompressed tail begins."""
        return -(-(cached - tail) // self.block_size) * self.block_size

    def count(self, cached: int, tail: int) -> int:
        """Windows that fit one behind the other into the full blocks of the uncompressed tail."""
        full_end = cached // self.block_size * self.block_size
        room = full_end - self.first_start(cached, tail)
        return 0 if room < self.size else (room - self.size) // self.stride + 1

    def end(self, start: int, count: int) -> int:
        """Where the last of `count` windows from `start` on ends."""
        return start + self.size + (count - 1) * self.stride

    def next_end(self, cached: int, tail: int) -> int:
        """Where the window that is not complete yet will end; always behind `cached`."""
        return self.end(self.first_start(cached, tail), self.count(cached, tail) + 1)

    def after(self, cached: int, start: int, count: int) -> tuple[int, int]:
        """Cached length and uncompressed tail when `count` windows from `start` on are compressed."""
        return cached - count * self.dropped, cached - self.end(start, count) + self.overlap

    def peak_blocks(self, prompt: int, total: int, tail_start: int) -> int:
        """Most blocks that a sequence alone needs to reach `total` entries if each window is compressed when complete.

        The prompt is computed whole; of it, entries from `tail_start` on may be compressed.
        """
        cached = logical = min(prompt, total)
        tail = max(0, logical - tail_start)
        peak = cached
        while True:
            if count := self.count(cached, tail):
                cached, tail = self.after(cached, self.first_start(cached, tail), count)
            if logical == total:
                return -(-peak // self.block_size)
            step = min(total - logical, self.next_end(cached, tail) - cached)
            cached, logical, tail = cached + step, logical + step, tail + step
            peak = max(peak, cached)


class CompressionPolicy(ABC):
    """Names the sequences whose trailing window is compressed now.

    Called once per step with the decoding sequences, none of them finished or prefilling, in order of age.
    """

    overlap: bool = False
    """Whether a window's buffer is scored again as the beginning of the next window."""

    def __init__(self, config: CompressionConfig) -> None:
        self.config = config

    @abstractmethod
    def select(self, decoding: Sequences[Sequence], windows: Windows, decode_steps: int) -> list[Sequence]:
        """Sequences to compress before the next step; `decode_steps` counts the engine's decode steps so far."""


class PeriodicPolicy(CompressionPolicy):
    """Kara's schedule (paper, section 4.3 and Alg. 1): every `period` decode steps at most `max_sequences` sequences.

    The first event is not before more than a window's length of steps. Of the eligible sequences those that stored most
    since they were last served go first (`order="most_uncompressed"`), so none starves.
    """

    def __init__(self, config: CompressionConfig) -> None:
        super().__init__(config)
        self._last_event = 0

    def select(self, decoding: Sequences[Sequence], windows: Windows, decode_steps: int) -> list[Sequence]:
        due = decode_steps > windows.size and decode_steps % self.config.period == 0
        if not due or decode_steps == self._last_event:  # steps without a decode do not move the clock
            return []
        self._last_event = decode_steps
        eligible = [seq for seq in decoding if windows.is_eligible(seq.cached_length, seq.uncompressed_tail)]
        if self.config.order == "most_uncompressed":
            eligible.sort(key=lambda seq: (seq.carried_tail - seq.uncompressed_tail, seq.seq_id))
        return eligible[: self.config.max_sequences]


class StandalonePolicy(CompressionPolicy):
    """Kara without a serving clock (paper, section 4.1): a sequence compresses whenever its tail fills a window.

    The buffer of a window is the beginning of the next, so windows advance by `window - buffer` tokens.
    """

    overlap = True

    def select(self, decoding: Sequences[Sequence], windows: Windows, decode_steps: int) -> list[Sequence]:
        return [seq for seq in decoding if windows.is_eligible(seq.cached_length, seq.uncompressed_tail)]


POLICIES: dict[str, type[CompressionPolicy]] = {"periodic": PeriodicPolicy, "standalone": StandalonePolicy}


class Compression:
    """A policy with the window arithmetic of one engine."""

    def __init__(self, config: CompressionConfig, block_size: int) -> None:
        self.config = config
        self.policy = POLICIES[config.policy](config)
        overlap = config.buffer if self.policy.overlap else 0
        self.windows = Windows(block_size, config.window_blocks, config.retained(block_size), overlap)

    @staticmethod
    def of(config: EngineConfig) -> Compression | None:
        """None if nothing is ever dropped: compression off, or retention 100%."""
        if config.compression is None:
            return None
        compression = Compression(config.compression, config.block_size)
        return compression if compression.windows.dropped else None


def peak_blocks(config: EngineConfig, compression: Compression | None, prompt: int, total: int) -> int:
    """Most blocks that a sequence alone needs to reach `total` entries, `prompt` of them its prompt."""
    if compression is None:
        return -(-total // config.block_size)
    tail_start = 0 if compression.config.compress_prompt else prompt
    return compression.windows.peak_blocks(prompt, total, tail_start)


def check_pool(config: EngineConfig) -> None:
    """Raises ConfigError unless a sequence of `max_model_len`, compressed if that is on, fits into the pool."""
    blocks = peak_blocks(config, Compression.of(config), 1, config.max_model_len - 1)
    require(
        blocks <= config.num_blocks,
        "max_model_len",
        config.max_model_len,
        f"a sequence of that length needs {blocks} KV blocks of {config.block_size} tokens and the pool has "
        f"{config.num_blocks}: lower max_model_len, or raise kv_cache_memory_bytes or num_gpu_blocks_override",
    )
