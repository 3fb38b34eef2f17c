"""Tensor parallelism as a model sees it: which rank it is, and the two collectives it needs."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from kvllm.errors import ConfigError


class Shard(ABC):
    """One rank among `world_size`. All ranks call the same collectives in the same order."""

    rank: int
    world_size: int

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks, in place; the ranks are added in the same order everywhere. Returns `x`."""

    @abstractmethod
    def all_gather_last_dim(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., n]` of each rank -> `[..., world_size * n]`, in order of rank, on every rank."""


class SingleRank(Shard):
    """The whole model in one place."""

    rank = 0
    world_size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather_last_dim(self, x: torch.Tensor) -> torch.Tensor:
        return x


def split(total: int, shard: Shard, what: str) -> int:
    """How many of `total` `what` (plural, for the message) each rank holds. Raises ConfigError if not equally many."""
    if total % shard.world_size:
        allowed = ", ".join(str(n) for n in range(1, min(total, 64) + 1) if total % n == 0)
        raise ConfigError(
            f"tensor_parallel_size {shard.world_size} does not divide the model's {total} {what}: use one of {allowed}"
        )
    return total // shard.world_size
