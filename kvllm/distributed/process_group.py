"""Collectives of torch.distributed, for ranks on several machines or GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]  # it is in the module's __all__
from torch.distributed import _symmetric_memory as symmetric_memory

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
            backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout), device_id=device
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


MOST_READ = 2 << 20
"""Bytes that a rank may read from the others. NCCL, which takes longer to begin, sends fewer of large tensors."""
ALIGNMENT = 16
DTYPES = (torch.bfloat16, torch.float32)


class OneShotSum:
    """group_name: of torch.distributed. All ranks make theirs together.

    Raises RuntimeError where GPUs cannot read each other's memory.
    """

    def __init__(self, group_name: str, world_size: int, device: torch.device) -> None:
        # Where a process sees its GPU alone, all ranks have number 0, which torch would take for one GPU.
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        self.most_bytes = MOST_READ // max(1, world_size - 1) // ALIGNMENT * ALIGNMENT
        self._group_name = group_name
        self._memory = symmetric_memory.empty(self.most_bytes, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(self._memory, group_name)  # pyright: ignore[reportArgumentType]

    def serves(self, x: torch.Tensor) -> bool:
        is_aligned = x.nbytes % ALIGNMENT == x.data_ptr() % ALIGNMENT == 0
        return 0 < x.nbytes <= self.most_bytes and is_aligned and x.dtype in DTYPES and x.is_contiguous()

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """Sum a tensor that it `serves`, in place."""
        memory = self._memory[: x.nbytes].view(x.dtype).view(x.shape)
        return torch.ops.symm_mem.one_shot_all_reduce_copy_out(memory, x, "sum", self._group_name, x)


def find_one_shot(
    group_name: str, world_size: int, device: torch.device, agree: Callable[[bool], bool]
) -> tuple[OneShotSum | None, str]:
    """One that adds up right, and what the log says of it.

    agree: a collective that says whether all ranks say yes: a kernel would wait for those that take another way.
    """
    one_shot, reason = None, "another rank cannot"
    try:
        one_shot = OneShotSum(group_name, world_size, device)
    except Exception as error:  # whatever torch, the driver or the machine lacks
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if agree(one_shot is not None) and one_shot:
        if agree(_adds_up(one_shot, world_size, device)):
            return one_shot, f"ranks add up to {one_shot.most_bytes >> 10} KiB by symmetric memory, more by NCCL"
        reason = "it gives no right sums"
    return None, f"ranks add up all by NCCL, nothing by symmetric memory ({reason})"


def _adds_up(one_shot: OneShotSum, world_size: int, device: torch.device) -> bool:
    ones = torch.ones(ALIGNMENT, dtype=torch.bfloat16, device=device)
    try:
        return bool((one_shot.add(ones) == world_size).all())
    except RuntimeError:  # this torch has no such kernel
        return False
