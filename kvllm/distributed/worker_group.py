"""A group of ranks: Ray actors in a placement group, each with a connection to this process.

Ray places the ranks, starts their processes and tells why one ended. Plans and results do not pass through Ray.
"""

from __future__ import annotations

import hmac
import platform
import secrets
import selectors
import socket
import time
from collections import deque
from contextlib import suppress
from typing import Any

import msgspec
import psutil
import ray
import ray.util
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kvllm.distributed.channel import Channel
from kvllm.distributed.faults import HangDetector
from kvllm.distributed.placement import Place
from kvllm.distributed.rank import HEARTBEAT, Rank, RankSpec, Ready, Start
from kvllm.errors import KvLLMError, WorkerError
from kvllm.worker.build import Loaded, RunnerSettings

START_SECONDS = 120.0
LOAD_SECONDS = 3600.0
SILENCE_SECONDS = 5.0
"""A rank at work sends a heartbeat every second: one that has not for so long hangs."""
STANDSTILL_SECONDS = 60.0
"""A heartbeat carries the number of parts of layers that the rank has computed: one whose number stays the same for so
long hangs as well."""
POLL_SECONDS = 0.5
ORDERED_STORES = ("x86_64", "AMD64")
"""Processors on which the collectives in shared memory work."""


class WorkerGroup:
    """Starts the ranks in a place, which it gives back. `load` comes first, then any number of plans, of which several
    may be in flight.

    available_memory: bytes for each rank, the least over all. pids: by rank.
    in_step: False if an exception, such as an interrupt, kept a plan from some ranks, or cut an answer in two. Then the
        group must be replaced.

    Raises:
        ConfigError: the cluster cannot hold the ranks. WorkerError: a rank did not start.
    """

    def __init__(self, place: Place) -> None:
        self.world_size = place.num_ranks
        self.in_step = True
        self.pids: list[int] = []
        self._number = 0
        self._in_flight: deque[int] = deque()
        self._answers: list[dict[int, bytes]] = [{} for _ in range(self.world_size)]  # by the numbers of plans
        self._channels: list[Channel] = []
        self._actors: list[Any] = []  # handles: their types lack the methods that Ray adds
        self._runs: list[ray.ObjectRef] = []
        self._processes: list[psutil.Process] = []
        self._selector = selectors.DefaultSelector()
        self._place = place
        try:
            readies = self._start(place)
        except BaseException:
            self.close()
            raise
        self._rendezvous = readies[0].rendezvous
        self.available_memory = min(ready.available_memory for ready in readies)

    def load(self, settings: RunnerSettings) -> Loaded:
        """Let every rank load its shard. A ConfigError or CheckpointError of a rank is raised here.

        Returns what rank 0 tells.
        """
        try:
            self._send(msgspec.msgpack.encode(Start(self._rendezvous, settings)))
            return msgspec.msgpack.decode(self._receive(0, LOAD_SECONDS, LOAD_SECONDS)[0], type=Loaded)
        except WorkerError:
            for error in self._errors():
                if isinstance(error, RayTaskError) and isinstance(error.cause, KvLLMError):
                    raise error.cause from error
            raise

    def launch(self, plan: bytes, *, reset: bool = False) -> None:
        """Send a plan to all ranks. reset: answers to those before it are dropped. Raises WorkerError."""
        if reset:
            self._in_flight.clear()
        self._number += 1
        self._in_flight.append(self._number)
        self._send(plan)

    def collect(self) -> list[bytes]:
        """The answers of all ranks when they have executed the first plan in flight: rank 0's result, and the transfers
        of the others. Raises WorkerError."""
        return self._receive(self._in_flight.popleft(), SILENCE_SECONDS, STANDSTILL_SECONDS)

    def close(self) -> None:
        """End the ranks, whatever they do, and give back their places."""
        self._selector.close()
        for channel in self._channels:
            channel.close()
        for process in self._processes:  # at once, and even if it is stopped
            with suppress(psutil.Error):
                process.kill()
        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor)
        self._place.give_back()
        psutil.wait_procs(self._processes, timeout=SILENCE_SECONDS)

    # Start

    def _start(self, place: Place) -> list[Ready]:
        """Start the ranks, in the order of their nodes, and connect to them."""
        here = ray.get_runtime_context().get_node_id()
        node_of = place.nodes()
        bundles = sorted(range(self.world_size), key=lambda i: (node_of[i] != here, node_of[i], i))
        nodes = [node_of[bundle] for bundle in bundles]
        address = "127.0.0.1" if set(nodes) == {here} else ray.util.get_node_ip_address()
        with socket.create_server((address, 0), backlog=self.world_size) as listener:
            secret = secrets.token_bytes(16)
            for rank, bundle in enumerate(bundles):
                spec = RankSpec(
                    rank,
                    self.world_size,
                    _collectives(nodes, place.device),
                    place.device,
                    nodes.count(nodes[rank]),
                    max(1, torch.get_num_threads() // nodes.count(nodes[rank])),
                    listener.getsockname(),
                    secret,
                )
                self._start_rank(spec, place.bundle(bundle))
            readies = self._accept(listener, secret)
        self.pids = [ready.pid for ready in readies]
        for pid, node in zip(self.pids, nodes, strict=True):
            if node == here:
                with suppress(psutil.NoSuchProcess):
                    self._processes.append(psutil.Process(pid))
        return readies

    def _start_rank(self, spec: RankSpec, bundle: PlacementGroupSchedulingStrategy) -> None:
        num_gpus = int(spec.device == "cuda")
        actor = ray.remote(Rank).options(num_cpus=1, num_gpus=num_gpus, scheduling_strategy=bundle)
        self._actors.append(actor.remote())
        self._runs.append(self._actors[-1].run.remote(msgspec.msgpack.encode(spec)))

    def _accept(self, listener: socket.socket, secret: bytes) -> list[Ready]:
        """Wait until every rank has connected: their channels are then in order. Connections of others are dropped."""
        listener.settimeout(POLL_SECONDS)
        found: dict[int, tuple[Ready, Channel]] = {}
        deadline = time.monotonic() + START_SECONDS
        while len(found) < self.world_size:
            if ray.wait(self._runs, timeout=0)[0]:
                raise self._fault("a rank ended while it started")
            if time.monotonic() > deadline:
                raise self._fault(f"{self.world_size - len(found)} ranks have not started in {START_SECONDS:g} s")
            with suppress(OSError, EOFError):
                channel = Channel(listener.accept()[0])
                channel.connection.settimeout(SILENCE_SECONDS)
                if hmac.compare_digest(channel.receive_exactly(len(secret)), secret):
                    ready = msgspec.msgpack.decode(channel.receive()[1], type=Ready)
                    found[ready.rank] = ready, channel
        for rank in range(self.world_size):
            self._channels.append(found[rank][1])
            self._selector.register(self._channels[rank], selectors.EVENT_READ, rank)
        return [found[rank][0] for rank in range(self.world_size)]

    # Messages

    def _send(self, message: bytes) -> None:
        self.in_step = False
        for rank, channel in enumerate(self._channels):
            try:
                channel.send(self._number, message)
            except OSError as error:
                raise self._fault(f"rank {rank} takes no plans ({error})") from error
        self.in_step = True

    def _receive(self, number: int, silence: float, standstill: float) -> list[bytes]:
        """Every rank's answer to a message, in order. Answers to earlier ones are dropped.

        Raises WorkerError when a rank's connection ends, it has said nothing for `silence` seconds, or said that it
        got no further for `standstill` seconds.
        """
        begin = time.monotonic()
        hang_detectors = [HangDetector(silence, standstill, begin) for _ in range(self.world_size)]
        while not all(number in answers for answers in self._answers):
            for key, _ in self._selector.select(POLL_SECONDS):
                answered, message = self._receive_from(key.data)
                hang_detectors[key.data].hear(time.monotonic(), message if answered == HEARTBEAT else None)
                self._answers[key.data][answered] = message
            now = time.monotonic()
            for rank, hang_detector in enumerate(hang_detectors):
                if number not in self._answers[rank] and (complaint := hang_detector.complaint(now)):
                    raise self._fault(f"rank {rank} (pid {self.pids[rank]}) {complaint}")
        found = [answers[number] for answers in self._answers]
        for answers in self._answers:
            for earlier in [each for each in answers if each <= number]:
                del answers[earlier]
        return found

    def _receive_from(self, rank: int) -> tuple[int, bytes]:
        self.in_step = False
        try:
            message = self._channels[rank].receive()
        except (EOFError, OSError) as error:
            raise self._fault(f"rank {rank} (pid {self.pids[rank]}) is gone ({error})") from error
        self.in_step = True
        return message

    def _fault(self, what: str) -> WorkerError:
        """The error to raise: the fault noticed here, and the errors of the ranks that have ended."""
        return WorkerError("\n".join([what, *map(str, self._errors())]))

    def _errors(self) -> list[RayError]:
        """The errors of ended ranks; their own tracebacks come first. Ray reports an end within a second."""
        ray.wait(self._runs, timeout=1.0)
        time.sleep(0.1)
        errors = []
        for run in ray.wait(self._runs, num_returns=self.world_size, timeout=0)[0]:
            try:
                ray.get(run)
            except RayError as error:
                errors.append(error)
        return sorted(errors, key=lambda error: isinstance(error, RayActorError))


def _collectives(nodes: list[str], device: str) -> str:
    if device == "cuda":
        return "nccl"
    return "shared_memory" if len(set(nodes)) == 1 and platform.machine() in ORDERED_STORES else "gloo"
