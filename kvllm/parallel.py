"""Tensor parallelism from the point of view of a model: its rank, its share of the heads, and three collectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.distributed

from kvllm.errors import ConfigError


class Shard(ABC):
    """One rank among `world_size`. All ranks call the same collectives in the same order.

    note: what the log says of them, if anything.
    """

    rank: int
    world_size: int
    note: str = ""

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks, in place; the ranks are added in the same order everywhere. Returns `x`."""

    @abstractmethod
    def all_gather_last_dim(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., n]` of each rank -> `[..., world_size * n]`, in order of rank, on every rank."""

    @abstractmethod
    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """`[...]` of each rank -> `[world_size, ...]` on the first rank, None on the others."""


class SingleRank(Shard):
    """The whole model in one place."""

    rank = 0
    world_size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather_last_dim(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0)


class Counted(Shard):
    """A shard that counts its collectives: as long as `calls` grows, the rank advances."""

    def __init__(self, shard: Shard) -> None:
        self.rank = shard.rank
        self.world_size = shard.world_size
        self.note = shard.note
        self.calls = 0
        self._shard = shard

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self._shard.all_reduce(x)

    def all_gather_last_dim(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self._shard.all_gather_last_dim(x)

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        self.calls += 1
        return self._shard.gather(x)


@dataclass(frozen=True)
class KVHeads:
    """The KV heads of one rank: `count` from `first` on, and on how many ranks each of them is (`replicas`)."""

    first: int
    count: int
    replicas: int


def kv_heads(total: int, shard: Shard) -> KVHeads:
    """Share out `total` KV heads; with fewer heads than ranks, neighbouring ranks hold the same one.

    Raises ConfigError if neither number divides the other.
    """
    if total < shard.world_size and shard.world_size % total == 0:
        replicas = shard.world_size // total
        return KVHeads(shard.rank // replicas, 1, replicas)
    count = split(total, shard, "KV heads")
    return KVHeads(shard.rank * count, count, 1)


def split(total: int, shard: Shard, what: str) -> int:
    """How many of `total` `what` (plural, for the message) each rank holds. Raises ConfigError if not equally many."""
    if total % shard.world_size:
        allowed = ", ".join(str(n) for n in range(1, min(total, 64) + 1) if total % n == 0)
        raise ConfigError(
            f"tensor_parallel_size {shard.world_size} does not divide the model's {total} {what}: use one of {allowed}"
        )
    return total // shard.world_size
