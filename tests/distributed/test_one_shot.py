"""Sums by symmetric memory. A function on the CPU stands for the kernel, threads for ranks, each with a group."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed import _symmetric_memory as symmetric_memory

from kvllm.distributed.process_group import MOST_READ, OneShotSum, find_one_shot
from tests.helpers.thread_executor import on_threads
from tests.helpers.thread_shard import ThreadShard

RANKS = 3
CPU = torch.device("cpu")


@pytest.fixture
def shards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ThreadShard]]:
    barrier, board = threading.Barrier(RANKS), [torch.empty(0)] * RANKS
    members, known = [ThreadShard(rank, barrier, board) for rank in range(RANKS)], dict[str, int]()

    def add(memory: torch.Tensor, x: torch.Tensor, kind: str, group: str, out: torch.Tensor) -> torch.Tensor:
        assert (kind, known[group], memory.shape) == ("sum", memory.untyped_storage().data_ptr(), out.shape)
        return out.copy_(members[int(group)].all_reduce(memory.copy_(x)))

    monkeypatch.setattr(symmetric_memory, "empty", torch.empty)
    meet = lambda memory, group: known.update({group: memory.untyped_storage().data_ptr()})  # noqa: E731
    monkeypatch.setattr(symmetric_memory, "rendezvous", meet)
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("one_shot_all_reduce_copy_out", add, "CPU")
    yield members
    library._destroy()


def found_by(shards: list[ThreadShard]) -> list[tuple[OneShotSum | None, str]]:
    def find(rank: int) -> tuple[OneShotSum | None, str]:
        agree = lambda vote: int(shards[rank].all_reduce(torch.tensor([int(vote)]))) == RANKS  # noqa: E731
        return find_one_shot(str(rank), RANKS, CPU, agree)

    return on_threads(RANKS, find)


def test_sums_of_small_tensors(shards: list[ThreadShard]) -> None:
    found = found_by(shards)
    assert all(note == "ranks add up to 1024 KiB by symmetric memory, more by NCCL" for _, note in found)
    x = torch.arange(24.0).view(3, 8)
    sums = on_threads(RANKS, lambda rank: found[rank][0].add(x * (rank + 1)))
    assert all(torch.equal(each, x * 6) for each in sums)


@pytest.mark.parametrize(
    ("x", "serves"),
    [
        (torch.ones(MOST_READ // 2 // 4), True),
        (torch.ones(MOST_READ // 2 // 4 + 4), False),
        (torch.ones(8, dtype=torch.bfloat16), True),
        (torch.ones(7, dtype=torch.bfloat16), False),
        (torch.ones(8, dtype=torch.float16), False),
        (torch.ones(8, dtype=torch.int64), False),
        (torch.ones(8, 8).T, False),
        (torch.ones(12)[2:6], False),
        (torch.ones(0, 8), False),
    ],
    ids=lambda x: f"{x.dtype}-{tuple(x.shape)}" if isinstance(x, torch.Tensor) else str(x),
)
def test_what_the_kernel_takes(shards: list[ThreadShard], x: torch.Tensor, serves: bool) -> None:
    assert OneShotSum("0", RANKS, CPU).serves(x) == serves


@pytest.mark.parametrize("broken", ["memory of one rank", "sums"])
def test_all_ranks_take_the_other_way(shards: list[ThreadShard], broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    meet, add = symmetric_memory.rendezvous, OneShotSum.add

    def refuse(memory: torch.Tensor, group: str) -> Any:
        if group == "1":
            raise RuntimeError("no access to peers\nwith details")
        return meet(memory, group)

    if broken == "sums":
        monkeypatch.setattr(OneShotSum, "add", lambda one_shot, x: add(one_shot, x) + 1)
    else:
        monkeypatch.setattr(symmetric_memory, "rendezvous", refuse)
    reasons = {"sums": ["it gives no right sums"] * RANKS}
    reasons["memory of one rank"] = ["another rank cannot", "RuntimeError: no access to peers", "another rank cannot"]
    expected = [(None, f"ranks add up all by NCCL, nothing by symmetric memory ({each})") for each in reasons[broken]]
    assert found_by(shards) == expected
