"""Collectives of torch.distributed, for ranks on several machines or GPUs."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  # it is in the module's __all__

from kvllm.parallel import Shard


class ProcessGroupShard(Shard):
    """Collectives of torch.distributed: between machines ("gloo") and between GPUs ("nccl").

    A process has one such group, and with "nccl" one GPU, the current one.

    store: that all ranks share. timeout: seconds that a collective may take.
    """

    def __init__(self, rank: int, world_size: int, backend: str, store: Store, timeout: float) -> None:
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
