"""One rank of a worker group: a process that Ray starts. It executes plans from a connection until that ends."""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # it is documented

from kvllm.core.protocol import decode_plan, encode
from kvllm.distributed.channel import Channel
from kvllm.distributed.process_group import ProcessGroupShard
from kvllm.distributed.shared_memory import SharedMemoryShard, create_memory
from kvllm.parallel import Counted, Shard, SingleRank
from kvllm.worker.build import Loaded, RunnerSettings, available_memory, make_runner
from kvllm.worker.launched import Launched
from kvllm.worker.model_runner import ModelRunner

COLLECTIVE_TIMEOUT = 3600.0
"""Seconds, as many as loading may take: the first collective waits for the slowest disk. In a step, the engine's
process notices a rank that keeps the others waiting much sooner."""
POLL_SECONDS = 2e-4
"""How long a rank waits for a plan before it looks whether the device has executed the last one."""
HEARTBEAT_SECONDS = 1.0
HEARTBEAT = -1
"""In place of a step's number: the rank is at work. The message changes as long as it advances."""


class RankSpec(Struct, frozen=True):
    """The part of a rank in its worker group, and the address of the engine's process, which asks for the `secret`.

    collectives: "shared_memory", or a backend of torch.distributed. neighbours: ranks on this node, itself included.
    """

    rank: int
    world_size: int
    collectives: str
    device: str
    neighbours: int
    num_threads: int
    address: tuple[str, int]
    secret: bytes


class Ready(Struct, frozen=True):
    """A rank's first message. rendezvous: sent by rank 0, the name under which the others find the means of the
    collectives."""

    rank: int
    pid: int
    available_memory: int
    rendezvous: str = ""


class Start(Struct, frozen=True):
    rendezvous: str
    settings: RunnerSettings


class Rank:
    """The Ray actor. Its only call lasts as long as the rank, so that its end, and its traceback, are that call's."""

    def run(self, encoded_spec: bytes) -> None:
        spec = msgspec.msgpack.decode(encoded_spec, type=RankSpec)
        torch.set_num_threads(spec.num_threads)
        channel = Channel(socket.create_connection(spec.address))
        channel.connection.sendall(spec.secret)
        rendezvous = _open_rendezvous(spec, channel) if spec.rank == 0 and spec.world_size > 1 else None
        memory = available_memory(spec.device, spec.neighbours)
        ready = Ready(spec.rank, os.getpid(), memory, rendezvous.name if rendezvous else "")
        channel.send(0, msgspec.msgpack.encode(ready))
        try:
            _serve(channel, spec, rendezvous)
        except (EOFError, ConnectionError):
            return  # the engine's process is gone, or has closed the worker group


def _serve(channel: Channel, spec: RankSpec, rendezvous: _Rendezvous | None) -> None:
    start = msgspec.msgpack.decode(channel.receive()[1], type=Start)
    shard = Counted(_join(spec, rendezvous, start.rendezvous))
    runner = make_runner(start.settings, shard, torch.device(spec.device))
    if runner.samples and runner.grammars is not None:
        runner.grammars.prepare()
    channel.send(0, msgspec.msgpack.encode(Loaded.of(start.settings, runner)))
    with _heartbeat(channel, shard) as busy:
        _run_plans(channel, runner, busy)


def _run_plans(channel: Channel, runner: ModelRunner, busy: threading.Event) -> None:
    """Launch plans as they come, and send the result of each as soon as it is there. The next plan may be launched
    before that; ranks need not agree on which comes first."""
    launched: deque[tuple[int, Launched]] = deque()
    while True:
        if launched and launched[0][1].is_due():
            number, step = launched.popleft()
            result = step.result()
            if not runner.samples:
                result.tokens = []
            if not launched:
                busy.clear()
            channel.send(number, encode(result))
        elif not launched or channel.has_message(POLL_SECONDS):
            number, message = channel.receive()
            busy.set()
            plan = decode_plan(message)
            if plan.reset:
                launched.clear()
            launched.append((number, runner.launch(plan)))


@contextmanager
def _heartbeat(channel: Channel, shard: Counted) -> Iterator[threading.Event]:
    """Sends a message every second, with a number that grows as the rank advances. It does so only while the event is
    set: between steps the messages would pile up unread."""
    busy, ended = threading.Event(), threading.Event()

    def beat() -> None:
        while not ended.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):  # the main thread will notice
                if busy.is_set():
                    channel.send(HEARTBEAT, str(shard.calls).encode())

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield busy
    finally:
        ended.set()
        thread.join()


# Collectives


@dataclass(frozen=True)
class _Rendezvous:
    """The shared memory or the store that rank 0 opens, and the name under which the other ranks find it."""

    name: str
    means: Any


def _open_rendezvous(spec: RankSpec, channel: Channel) -> _Rendezvous:
    if spec.collectives == "shared_memory":
        descriptor = create_memory(spec.world_size)
        return _Rendezvous(f"/proc/{os.getpid()}/fd/{descriptor}", descriptor)
    host = channel.connection.getsockname()[0]  # under which others on this network reach the machine
    store = TCPStore(host, 0, spec.world_size, is_master=True, wait_for_workers=False)
    return _Rendezvous(f"{host}:{store.port}", store)


def _join(spec: RankSpec, rendezvous: _Rendezvous | None, name: str) -> Shard:
    if spec.world_size == 1:
        return SingleRank()
    if spec.collectives == "shared_memory":
        descriptor = rendezvous.means if rendezvous else os.open(name, os.O_RDWR)
        return SharedMemoryShard(spec.rank, spec.world_size, descriptor, COLLECTIVE_TIMEOUT)
    host, port = name.rsplit(":", 1)
    store = rendezvous.means if rendezvous else TCPStore(host, int(port), spec.world_size, is_master=False)
    on_one_node = spec.neighbours == spec.world_size
    arguments = (spec.rank, spec.world_size, spec.collectives, store, COLLECTIVE_TIMEOUT)
    return ProcessGroupShard(*arguments, on_one_node=on_one_node)
