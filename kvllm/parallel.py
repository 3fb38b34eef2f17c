"""Tensor parallelism as a model sees it: which rank it is, what it holds, and the two collectives it needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed

from kvllm.errors import ConfigError, KvLLMError


class WorkerError(KvLLMError, RuntimeError):
    """A rank died, hangs or failed. The message says which, and carries its own traceback if it left one."""


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


class Counted(Shard):
    """A shard that counts its collectives: as long as `calls` grows, the rank advances."""

    def __init__(self, shard: Shard) -> None:
        self.rank = shard.rank
        self.world_size = shard.world_size
        self.calls = 0
        self._shard = shard

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self._shard.all_reduce(x)

    def all_gather_last_dim(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self._shard.all_gather_last_dim(x)


class ProcessGroupShard(Shard):
    """Collectives of torch.distributed: between machines ("gloo") and between GPUs ("nccl").

    A process has one such group, and with "nccl" one GPU, the current one.

    store: that all ranks share. timeout: seconds that a collective may take.
    """

    def __init__(
        self, rank: int, world_size: int, backend: str, store: torch.distributed.Store, timeout: float
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        # With a device, NCCL connects the ranks now, and not in the first collective.
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
        torch.distributed.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
            device_id=device,
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(x)
        return x

    def all_gather_last_dim(self, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        torch.distributed.all_gather(parts, x)
        return torch.cat(parts, dim=-1)


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
