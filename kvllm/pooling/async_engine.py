"""A pooling engine for asyncio: requests come one by one, and those that wait are computed together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import NamedTuple

import torch

from kvllm.engine_args import EngineArgs
from kvllm.pooling.engine import PoolingEngine
from kvllm.pooling.runner import PoolingRequest
from kvllm.stats import EngineStats


class _Waiting(NamedTuple):
    request: PoolingRequest
    result: asyncio.Future[torch.Tensor]


class AsyncPooling:
    """Its methods belong into one event loop; `stats`, the properties and `shutdown` may be used anywhere.

    engine: in whose passes requests are computed, in the order in which they came.
    """

    def __init__(self, engine: PoolingEngine) -> None:
        self.engine = engine
        self.config = engine.engine_config
        self.tokenizer = engine.tokenizer
        self.errored = False
        self._thread = ThreadPoolExecutor(1, "kvllm-pooling")
        self._waiting: deque[_Waiting] = deque()
        self._passes: asyncio.Task[None] | None = None

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> AsyncPooling:
        """Build the engine. Raises ConfigError and CheckpointError as `LLM` does."""
        return cls(PoolingEngine(args))

    async def compute(self, requests: Sequence[PoolingRequest]) -> list[torch.Tensor]:
        """What becomes of requests, as `PoolingEngine.compute` has it. Cancelling it takes back those that wait."""
        loop = asyncio.get_running_loop()
        waiting = [_Waiting(request, loop.create_future()) for request in requests]
        self._waiting += waiting
        if self._passes is None or self._passes.done():
            self._passes = asyncio.create_task(self._run())
        return await asyncio.gather(*(each.result for each in waiting))

    def stats(self) -> EngineStats:
        """The counters as they were after the last pass."""
        stats = copy(self.engine.stats)
        stats.step_tokens = copy(stats.step_tokens)
        return stats

    def shutdown(self) -> None:
        """End after the current pass. Idempotent."""
        self.errored = True
        self._thread.shutdown(cancel_futures=True)

    async def _run(self) -> None:
        """Compute until nobody waits."""
        loop = asyncio.get_running_loop()
        while some := self._next():
            try:
                work = self.engine.compute, [each.request for each in some]
                found = await loop.run_in_executor(self._thread, *work)
            except Exception as error:
                for each in some:
                    if not each.result.done():
                        each.result.set_exception(error)
                continue
            for each, vectors in zip(some, found, strict=True):
                if not each.result.done():  # else nobody waits for it any more
                    each.result.set_result(vectors)

    def _next(self) -> list[_Waiting]:
        """Those of the next pass."""
        waiting = [each for each in self._waiting if not each.result.done()]
        lengths = [len(each.request.token_ids) for each in waiting]
        count = len(next(self.engine.passes(lengths), ()))
        self._waiting = deque(waiting[count:])
        return waiting[:count]
