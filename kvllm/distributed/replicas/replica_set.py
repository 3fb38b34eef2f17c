"""Replicas in Ray actors, as one process sees them: started, called, replaced when they are lost."""

from __future__ import annotations

import time
import weakref
from contextlib import suppress
from typing import Any

import msgspec
import psutil
import ray
import torch
from msgspec import structs
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from kvllm.core.protocol import SequenceStart
from kvllm.distributed.faults import HangDetector, RestartBudget
from kvllm.distributed.placement import Place, release_ray
from kvllm.distributed.replicas.messages import ReplicaReady, ReplicaSpec, Report
from kvllm.distributed.replicas.replica import Replica
from kvllm.distributed.worker_group import (
    LOAD_SECONDS,
    POLL_SECONDS,
    SILENCE_SECONDS,
    STANDSTILL_SECONDS,
    START_SECONDS,
)
from kvllm.errors import KvLLMError, WorkerError
from kvllm.stats import EngineStats
from kvllm.worker.build import Loaded, RunnerSettings


class ReplicaLost(WorkerError):
    """A replica died, hangs or failed. Another one can take its place."""


class ReplicaSet:
    """An engine in a Ray actor for each place, all with the same model. The places are given back.

    device: the device type of all, "cuda" or "cpu". num_blocks: of their pools, after `load`.
    budget: of restarts of all replicas together. Those of their ranks do not count: each replica may have as many.

    Raises:
        WorkerError: a replica did not start.
    """

    def __init__(self, places: list[Place], budget: RestartBudget) -> None:
        self.device = places[0].device
        self.restart_seconds: list[float] = []
        """How long each replacement of a replica took, until it had loaded the model."""
        self.num_blocks: list[int] = []
        self._budget = budget
        self._replicas: list[_RemoteReplica] = []
        self._finalizer = weakref.finalize(self, _end, self._replicas)
        try:
            self._start(places)
            readies = [replica.ready(START_SECONDS) for replica in self._replicas]
        except BaseException:
            self.close()
            raise
        self.available_memory = min(ready.available_memory for ready in readies)

    @property
    def pids(self) -> list[int]:
        """Process ids of the replicas, on their nodes; 0 for one that is starting."""
        return [replica.pid for replica in self._replicas]

    def load(self, settings: RunnerSettings) -> Loaded:
        """Let every replica load the model. Raises ConfigError and CheckpointError as `make_runner` does.

        Returns what the one with the smallest pool tells.
        """
        loaded = []
        for replica in self._replicas:
            replica.load(settings)
        try:
            for replica in self._replicas:
                loaded.append(msgspec.msgpack.decode(replica.result(LOAD_SECONDS), type=Loaded))
                self.num_blocks.append(loaded[-1].num_blocks)
                replica.loaded = True
        except ReplicaLost as error:
            cause = getattr(error.__cause__, "cause", None)
            raise (cause if isinstance(cause, KvLLMError) else error) from error
        self._settings = [  # with which another one takes the place of each
            structs.replace(
                settings, engine=structs.replace(settings.engine, num_blocks=num_blocks), gpu_memory_utilization=None
            )
            for num_blocks in self.num_blocks
        ]
        return min(loaded, key=lambda each: each.num_blocks)

    def close(self) -> None:
        self._finalizer()

    def _start(self, places: list[Place]) -> None:
        nodes = [place.nodes()[0] for place in places]
        for place, node in zip(places, nodes, strict=True):
            num_threads = max(1, torch.get_num_threads() // nodes.count(node))
            neighbours = nodes.count(node) if self.device == "cpu" else 1
            self._replicas.append(_RemoteReplica(place, ReplicaSpec(self._budget.most, num_threads, neighbours)))

    # Calls

    def free(self) -> list[int]:
        """The replicas that are not at work on a call."""
        return [i for i, replica in enumerate(self._replicas) if replica.pending is None]

    def send(self, index: int, starts: list[SequenceStart]) -> None:
        """Give sequences to a free replica, or none, and ask for a report."""
        replica, now = self._replicas[index], time.monotonic()
        if not replica.busy or now - replica.hang_detector.heard > SILENCE_SECONDS:  # it was not listened to
            replica.hang_detector = HangDetector(SILENCE_SECONDS, STANDSTILL_SECONDS, now)
        replica.call("exchange", msgspec.msgpack.encode(starts))

    def drop(self, index: int, seq_ids: list[int]) -> None:
        """Let a replica abort sequences; unknown ones are ignored."""
        if self._replicas and self._replicas[index].loaded:
            self._replicas[index].actor.drop.remote(msgspec.msgpack.encode(seq_ids))

    def reset_prefix_cache(self) -> None:
        """Let all replicas forget their cached prefixes. One that is starting has none."""
        for replica in self._replicas:
            if replica.loaded:
                replica.actor.reset_prefix_cache.remote()

    def receive(self) -> list[tuple[int, Report | None]]:
        """Wait for a report, but not for ever, and return all that have come. None: the replica is lost, with all that
        it had. Another one takes its place as soon as it has loaded the model.

        Raises WorkerError when replicas were lost too often, or the ranks of one were.
        """
        self._budget.check()
        calls = [replica.pending for replica in self._replicas if replica.pending]
        if not calls:
            return []
        ray.wait(calls, timeout=POLL_SECONDS)
        answered = set(ray.wait(calls, num_returns=len(calls), timeout=0)[0])
        found = []
        for index, replica in enumerate(self._replicas):
            try:
                if replica.pending in answered:
                    found.append((index, self._answer(index)))
                if replica.pending or replica.busy:
                    replica.check()
            except ReplicaLost as fault:
                self._replace(index, fault)
                found.append((index, None))
            except WorkerError as error:  # its ranks were lost too often
                self._budget.failure = error
                _close(self._replicas)
                raise
        return found

    def _answer(self, index: int) -> Report:
        replica = self._replicas[index]
        answer = replica.result()
        if replica.loaded:
            report = msgspec.msgpack.decode(answer, type=Report)
            replica.busy = report.busy
            replica.hang_detector.hear(time.monotonic(), report.progress)
            self._budget.count(report.stats.steps)
            return report
        replica.ready()
        replica.loaded = True
        self.restart_seconds.append(time.monotonic() - replica.begin)
        return Report([], EngineStats(0), self.num_blocks[index])

    def _replace(self, index: int, fault: ReplicaLost) -> None:
        lost = self._replicas[index]
        lost.close()
        try:
            self._budget.spend(fault)
        except WorkerError:
            _close(self._replicas)
            raise
        self._replicas[index] = _RemoteReplica(lost.place.again(), lost.spec)
        self._replicas[index].load(self._settings[index])


class _RemoteReplica:
    """A replica in its actor.

    pending: the call that it is at work on. busy: whether it had anything left to do when it last reported.
    """

    def __init__(self, place: Place, spec: ReplicaSpec) -> None:
        self.begin = time.monotonic()
        self.place = place
        self.spec = spec
        self.pid = 0
        self.loaded = self.busy = False
        self.pending: ray.ObjectRef | None = None
        self.hang_detector = HangDetector(LOAD_SECONDS, LOAD_SECONDS, self.begin)
        self._processes: list[psutil.Process] = []
        alone = place.num_ranks == 1  # otherwise the ranks take what is reserved
        # Ray gives an actor's class methods that its type does not have.
        self.actor: Any = (
            ray.remote(Replica)
            .options(
                num_cpus=int(alone), num_gpus=int(alone and place.device == "cuda"), scheduling_strategy=place.bundle(0)
            )
            .remote()
        )
        self._ready = self.actor.start.remote(msgspec.msgpack.encode(spec))

    def ready(self, seconds: float | None = None) -> ReplicaReady:
        ready = msgspec.msgpack.decode(_get(self._ready, seconds), type=ReplicaReady)
        self.pid = ready.pid
        if ready.node == ray.get_runtime_context().get_node_id():
            with suppress(psutil.NoSuchProcess):
                self._processes = [psutil.Process(ready.pid)]
        return ready

    def load(self, settings: RunnerSettings) -> None:
        self.call("load", msgspec.msgpack.encode(settings))

    def call(self, method: str, message: bytes) -> None:
        self.pending = getattr(self.actor, method).remote(message)

    def result(self, seconds: float | None = None) -> Any:
        """The answer of the pending call.

        Raises ReplicaLost, or the WorkerError of a replica whose ranks were lost too often.
        """
        assert self.pending is not None
        answer = _get(self.pending, seconds)
        self.pending = None
        return answer

    def check(self) -> None:
        """Raises ReplicaLost if it hangs, or Ray has not started it in time."""
        late = not self.loaded and time.monotonic() > self.begin + START_SECONDS
        if late and not ray.wait([self._ready], timeout=0)[0]:
            raise ReplicaLost(f"a replica has not started in {START_SECONDS:g} s")
        if complaint := self.hang_detector.complaint(time.monotonic()):
            raise ReplicaLost(f"a replica (pid {self.pid}) {complaint}")

    def close(self) -> None:
        """End the replica and its ranks, whatever they do, and give back their places."""
        for process in self._processes:  # at once, and even if it is stopped
            with suppress(psutil.Error):
                process.kill()
        if ray.is_initialized():
            ray.kill(self.actor)
        self.place.give_back()
        psutil.wait_procs(self._processes, timeout=SILENCE_SECONDS)


def _get(call: ray.ObjectRef, seconds: float | None) -> Any:
    try:
        return ray.get(call, timeout=seconds)
    except GetTimeoutError as error:
        raise ReplicaLost(f"a replica has not answered in {seconds:g} s") from error
    except RayError as error:
        if isinstance(error, RayTaskError) and isinstance(error.cause, WorkerError):
            raise error.cause from error
        raise ReplicaLost(str(error)) from error


def _close(replicas: list[_RemoteReplica]) -> None:
    for replica in replicas:
        replica.close()
    replicas.clear()


def _end(replicas: list[_RemoteReplica]) -> None:
    _close(replicas)
    release_ray()
