"""The KV pairs and blocks that layers hold of a sequence."""

from __future__ import annotations

from dataclasses import dataclass

from kvllm.core.regions import Regions
from kvllm.kvcache.groups import KVGroup


@dataclass(frozen=True)
class LayerType:
    """Layers that hold the same KV pairs of a sequence.

    name: "full" or "sliding". layers: how many there are. window: tokens that a token attends, its own included; None
    for all before it.
    """

    name: str
    layers: int
    window: int | None = None

    def held(self, length: int) -> int:
        """KV pairs in one layer that a sequence of `length` tokens needs, if nothing is compressed."""
        return length if self.window is None else min(length, self.window)

    def blocks(self, length: int, block_size: int, chunk: int = 1) -> int:
        """Blocks that one sequence needs at most to reach `length` tokens, if nothing is compressed.

        chunk: tokens of it that a step computes.
        """
        return KVGroup(self.window).most_blocks(length, block_size, chunk)


def compressed_length(regions: Regions, prompt: int, length: int, tail_start: int) -> int:
    """KV pairs that a sequence of `length` tokens holds if everything was compressed when it was complete.

    prompt, tail_start: see `Regions.cached_lengths`.
    """
    *_, held = regions.cached_lengths(prompt, length, tail_start)
    return held
