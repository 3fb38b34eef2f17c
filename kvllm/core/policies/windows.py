"""What policies of windows have in common: whole blocks at the end of a cache that were never compressed."""

from __future__ import annotations

import sys
from abc import ABC
from collections.abc import Sequence as Sequences
from typing import ClassVar, Generic, TypeVar

from kvllm.compression.queries import window_tokens, windows_beside
from kvllm.compression.specs import Compresses
from kvllm.config import CompressionConfig, require
from kvllm.config.policies import PolicyOptions
from kvllm.core.policies.base import CompressionPolicy, EngineLoad
from kvllm.core.regions import Regions, Windows
from kvllm.core.sequence import Sequence
from kvllm.errors import RequestError
from kvllm.kvcache.groups import UNIFORM, KVGroup
from kvllm.sampling_params import SamplingParams

PAPER_SEQUENCES = 30


class WindowOptions(PolicyOptions, frozen=True, kw_only=True):
    """The options of policies that compress windows.

    Attributes:
        window_blocks: blocks of one window, the trailing full blocks that were never compressed.
        retain_blocks: whole blocks kept of a window. A whole number of blocks leaves the partial last block in place.
            None: half of the window, rounded down (the paper: 1 of 3).
        retain_tokens: KV pairs kept of a window, buffer included; overrides `retain_blocks` (the paper: 257 of 768).
        compress_prompt: compress the prompt too, right after it is computed. By default windows leave it whole.
    """

    compresses: ClassVar[Compresses] = "windows"
    window_blocks: int = 4
    retain_blocks: int | None = None
    retain_tokens: int | None = None
    compress_prompt: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.window_blocks >= 1, "window_blocks", self.window_blocks, "at least 1")
        require(self.blocks_kept >= 1, "retain_blocks", self.retain_blocks, "at least 1")
        most = f"at most window_blocks={self.window_blocks} (retention 100%)"
        require(self.blocks_kept <= self.window_blocks, "retain_blocks", self.retain_blocks, most)

    @property
    def blocks_kept(self) -> int:
        """Of a window, by `retain_blocks`."""
        return max(1, self.window_blocks // 2) if self.retain_blocks is None else self.retain_blocks

    def check(self, config: CompressionConfig) -> None:
        """Lengths of all groups differ by whole blocks, so that they come to windows and to new blocks together."""
        for group in config.named_groups:
            most = f"between 1 and window_blocks={self.window_blocks}"
            fits = 1 <= group.retain_blocks <= self.window_blocks
            require(fits, "layer_groups: retain_blocks", group.retain_blocks, most)
        exact = config.layer_groups and self.retain_tokens is not None
        allowed = "not beside layer_groups, where retain_blocks of each group says what it keeps"
        require(not exact, "retain_tokens", self.retain_tokens, allowed)

    def regions(self, config: CompressionConfig, block_size: int, retain: int | None = None) -> Regions:
        kept = self._retained(config, block_size) if retain is None else retain
        return Windows(block_size, self.window_blocks, kept)

    def _retained(self, config: CompressionConfig, block_size: int) -> int:
        """KV pairs kept of a window, buffer included; with `layer_groups`, in the layers that keep least.

        Raises ConfigError if the window, what is kept of it and the buffer do not fit into each other.
        """
        window = self.window_blocks * block_size
        size = f"a window of {self.window_blocks} blocks of {block_size} has {window} KV pairs"
        if config.named_groups:
            least = min(group.retain_blocks for group in config.named_groups)
            retained, field, value = least * block_size, "layer_groups: retain_blocks", least
        elif self.retain_tokens is None:
            retained, field, value = self.blocks_kept * block_size, "retain_blocks", self.blocks_kept
        else:
            retained, field, value = self.retain_tokens, "retain_tokens", self.retain_tokens
        require(1 <= retained <= window, field, value, f"between 1 and {window}: {size}")
        require(config.buffer < window, "buffer", config.buffer, f"less than the window: {size}")
        require(
            config.buffer <= retained,
            "buffer",
            config.buffer,
            f"at most what a window keeps, {retained} KV pairs ({field}={value}, block_size={block_size}): "
            f"lower buffer, or raise {field}, window_blocks or block_size",
        )
        return retained


class EventOptions(WindowOptions, frozen=True, kw_only=True):
    """The options of policies that compress windows of several sequences in events.

    Attributes:
        period: decode steps of the engine from one event to the next.
        max_sequences: most sequences that an event compresses, together as far as the tokens of a step allow. None: 30,
            as in the paper, where queries are recomputed, and without that all; spread over as many steps as it takes,
            so that none of them is half as long again as a step without an event, or compresses more than one window.
    """

    period: int = 128
    max_sequences: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.period >= 1, "period", self.period, "at least 1")
        most = self.max_sequences
        require(most is None or most >= 1, "max_sequences", most, "at least 1, or None")

    def event_sequences(self, config: CompressionConfig) -> int:
        """Most sequences that an event compresses."""
        if self.max_sequences is not None:
            return self.max_sequences
        needs_queries = config.spec.queries != "none" or config.spec.repeats
        return PAPER_SEQUENCES if needs_queries else sys.maxsize


