"""A guard of predictions: how much windows keep follows the divergence of those that were judged."""

from __future__ import annotations

import math
from collections.abc import Sequence as Sequences

from kvllm.config import CompressionConfig
from kvllm.core.sequence import Sequence

ROUND = 8
"""Judged compressions after which the mean is compared with the target."""


class RetentionGuard:
    """Raises what windows keep when judged compressions diverge more than `guard_kl`, and lowers it again.

    Retention rises as soon as the divergences of a round add up to more than a whole round may have. It rises at once
    by as much as would be enough if they went down in proportion to the blocks that windows lose, and at least by half
    of the blocks that it can still rise by. It falls by one block after a round whose mean is at most half of
    `guard_kl`: slowly, because what is dropped meanwhile stays lost. The next round begins behind every change, since
    divergences at another retention tell nothing about this one. Retention stays below the window, so that there is
    always something to judge.

    retained: KV pairs that a window keeps now, buffer included. most: the most that it may ever keep.
    """

    def __init__(self, config: CompressionConfig, block_size: int) -> None:
        assert config.guard_kl is not None
        self.target = config.guard_kl
        self.every = config.guard_every
        self.block_size = block_size
        self.least = config.retained(block_size)
        self.most_blocks = max(0, config.window_blocks * block_size - self.least - 1) // block_size
        self.added_blocks = 0
        self._round: list[float] = []

    @property
    def retained(self) -> int:
        return self.least + self.added_blocks * self.block_size

    @property
    def most(self) -> int:
        return self.least + self.most_blocks * self.block_size

    def samples(self, seq: Sequence) -> bool:
        """Whether the next compression of a sequence is to be judged. The first one is, because new sequences may be of
        another kind than those before them."""
        return not seq.compressions or (seq.seq_id + len(seq.compressions)) % self.every == 0

    def record(self, divergences: Sequences[float]) -> None:
        """The divergences of compressions that were planned in one step, and so at the same retention."""
        self._round += divergences
        total, allowed = sum(self._round), ROUND * self.target
        if not total <= allowed:  # NaN, too
            missing = self.most_blocks - self.added_blocks
            lost = 0 if math.isnan(total) else min(missing // 2, int(missing * (allowed / total)))
            self._change(self.most_blocks - lost)
        elif len(self._round) >= ROUND:
            falls = total <= len(self._round) * self.target / 2
            self._change(max(0, self.added_blocks - 1) if falls else self.added_blocks)

    def _change(self, added_blocks: int) -> None:
        self.added_blocks = added_blocks
        self._round = []
