"""One engine of several: a process that Ray starts. It is sent sequences, and reports their tokens."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from pathlib import Path

import msgspec
import ray
import torch
from msgspec import structs

from kvllm.core.drafting.step_cost import measure_steps
from kvllm.core.engine import LLMEngine
from kvllm.core.engine_loop import EngineLoop
from kvllm.core.output_processor import SequenceToken
from kvllm.core.protocol import SampledToken, SequenceStart
from kvllm.core.regions import Region
from kvllm.core.sequence import Sequence
from kvllm.distributed.executor import RayExecutor
from kvllm.distributed.faults import RestartBudget
from kvllm.distributed.placement import Place
from kvllm.distributed.replicas.messages import (
    REPORT_SECONDS,
    Compressed,
    Ended,
    ReplicaReady,
    ReplicaSpec,
    Report,
    Sampled,
)
from kvllm.distributed.replicas.router import needed_blocks
from kvllm.errors import RequestError
from kvllm.outputs import RequestOutput
from kvllm.parallel import Counted, SingleRank
from kvllm.stats import EngineStats
from kvllm.tokenizer import load_tokenizer
from kvllm.worker.build import Loaded, RunnerSettings, available_memory, make_runner
from kvllm.worker.inline import make_executor

SNAPSHOT_SECONDS = 0.25
"""A replica at work takes a snapshot so often."""


class Reporter:
    """Serves sequences that come from elsewhere, under the ids that they have there, and collects the report."""

    def __init__(self, engine: LLMEngine, path: Path) -> None:
        """path: the checkpoint's, whose tokenizer is loaded when a stop string asks for it."""
        self.engine = engine
        self.path = path
        self._lock = threading.Lock()
        self._unseen: dict[int, int] = {}  # blocks expected for sequences that the engine has not seen yet
        self._report = Report([], EngineStats(0), engine.config.num_blocks)
        self._told: dict[int, tuple[list[Region], int]] = {}  # compressions of a sequence, and how many were reported
        self._next_snapshot = 0.0
        self._loop = EngineLoop(engine, self._collect)

    def start(self, starts: list[SequenceStart]) -> None:
        """Let the engine begin sequences, which may have output already."""
        block_size = self.engine.config.block_size
        with self._lock:
            for start in starts:
                self._unseen[start.seq_id] = needed_blocks(len(start.token_ids), start.sampling.n, block_size)
        for start in starts:
            self._loop.submit(partial(self._start, start))

    def drop(self, seq_ids: list[int]) -> None:
        """Let the engine abort sequences; unknown ones are ignored."""
        for seq_id in seq_ids:
            self._loop.submit(partial(LLMEngine.abort, request_id=str(seq_id)))

    def reset_prefix_cache(self) -> None:
        self._loop.submit(LLMEngine.reset_prefix_cache)

    def report(self, seconds: float) -> Report:
        """The report since the last one: after a while, or when everything is done. Raises the engine's failure."""
        self._loop.wait(seconds)
        with self._lock:
            report, self._report = self._report, Report([], EngineStats(0), self._report.room)
            report.busy = not self._loop.is_idle
            report.room -= sum(self._unseen.values())
            return report

    # In the loop's thread

    def _start(self, start: SequenceStart, engine: LLMEngine) -> None:
        if start.sampling.stop and engine.tokenizer is None:
            engine.use_tokenizer(load_tokenizer(self.path))
        refused = None
        try:
            engine.resume_request(
                str(start.seq_id), start.token_ids, start.prompt_length, start.sampling, start.seed, start.service_class
            )
        except RequestError as error:
            refused = Sampled([(start.seq_id, SampledToken(0, error=str(error)))])
        with self._lock:
            self._unseen.pop(start.seq_id, None)
            if refused:
                self._report.steps.append(refused)

    def _collect(self, outputs: list[RequestOutput]) -> None:
        engine = self.engine
        sampled, engine.sampled = engine.sampled, []
        prompts, engine.prompts = engine.prompts, []
        ended = {seq: None for seq, _ in sampled if seq.has_ended}
        tokens = _with_errors(sampled, outputs)
        with self._lock:
            if tokens or prompts:
                self._report.steps.append(
                    Sampled(
                        tokens,
                        [_ended(seq) for seq in ended],
                        [structs.replace(prompt, seq_id=_global_id(seq)) for seq, prompt in prompts],
                    )
                )
            self._report.stats.add(engine.stats.take())
            self._report.room = self._room()
            self._add_costs(engine.scheduler.waiting.take_costs())
            self._report.compressed += self._compressed()
            self._add_snapshot(time.monotonic())

    def _add_costs(self, costs: dict[str, float]) -> None:
        for tenant, cost in costs.items():
            self._report.costs[tenant] = self._report.costs.get(tenant, 0.0) + cost

    def _add_snapshot(self, now: float) -> None:
        """Take a snapshot if it is time for one, and of an engine at rest, which takes no other until it works."""
        if now >= self._next_snapshot or not self.engine.has_unfinished_requests():
            self._report.snapshot = self.engine.snapshot(now)
            self._next_snapshot = now + SNAPSHOT_SECONDS

    def _room(self) -> int:
        """See `Report`."""
        scheduler, block_size = self.engine.scheduler, self.engine.config.block_size
        waiting = scheduler.waiting.values()
        needed = (needed_blocks(seq.num_tokens, 1 + seq.forks_pending, block_size) for seq in waiting)
        return scheduler.blocks.num_available - sum(needed)

    def _compressed(self) -> list[Compressed]:
        """What is new of compressions since the last call. A sequence that is preempted begins a new list."""
        now = {_global_id(seq): seq.compressions for seq in self.engine.scheduler.running if seq.compressions}
        found = [Compressed(seq_id, 0, []) for seq_id in self._told if seq_id not in now]
        for seq_id, regions in now.items():
            before, known = self._told.get(seq_id, (regions, 0))
            if before is not regions:
                known = 0
            if len(regions) > known:
                found.append(Compressed(seq_id, known, regions[known:]))
        self._told = {seq_id: (regions, len(regions)) for seq_id, regions in now.items()}
        return found