Own = TypeVar("Own", bound=WindowOptions)
Clocked = TypeVar("Clocked", bound=EventOptions)


class WindowPolicy(CompressionPolicy[Own], ABC, Generic[Own]):
    """A policy of windows, of which a request may say how many blocks they keep."""

    def __init__(self, config: CompressionConfig, block_size: int, groups: Sequences[KVGroup] = UNIFORM) -> None:
        super().__init__(config, block_size, groups)
        self._of_retained: dict[int, Regions] = {}  # by blocks kept of a window

    def check(self, prompt_length: int, sampling: SamplingParams) -> None:
        retained, buffer, block_size = sampling.retain_blocks, self.config.buffer, self.regions.block_size
        if retained is None:
            return
        least, most = max(1, -(-buffer // block_size)), self.options.window_blocks
        if not least <= retained <= most:
            raise RequestError(
                f"retain_blocks={retained} is not allowed: between {least}, which hold buffer={buffer} in "
                f"blocks of {block_size} tokens, and window_blocks={most}, which drop nothing"
            )

    def regions_of(self, seq: Sequence) -> Regions:
        retained = seq.sampling.retain_blocks
        if not seq.sampling.compress or retained == self.options.window_blocks:
            return self.uncompressed
        return self.regions if retained is None else self._retaining(retained)

    def _retaining(self, blocks: int) -> Regions:
        if blocks not in self._of_retained:
            block_size = self.regions.block_size
            self._of_retained[blocks] = self.config.regions(block_size, blocks * block_size)
        return self._of_retained[blocks]


class EventPolicy(WindowPolicy[Clocked], ABC, Generic[Clocked]):
    """A policy whose events compress windows of several sequences.

    Unless `max_sequences` is set, a step compresses as many windows as its decodes allow (`windows_beside`), and the
    next steps go on, so that no event keeps all sequences from decoding for long.
    """

    def __init__(self, config: CompressionConfig, block_size: int, groups: Sequences[KVGroup] = UNIFORM) -> None:
        super().__init__(config, block_size, groups)
        self.event_sequences = self.options.event_sequences(config)

    def windows_now(self, decoding: Sequences[Sequence], load: EngineLoad, least: int = 1) -> int:
        """Windows that a step may compress if they may wait: at least one, and `least` if the tokens suffice."""
        size = self.options.window_blocks * self.regions.block_size
        affordable = max(1, load.tokens // window_tokens(self.config, size))
        if self.options.max_sequences is not None:  # an event of that size is asked for
            return affordable
        return min(affordable, max(least, windows_beside(self.config, size, len(decoding))))
