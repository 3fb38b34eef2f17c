"""Options with which any method ends a text with the same number of KV pairs.

That number is a share of the KV pairs of the text, prompt included, in the layers that attend all tokens. A method that
can choose from a whole cache gets `policy="threshold"`: a cache is cut again whenever it has `gap` KV pairs more than
its budget, and ends half a gap above it. Others get `policy="standalone"` with windows as large as leave room for what
is not compressed yet, and `retain_tokens` of them. Candidates are played through with the arithmetic of the scheduler,
and the nearest is taken. Where texts differ in length, it holds on average, and short ones keep more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from statistics import median
from typing import NamedTuple

from kvllm.compression.specs import SPECS
from kvllm.config import CompressionConfig
from kvllm.core.policies import Standalone, Threshold
from kvllm.core.regions import Regions, WholeCache, Windows
from kvllm.errors import ConfigError

BLOCK_SIZE = 16
RECENT, GAP = 32, 64
"""With a budget, the most KV pairs at the end that are always kept, and from a cut to the next."""
WINDOW, BUFFER = 384, 128
"""The most KV pairs of a window, and of its buffer."""
CHUNKS = 8
"""KV pairs that complete chunks, as in the paper's runs of a length that fits windows like these."""

BY_WINDOWS = ":windows"
"""Ends the name of a method that shall compress windows, although it could choose from a whole cache."""

Length = tuple[int, int]
"""KV pairs of a text's prompt, and all that are computed of the text."""