def _with_errors(sampled: list[SequenceToken], outputs: list[RequestOutput]) -> list[tuple[int, SampledToken]]:
    """Tokens, by the ids of their sequences. Where the output of a request could not be made here, its error comes with
    them, or alone if its prompt was all that there is yet."""
    errors = {output.request_id: str(output.error) for output in outputs if output.error is not None}
    if not errors:
        return [(_global_id(seq), token) for seq, token in sampled]
    found = [
        (_global_id(seq), structs.replace(token, error=token.error or errors.get(seq.request_id)))
        for seq, token in sampled
    ]
    silent = errors.keys() - {seq.request_id for seq, _ in sampled}
    return found + [(int(request_id), SampledToken(0, error=errors[request_id])) for request_id in sorted(silent)]


def _ended(seq: Sequence) -> Ended:
    return Ended(_global_id(seq), seq.preemptions, seq.windows_compressed, seq.evicted, seq.cache_hits, seq.missing)


def _global_id(seq: Sequence) -> int:
    return int(seq.request_id) + seq.index


class Replica:
    """The Ray actor: `start`, `load`, then any number of `exchange` and `drop`."""

    def start(self, encoded_spec: bytes) -> bytes:
        """Start the ranks, if there are to be several. Takes a ReplicaSpec, returns a ReplicaReady."""
        spec, place = msgspec.msgpack.decode(encoded_spec, type=ReplicaSpec), Place.of_this_actor()
        torch.set_num_threads(spec.num_threads)
        self._ranks, self._device = None, place.device
        if place.num_ranks > 1:
            self._ranks = RayExecutor(place, RestartBudget(spec.max_restarts))
            memory = self._ranks.available_memory // spec.neighbours
        else:
            memory = available_memory(place.device, spec.neighbours)
        return msgspec.msgpack.encode(ReplicaReady(os.getpid(), ray.get_runtime_context().get_node_id(), memory))

    def load(self, encoded_settings: bytes) -> bytes:
        """Load the model, as RunnerSettings say. Returns a Loaded.

        Raises ConfigError and CheckpointError.
        """
        settings = msgspec.msgpack.decode(encoded_settings, type=RunnerSettings)
        if self._ranks:
            executor, self._shard = self._ranks, None
            loaded = self._ranks.load(settings)
        else:
            self._shard = Counted(SingleRank())
            runner = make_runner(settings, self._shard, torch.device(self._device))
            executor = make_executor(runner, async_scheduling=settings.engine.async_scheduling)
            loaded = Loaded.of(settings, runner)
            assert runner.grammars is not None
            runner.grammars.prepare()
        config, model = structs.replace(settings.engine, num_blocks=loaded.num_blocks), settings.model
        step_cost = measure_steps(executor, config, model.vocab_size) if config.speculation else None
        engine = LLMEngine(
            config, executor, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids, step_cost=step_cost
        )
        self._reporter = Reporter(engine, Path(settings.tokenizer_path or settings.path))
        return msgspec.msgpack.encode(loaded)

    def exchange(self, encoded_starts: bytes) -> bytes:
        """Takes a list of SequenceStart. Returns a Report, after a while or when everything is done.

        Raises whatever the engine has failed with.
        """
        self._reporter.start(msgspec.msgpack.decode(encoded_starts, type=list[SequenceStart]))
        report = self._reporter.report(REPORT_SECONDS)
        report.progress = self._shard.calls if self._shard else None
        return msgspec.msgpack.encode(report)

    def reset_prefix_cache(self) -> None:
        self._reporter.reset_prefix_cache()

    def drop(self, encoded_ids: bytes) -> None:
        """Takes a list of sequences to abort."""
        self._reporter.drop(msgspec.msgpack.decode(encoded_ids, type=list[int]))
