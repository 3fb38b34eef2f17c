"""Collectives of ranks on one machine, through memory that they share.

Every rank has two buffers and a flag. It writes a buffer, raises its flag to the number of the call, waits for the
flags of the others and reads their buffers. The next call uses the other buffer, and who has raised the flag of that
call has read all of this one: so two buffers are enough, and there is no barrier.

The flags rely on stores becoming visible in the order in which they are made, as on x86. The memory is a file without a
name (memfd): it is gone with the last process that has it open, however that ends.
"""

from __future__ import annotations

import mmap
import os
import time

import torch

from kvllm.errors import WorkerError
from kvllm.parallel import Shard

BUFFER_BYTES = 1 << 20
FLAG_STRIDE = 8
"""The distance of two flags in int64: each flag has a cache line to itself."""
SPINS = 100
"""How often a flag is read before the processor is offered to others: some 10 us."""


def create_memory(world_size: int) -> int:
    """A file descriptor of zeroed memory for `SharedMemoryShard`. Others open it as /proc/<pid>/fd/<number>."""
    descriptor = os.memfd_create("kvllm")
    os.ftruncate(descriptor, world_size * (2 * BUFFER_BYTES + 8 * FLAG_STRIDE))
    return descriptor


class SharedMemoryShard(Shard):
    """descriptor: of `create_memory(world_size)`; it stays open. timeout: seconds to wait for another rank.

    The collectives take contiguous CPU tensors of any size, and raise WorkerError when a rank keeps others waiting.
    """

    def __init__(self, rank: int, world_size: int, descriptor: int, timeout: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        memory = mmap.mmap(descriptor, 0)
        flags_end = len(memory) - world_size * 2 * BUFFER_BYTES
        self._flags = memoryview(memory)[:flags_end].cast("q")
        buffers = torch.frombuffer(memory, dtype=torch.uint8, offset=flags_end)
        self._buffers = buffers.view(2, world_size, BUFFER_BYTES)
        self._calls = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        for part in x.view(-1).split(BUFFER_BYTES // x.itemsize):
            first, second, *others = self._exchange(part)
            torch.add(first, second, out=part)
            for other in others:
                part.add_(other)
        return x

    def all_gather_last_dim(self, x: torch.Tensor) -> torch.Tensor:
        gathered = self._gather(x, self.world_size)
        return gathered.view(self.world_size, -1, x.shape[-1]).transpose(0, 1).reshape(*x.shape[:-1], -1)

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        if self.rank == 0:
            return self._gather(x, self.world_size).view(self.world_size, *x.shape)
        self._gather(x, 0)
        return None

    def _gather(self, x: torch.Tensor, num_ranks: int) -> torch.Tensor:
        """`[num_ranks, x.numel()]` of the first ranks; all take part."""
        gathered, size = x.new_empty(num_ranks, x.numel()), BUFFER_BYTES // x.itemsize
        for start, part in enumerate(x.view(-1).split(size)):
            gathered[:, start * size :][:, : part.numel()] = self._exchange(part)[:num_ranks]
        return gathered

    def _exchange(self, part: torch.Tensor) -> torch.Tensor:
        """`[n]` of each rank -> `[world_size, n]`, valid until the next call but one."""
        self._calls += 1
        parts = self._buffers[self._calls % 2].view(part.dtype)[:, : part.numel()]
        parts[self.rank].copy_(part)
        self._flags[self.rank * FLAG_STRIDE] = self._calls
        for rank in range(self.world_size):
            self._wait(rank)
        return parts

    def _wait(self, rank: int) -> None:
        flags, flag, calls = self._flags, rank * FLAG_STRIDE, self._calls
        for _ in range(SPINS):
            if flags[flag] >= calls:
                return
        deadline = time.monotonic() + self.timeout
        while flags[flag] < calls:
            os.sched_yield()
            if time.monotonic() > deadline:
                raise WorkerError(f"rank {self.rank} has waited {self.timeout:g} s for rank {rank} in a collective")