class Fit(NamedTuple):
    """Options for texts of some lengths. gap: of `policy="threshold"`, between a cut and the next; 0 with windows."""

    compression: CompressionConfig
    share: float
    gap: int = 0

    @property
    def block_size(self) -> int:
        return 1 if isinstance(self.compression.policy, Standalone) else BLOCK_SIZE

    @property
    def protects_prompt(self) -> bool:
        policy = self.compression.policy
        return isinstance(policy, Threshold) and policy.protect_prompt

    @property
    def compresses_prompt(self) -> bool:
        return self.compression.compress_prompt or (self.gap > 0 and not self.protects_prompt)

    def budget(self, length: Length) -> int | None:
        """The `budget_tokens` of a text."""
        prompt, stored = length
        start = -(-prompt // BLOCK_SIZE) * BLOCK_SIZE if self.protects_prompt else 0
        least = start + self.compression.buffer + 1
        wanted = _budget(self.compression.method, target(self.share, stored), self.gap)
        return max(least, wanted) if self.gap else None


def target(share: float, stored: int) -> int:
    return round(share * stored)


def fit(method: str, share: float, lengths: Iterable[Length], *, compress_prompt: bool = False) -> Fit:
    """Options for a method, with which texts end with a share of their KV pairs.

    compress_prompt: the prompt is compressed as soon as it is computed; it is left whole otherwise.

    Raises ConfigError if there are none.
    """
    counts = Counter(lengths)
    starts = {prompt: 0 if compress_prompt else -(-prompt // BLOCK_SIZE) * BLOCK_SIZE for prompt, _ in counts}
    room = int(median(target(share, stored) - starts[prompt] for prompt, stored in counts.elements()))
    if room < 2 * BLOCK_SIZE:
        raise ConfigError(
            f"texts too short: {share:.1%} of the KV pairs of most of them leave {max(0, room)} beside the prompt, and "
            f"{2 * BLOCK_SIZE} are needed"
        )
    name = method.removesuffix(BY_WINDOWS)
    if name != method or SPECS[name].refusal("cache"):
        return _by_windows(name, share, counts, room, compress_prompt)
    return _by_threshold(method, share, counts, room, compress_prompt)


# A whole cache


def _by_threshold(method: str, share: float, counts: Counter[Length], room: int, compress_prompt: bool) -> Fit:
    most = min(GAP, room // 2)

    def error(gap: int) -> int:
        return abs(sum(_off(gap, share, length, compress_prompt) * number for length, number in counts.items()))

    gap = min(range(most, most // 2, -1), key=error)
    recent = room // 2 if method == "h2o" else min(RECENT, room // 3)  # H2O: as many recent KV pairs as heavy hitters
    ragged = SPECS[method].ragged
    budget = _budget(method, target(share, max(stored for _, stored in counts)), gap)
    compression = CompressionConfig(
        method=method,
        method_options=SPECS[method].own(query_window=min(recent, gap)),
        policy=Threshold(
            budget_tokens=budget,
            threshold_tokens=budget + (2 * gap if ragged else gap),
            protect_prompt=not compress_prompt,
        ),
        buffer=min(recent, gap, room - 2 * gap) if ragged else min(recent, room - gap // 2 - 1),
    )
    return Fit(compression, share, gap)


def _off(gap: int, share: float, length: Length, compress_prompt: bool) -> int:
    """KV pairs at the end of a text above those that are wanted."""
    prompt, stored = length
    wanted = target(share, stored)
    held = wanted - gap // 2
    regions = WholeCache(BLOCK_SIZE, held + gap, held, 0 if compress_prompt else prompt)
    return 0 if compress_prompt else _held(regions, prompt, stored, prompt) - wanted


def _budget(method: str, wanted: int, gap: int) -> int:
    """Methods with other numbers in other heads hold memory for half of what is between budget and threshold."""
    return wanted - gap // 2 - (gap if SPECS[method].ragged else 0)


# Windows


class _Windows(NamedTuple):
    """Windows, and how good they are; the least is the best."""

    off: float
    smaller: int
    size: int
    retained: int
    buffer: int


def _by_windows(method: str, share: float, counts: Counter[Length], room: int, compress_prompt: bool) -> Fit:
    """Windows overlap by their buffers, as in Kara's paper, which takes blocks of one token."""
    most = min(WINDOW, max(2 * BLOCK_SIZE, room // 2)) // BLOCK_SIZE * BLOCK_SIZE
    tried = [each for size in range(most, most // 2, -4) for each in _try(size, share, counts, compress_prompt)]
    found = min(tried, default=None)
    if found is None or found.off >= BLOCK_SIZE:
        raise ConfigError(f"texts too short: no windows of at most {most} KV pairs leave {share:.1%} of all")
    compression = CompressionConfig(
        method=method,
        method_options=SPECS[method].own(chunk_budget=CHUNKS, query_window=max(1, found.buffer)),
        policy=Standalone(window_blocks=found.size, retain_tokens=found.retained, compress_prompt=compress_prompt),
        buffer=found.buffer,
    )
    return Fit(compression, share)


def _try(size: int, share: float, counts: Counter[Length], compress_prompt: bool) -> Iterator[_Windows]:
    """Windows of so many KV pairs, with what they may keep."""
    buffer = min(BUFFER, size // 3)
    starts = ((0 if compress_prompt else prompt, stored, texts) for (prompt, stored), texts in counts.items())
    number = sum(texts * ((stored - start - buffer) // (size - buffer)) for start, stored, texts in starts)
    if number == 0:
        return
    dropped = sum(texts * (stored - target(share, stored)) for (_, stored), texts in counts.items()) / number
    kept = int(size - dropped)
    for retained in range(max(buffer, kept - 2), min(size, kept + 3) + 1):
        off = _off_by(Windows(1, size, retained, buffer), share, counts, compress_prompt)
        yield _Windows(0 if off <= BLOCK_SIZE / 2 and share < 1 else off, -size, size, retained, buffer)


def _off_by(regions: Regions, share: float, counts: Counter[Length], compress_prompt: bool) -> float:
    """KV pairs by which texts end away from what is wanted, on average."""
    off = 0
    for (prompt, stored), texts in counts.items():
        off += texts * (_held(regions, prompt, stored, 0 if compress_prompt else prompt) - target(share, stored))
    return abs(off) / sum(counts.values())


def _held(regions: Regions, prompt: int, stored: int, start: int) -> int:
    """KV pairs at the end of a text."""
    return list(regions.cached_lengths(prompt, stored, start))[-1]
