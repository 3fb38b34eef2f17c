"""Ranks in threads of one process."""

from __future__ import annotations

import threading

import torch

from kvllm.parallel import Shard


class ThreadShard(Shard):
    """One of several ranks that run in threads of this process."""

    def __init__(self, rank: int, barrier: threading.Barrier, board: list[torch.Tensor]) -> None:
        self.rank = rank
        self.world_size = barrier.parties
        self.barrier = barrier
        self.board = board

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.board[self.rank] = x.clone()
        self.barrier.wait(30)
        parts = list(self.board)
        self.barrier.wait(30)
        return parts

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self._exchange(x)).sum(0))

    def all_gather_last_dim(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=-1)

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        parts = self._exchange(x)
        return torch.stack(parts) if self.rank == 0 else None
