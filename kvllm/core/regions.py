"""Arithmetic of what can be compressed: lengths in, lengths out.

How many KV pairs a compression keeps depends on configuration alone, so the scheduler has every length before a step.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Region:
    """`count` windows of `size` KV pairs, the first from index `start` of the cache on, each `stride` after the one
    before. Of each, `retain` KV pairs survive."""

    start: int
    size: int
    retain: int
    stride: int
    count: int = 1

    @property
    def end(self) -> int:
        return self.start + self.size + (self.count - 1) * self.stride

    @property
    def dropped(self) -> int:
        """KV pairs that all windows together lose."""
        return self.count * (self.size - self.retain)

    def from_start(self, start: int) -> Region:
        """One window from an earlier KV pair on that loses as many KV pairs: all from there to the end are chosen from
        together."""
        size = self.end - start
        return Region(start, size, size - self.dropped, size)


class Regions(ABC):
    """Which part of a sequence's cache may be compressed, given its KV pairs `cached` and how many of them `tail`, at
    their end, no compression has covered yet.

    retain: KV pairs kept of each window. keeps_all: whether nothing would ever be dropped (retention 100%).
    is_periodic: whether all compressions of a text that grows token by token come after equally many tokens, and drop
        equally many KV pairs, not more than these.
    """

    retain: int
    keeps_all: bool
    is_periodic: ClassVar[bool] = False

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    @abstractmethod
    def complete(self, cached: int, tail: int) -> Region | None:
        """All that could be compressed now, as one region."""

    @abstractmethod
    def trailing(self, cached: int, tail: int) -> Region | None:
        """The region of a sequence that one event compresses, or None while it is not eligible."""

    def first(self, cached: int, tail: int) -> Region | None:
        """The earliest window of what could be compressed now."""
        region = self.complete(cached, tail)
        return region and replace(region, count=1)

    @abstractmethod
    def next_end(self, cached: int, tail: int) -> int:
        """KV pairs at which something more than now is complete; always more than `cached`."""

    @abstractmethod
    def staying(self, tokens: int) -> int:
        """KV pairs that stay of so many more tokens, once what is complete of them is compressed."""

    @abstractmethod
    def tail_after(self, cached: int, region: Region) -> int:
        """The uncompressed tail when `region` of a cache of `cached` KV pairs is compressed."""

    def cached_lengths(self, prompt: int, total: int, tail_start: int) -> Iterator[int]:
        """KV pairs that a sequence alone holds before compressions, and at last with `total` tokens. Of compressions
        that are alike, which a long text may have thousands of, the last one alone counts: before it most is held.

        The prompt is computed whole; of it, KV pairs from `tail_start` on may be compressed.
        """
        cached = logical = min(prompt, total)
        tail = max(0, logical - tail_start)
        step = 0
        while True:
            yield cached
            region = self.complete(cached, tail)
            if region:
                cached, tail = cached - region.dropped, self.tail_after(cached, region)
            if logical == total:
                break
            last, step = step, self.next_end(cached, tail) - cached
            if region and step == last and self.is_periodic:
                alike = max(0, (total - logical) // step - 1)
                cached, logical = cached + alike * (step - region.dropped), logical + alike * step
            step = min(total - logical, step)
            cached, logical, tail = cached + step, logical + step, tail + step
        yield cached


class Windows(Regions):
    """Whole blocks at the end of the cache that were never compressed (Kara).

    size: KV pairs of a window. retain: KV pairs kept of each, buffer included. overlap: KV pairs that two neighbouring
    windows share, and that stay part of the uncompressed tail (the stand-alone schedule; else 0).
    """

    is_periodic = True

    def __init__(self, block_size: int, window_blocks: int, retain: int, overlap: int = 0) -> None:
        super().__init__(block_size)
        self.blocks = window_blocks
        self.size = window_blocks * block_size
        self.retain = retain
        self.overlap = overlap
        self.stride = self.size - overlap
        self.keeps_all = retain == self.size

    def trailing(self, cached: int, tail: int) -> Region | None:
        """Strict: the last full blocks, if no KV pair among them was compressed before or is protected (paper, C.4)."""
        start = (cached // self.block_size - self.blocks) * self.block_size
        return self._region(start) if start >= 0 and cached - tail <= start else None

    def complete(self, cached: int, tail: int) -> Region | None:
        start = self._first_start(cached, tail)
        count = self._count(cached, start)
        return self._region(start, count) if count else None

    def next_end(self, cached: int, tail: int) -> int:
        start = self._first_start(cached, tail)
        return start + self.size + self._count(cached, start) * self.stride

    def tail_after(self, cached: int, region: Region) -> int:
        return cached - region.end + self.overlap

    def staying(self, tokens: int) -> int:
        return tokens - tokens // self.stride * (self.size - self.retain)

    def _region(self, start: int, count: int = 1) -> Region:
        return Region(start, self.size, self.retain, self.stride, count)

    def _first_start(self, cached: int, tail: int) -> int:
        """Where the earliest window in the uncompressed tail begins."""
        return -(-(cached - tail) // self.block_size) * self.block_size

    def _count(self, cached: int, start: int) -> int:
        """Windows that fit one after the other into the full blocks from `start` on."""
        room = cached // self.block_size * self.block_size - start
        return 0 if room < self.size else (room - self.size) // self.stride + 1


class NothingDropped(Regions):
    """A sequence that keeps all its KV pairs."""

    keeps_all = True

    def complete(self, cached: int, tail: int) -> Region | None:
        return None

    def trailing(self, cached: int, tail: int) -> Region | None:
        return None

    def next_end(self, cached: int, tail: int) -> int:
        return sys.maxsize

    def staying(self, tokens: int) -> int:
        return tokens

    def tail_after(self, cached: int, region: Region) -> int:
        raise ValueError("nothing of this sequence is compressed, so no region of it is")


class WholeCache(Regions):
    """The whole cache once it has `threshold` KV pairs; `retain` of them survive (paper, Eq. 2-3).

    protected: the first KV pairs are not touched, in whole blocks; they count among those that survive.
    """

    is_periodic = True

    def __init__(self, block_size: int, threshold: int, retain: int, protected: int = 0) -> None:
        super().__init__(block_size)
        self.threshold = threshold
        self.start = -(-protected // block_size) * block_size
        self.retain = retain - self.start
        self.keeps_all = retain >= threshold

    def trailing(self, cached: int, tail: int) -> Region | None:
        if cached < self.threshold:
            return None
        size = cached - self.start
        return Region(self.start, size, self.retain, size)

    def complete(self, cached: int, tail: int) -> Region | None:
        return self.trailing(cached, tail)

    def next_end(self, cached: int, tail: int) -> int:
        return max(self.threshold, cached + 1)

    def staying(self, tokens: int) -> int:
        return 0  # a cache at its threshold grows no more

    def tail_after(self, cached: int, region: Region) -> int:
        return 0
