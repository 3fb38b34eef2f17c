"""Sums of small tensors over GPUs of one machine that read each other's memory: one kernel of torch's symmetric memory,
in which each rank adds up, in their order, what all ranks have written."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch.distributed import _symmetric_memory as symmetric_memory

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
