"""One engine of several: a process that Ray starts. It gets sequences, and reports what became of them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import ray
import torch
from msgspec import Struct, structs
from ray.util import get_current_placement_group

from kvllm.core.executor import Executor
from kvllm.core.protocol import SampledToken, SequenceStart
from kvllm.core.sequence import Sequence
from kvllm.distributed.executor import RayExecutor
from kvllm.distributed.replicas.dispatcher import Ended, Report, Sampled
from kvllm.distributed.replicas.router import needed_blocks
from kvllm.distributed.restarting import RestartingEngine
from kvllm.parallel import Counted, SingleRank
from kvllm.stats import EngineStats
from kvllm.tokenizer import load_tokenizer
from kvllm.worker.build import RunnerSettings, available_memory, make_runner
from kvllm.worker.inline import InlineExecutor

REPORT_SECONDS = 0.05
"""An engine at work reports so often: its steps never wait for it."""


class ReplicaSpec(Struct, frozen=True):
    """What an engine is told before it loads the model. num_ranks, placement, max_restarts: see RayExecutor."""

    num_ranks: int
    placement: str
    max_restarts: int
    device: str
    num_threads: int
    neighbours: int


class ReplicaReady(Struct, frozen=True):
    """What it answers. available_memory: of each rank, the least over all."""

    pid: int
    node: str
    available_memory: int


class ReportingEngine(RestartingEngine):
    """An engine whose sequences come from elsewhere, with ids, seeds and perhaps some output; its tokens go there.

    The tokenizer is loaded when a stop string asks for it: the text is made elsewhere, too.
    """

    def __init__(self, settings: RunnerSettings, num_blocks: int, executor: Executor) -> None:
        config, model = structs.replace(settings.engine, num_blocks=num_blocks), settings.model
        super().__init__(config, executor, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids)
        self.path = Path(settings.path)
        self._steps: list[Sampled] = []

    def start(self, start: SequenceStart) -> None:
        if start.sampling.stop and self.tokenizer is None:
            self.tokenizer = load_tokenizer(self.path)
        request_id = str(start.seq_id)
        prompt, output = start.token_ids[: start.prompt_length], start.token_ids[start.prompt_length :]
        self.add_request(request_id, prompt, start.sampling, stream=False)
        request = self._requests[request_id]
        seq = request.sequences[0]
        seq.seed = start.seed
        if output:  # as after a preemption
            seq.token_ids += output
            seq.refill_length = seq.num_tokens
            for text in request.texts:
                for token_id in output:
                    text.push(token_id)

    def take_steps(self) -> list[Sampled]:
        """What the steps since the last call have yielded."""
        steps, self._steps = self._steps, []
        return steps

    @property
    def room(self) -> int:
        """See `Report`."""
        waiting = self.scheduler.waiting.values()
        needed = (needed_blocks(seq.num_tokens, 1 + seq.forks_pending, self.config.block_size) for seq in waiting)
        return self.scheduler.blocks.num_available - sum(needed)

    def _deliver(self, sampled: list[tuple[Sequence, SampledToken]]) -> list:
        touched = super()._deliver(sampled)
        ended = [seq for seq, _ in sampled if not self._runs(seq)]
        self._steps.append(
            Sampled(
                [(_global_id(seq), token) for seq, token in sampled],
                [Ended(_global_id(seq), seq.preemptions, seq.evicted, seq.cache_hits) for seq in ended],
            )
        )
        return touched

    def _runs(self, seq: Sequence) -> bool:
        request = self._requests.get(seq.request_id)
        return request is not None and seq.index in request.sequences


def _global_id(seq: Sequence) -> int:
    return int(seq.request_id) + seq.index


class EngineActor:
    """The Ray actor: `start`, `load`, then any number of `exchange` and `forget`. The engine runs in its own thread."""

    def start(self, encoded_spec: bytes) -> bytes:
        """Start the ranks, if there are to be several. Takes a ReplicaSpec, returns an ReplicaReady."""
        self._spec = spec = msgspec.msgpack.decode(encoded_spec, type=ReplicaSpec)
        torch.set_num_threads(spec.num_threads)
        self._ranks = None
        if spec.num_ranks > 1:
            group = get_current_placement_group()
            self._ranks = RayExecutor(spec.num_ranks, spec.placement, spec.max_restarts, group)
            memory = self._ranks.available_memory // spec.neighbours
        else:
            memory = available_memory(spec.device, spec.neighbours)
        return msgspec.msgpack.encode(ReplicaReady(os.getpid(), ray.get_runtime_context().get_node_id(), memory))

    def load(self, encoded_settings: bytes) -> bytes:
        """Load the model, as RunnerSettings say. Returns the blocks that the pool has, as a number.

        Raises ConfigError and CheckpointError.
        """
        settings = msgspec.msgpack.decode(encoded_settings, type=RunnerSettings)
        if self._ranks:
            executor, self._shard = self._ranks, None
            num_blocks = self._ranks.load(settings)
        else:
            self._shard = Counted(SingleRank())
            runner = make_runner(settings, self._shard, torch.device(self._spec.device))
            executor, num_blocks = InlineExecutor(runner), runner.cache.num_blocks
        self._engine = ReportingEngine(settings, num_blocks, executor)
        self._orders: list[SequenceStart | int] = []
        self._busy = False
        self._failure: BaseException | None = None
        self._report = Report([], EngineStats(num_blocks), num_blocks)
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()
        return msgspec.msgpack.encode(num_blocks)

    def exchange(self, encoded_starts: bytes) -> bytes:
        """Takes a list of SequenceStart. Returns a Report, after a while or when everything is done.

        Raises whatever the engine has failed with.
        """
        self._order(msgspec.msgpack.decode(encoded_starts, type=list[SequenceStart]))
        with self._changed:
            self._changed.wait_for(lambda: self._failure or not self._busy, REPORT_SECONDS)
            if self._failure:
                raise self._failure
            report, self._report = self._report, Report([], EngineStats(0), self._report.room)
            report.busy = self._busy
            report.progress = self._shard.calls if self._shard else None
            for order in self._orders:  # not seen by the engine yet
                if isinstance(order, SequenceStart):
                    block_size = self._engine.config.block_size
                    report.room -= needed_blocks(len(order.token_ids), order.sampling.n, block_size)
            return msgspec.msgpack.encode(report)

    def forget(self, encoded_ids: bytes) -> None:
        """Takes a list of sequences to abort."""
        self._order(msgspec.msgpack.decode(encoded_ids, type=list[int]))

    def _order(self, orders: list) -> None:
        with self._changed:
            self._orders += orders
            self._busy = self._busy or bool(orders)
            self._changed.notify_all()

    # The engine's thread

    def _run(self) -> None:
        try:
            while True:
                self._step()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _step(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._busy)
            orders, self._orders = self._orders, []
        engine = self._engine
        for order in orders:
            if isinstance(order, SequenceStart):
                engine.start(order)
            else:
                engine.abort(str(order))
        if engine.has_unfinished_requests():
            engine.step()
        with self._changed:
            self._report.steps += engine.take_steps()
            self._report.stats.add(engine.stats.take())
            self._report.room = engine.room
            self._busy = bool(self._orders) or engine.has_unfinished_requests()
            if not self._busy:
                self._changed.notify_all()
