"""Collectives of torch.distributed, for ranks on several machines or GPUs."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import torch
import torch.distributed
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  # it is in the module's __all__

from kvllm.distributed.one_shot import find_one_shot
from kvllm.parallel import Shard


class ProcessGroupShard(Shard):
    """Collectives of torch.distributed: between machines ("gloo") and between GPUs ("nccl").

    A process has one such group, and with "nccl" one GPU, the current one.

    store: that all ranks share. timeout: seconds that a collective may take. on_one_node: whether all ranks are.
    """

    def __init__(
        self, rank: int, world_size: int, backend: str, store: Store, timeout: float, *, on_one_node: bool
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
        self._one_shot = None
        group = torch.distributed.group.WORLD
        if device and group and on_one_node:
            self._one_shot, self.note = find_one_shot(group.group_name, world_size, device, partial(_agree, device))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self._one_shot and self._one_shot.serves(x):
            return self._one_shot.add(x)
        torch.distributed.all_reduce(x)
        return x

    def all_gather_last_dim(self, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        torch.distributed.all_gather(parts, x)
        return torch.cat(parts, dim=-1)

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        gathered = x.new_empty(self.world_size, *x.shape) if self.rank == 0 else None
        torch.distributed.gather(x, None if gathered is None else [*gathered])
        return gathered


def _agree(device: torch.device, vote: bool) -> bool:
    votes = torch.tensor([vote], dtype=torch.int32, device=device)
    torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN)
    return bool(votes)
