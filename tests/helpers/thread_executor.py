"""Tensor parallelism in threads of one process: a real runner for each rank, and the memory that ranks share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kvllm import LLM
from kvllm.core.executor import BlockingExecutor
from kvllm.core.protocol import StepPlan, StepResult, decode_plan, encode
from kvllm.distributed.results import TransfersOfRanks, merge
from kvllm.distributed.shared_memory import SharedMemoryShard, create_memory
from kvllm.engine_builder import runner_settings
from kvllm.models.config import load_model_config
from kvllm.parallel import Shard
from kvllm.worker.build import RunnerSettings, make_runner


def on_threads(world_size: int, work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(work, range(world_size)))


@contextmanager
def shared_memory_shards(world_size: int, timeout: float = 120) -> Iterator[list[SharedMemoryShard]]:
    descriptor = create_memory(world_size)
    try:
        yield [SharedMemoryShard(rank, world_size, descriptor, timeout) for rank in range(world_size)]
    finally:
        os.close(descriptor)


class ThreadExecutor(BlockingExecutor):
    """One runner for each rank, each in a thread. Records the offsets that every call of the method keeps, by rank."""

    def __init__(self, llm: LLM, path: Path, shards: Sequence[Shard]) -> None:
        draft = runner_settings(llm.engine_args.draft) if llm.engine_args.draft else None
        settings = RunnerSettings(
            str(path), load_model_config(path), llm.config, "float32", "auto", "auto", draft=draft
        )
        self.runners = on_threads(len(shards), lambda rank: make_runner(settings, shards[rank], torch.device("cpu")))
        self.transfers = TransfersOfRanks()
        self.kept: list[list[torch.Tensor]] = [[] for _ in shards]
        for runner, kept in zip(self.runners, self.kept, strict=True):
            if runner.compressor:
                runner.compressor.selector.select = self._recording(runner.compressor.selector.select, kept)
                runner.compressor.selector.choose = self._recording(runner.compressor.selector.choose, kept)

    @staticmethod
    def _recording(select: Callable[..., torch.Tensor], kept: list[torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **options: Any) -> torch.Tensor:
            kept.append(select(*args, **options))
            return kept[-1]

        return call

    def execute(self, plan: StepPlan) -> StepResult:
        plan_bytes = encode(plan)
        results = on_threads(len(self.runners), lambda rank: self.runners[rank].execute(decode_plan(plan_bytes)))
        assert not any(result.tokens for result in results[1:])  # they do not sample
        return merge(results, self.transfers)

    def close(self) -> None:
        pass
