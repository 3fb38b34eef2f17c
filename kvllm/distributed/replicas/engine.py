"""Several engines as one: requests are spread over them, and those of a lost engine go on in another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvllm.config import EngineConfig
from kvllm.core.engine import LLMEngine
from kvllm.distributed.replicas.dispatcher import Dispatcher, Report
from kvllm.outputs import RequestOutput
from kvllm.stats import EngineStats

if TYPE_CHECKING:
    from kvllm.distributed.replicas.replica_set import Engines


class DataParallelEngine(LLMEngine):
    """Takes requests, makes their text and ends them as every engine does; their tokens come from `engines`.

    config: of each of them, except that their pools may differ: its own has as many blocks as the smallest.
    """

    def __init__(self, config: EngineConfig, engines: Engines, **options: Any) -> None:
        super().__init__(config, engines, **options)
        self.engines = engines
        self.stats = EngineStats(num_blocks=sum(engines.num_blocks))
        self.scheduler = self._dispatcher = Dispatcher(config, self.stats, engines.num_blocks)
        self._last_steps = [(0, 0)] * len(engines.num_blocks)

    def abort(self, request_id: str) -> None:
        if request := self._requests.get(request_id):
            for seq in request.sequences.values():
                engine = self._dispatcher.engine_of(seq)
                if engine is not None:  # it may know the sequence as a branch of the first
                    self.engines.forget(engine, [seq.seq_id, seq.seq_id - seq.index])
        super().abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Hand out requests and wait for tokens of some engine, but not for ever."""
        self._dispatcher.dispatch()
        for engine in self.engines.free():
            starts = self._dispatcher.take(engine)
            if starts is not None:
                self.engines.send(engine, starts)
        touched: dict[str, RequestOutput] = {}
        for engine, report in self.engines.receive():
            if report is None:
                self._last_steps[engine] = (0, 0)
                self._dispatcher.lose(engine)
                continue
            self._count(engine, report)
            for sampled in self._dispatcher.receive(engine, report):
                touched |= {output.request_id: output for output in self._deliver(sampled)}
        return list(touched.values())

    def _count(self, engine: int, report: Report) -> None:
        """Add to the stats. A step of one engine is a step of all, in which the others are as they last were."""
        counted = report.stats
        timeline, counted.timeline, counted.steps, counted.peak_blocks = counted.timeline, [], 0, 0
        self.stats.add(counted)
        for step in timeline:
            self._last_steps[engine] = step
            running, blocks = map(sum, zip(*self._last_steps, strict=True))
            self.stats.record_step(running=running, blocks=blocks)
        if not report.busy:
            self._last_steps[engine] = (0, 0)
