"""Logits of which each rank has those of its part of the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvllm.models.layers import LMHead
from kvllm.worker import draws
from kvllm.worker.transfer import to_device


class LogitParts:
    """What ranks tell each other of them. All ranks call the same methods in the same order.

    is_whole: whether there is one rank.
    """

    def __init__(self, head: LMHead) -> None:
        self.vocab_size = head.vocab_size
        self.is_whole = head.shard.world_size == 1
        self._shard = head.shard
        self._first = head.shard.rank * head.weight.out_features

    def most_likely(self, part: torch.Tensor) -> torch.Tensor:
        """The most likely token of each row, as `draws.most_likely`, on every rank. part: `[R, n]`, this rank's."""
        if self.is_whole:
            return draws.most_likely(part)
        held = part[:, : self.vocab_size - self._first] if self._first < self.vocab_size else part[:, :1] - math.inf
        chosen = draws.most_likely(held).unsqueeze(1)
        is_wrong = chosen == draws.NO_TOKEN
        highest = held.gather(1, chosen.clamp(min=0)).double()
        if self._first < self.vocab_size:
            highest.masked_fill_(is_wrong, math.nan)
        # float64 holds every token id.
        found = torch.cat((highest, (chosen + self._first).masked_fill_(is_wrong, draws.NO_TOKEN).double()), 1)
        of_ranks = self._shard.all_gather_last_dim(found).unflatten(1, (self._shard.world_size, 2))
        best = of_ranks[..., 0].argmax(1, keepdim=True)  # the first of equal ones; a NaN is the largest
        return of_ranks[..., 1].gather(1, best).squeeze(1).long()

    def gather(self, part: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Logits `[R, vocab_size]` on the first rank, of which only some rows are there; fewer rows elsewhere, and if
        none are wanted. part: `[R, n]`, this rank's."""
        if self.is_whole:
            return part
        num_rows, columns = part.shape
        are_all = len(rows) == num_rows
        index = to_device([*rows], part.device, torch.int64)
        parts = self._shard.gather(part if are_all else part[index]) if rows else None
        if parts is None:
            return part.new_empty(0, self.vocab_size)
        logits = part.new_empty(num_rows, self._shard.world_size, columns)
        logits[slice(None) if are_all else index] = parts.transpose(0, 1)
        return logits.flatten(1)[:, : self.vocab_size]
