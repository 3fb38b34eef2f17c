"""One rank of a pool: a process that Ray starts, and that executes plans from a connection until it ends."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
import torch.distributed
from msgspec import Struct

from kvllm.attention.backends import make_backend
from kvllm.attention.cache import CacheShape, PagedKVCache
from kvllm.config import EngineConfig
from kvllm.core.protocol import decode_plan, encode
from kvllm.model_config import ModelConfig
from kvllm.models.loader import load_model, random_model
from kvllm.parallel import ProcessGroupShard, Shard, SingleRank, kv_heads
from kvllm.worker.channel import Channel
from kvllm.worker.model_runner import ModelRunner
from kvllm.worker.sharded_method import ShardedMethod
from kvllm.worker.shared_memory import SharedMemoryShard, create_memory

COLLECTIVE_TIMEOUT = 120.0
HEARTBEAT_SECONDS = 1.0
HEARTBEAT = -1
"""In place of a step's number: the rank is at work."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class RunnerSettings(Struct, frozen=True):
    """All that a rank needs to know to load its shard. load_format: see `kvllm.llm.LLM`."""

    path: str
    model: ModelConfig
    engine: EngineConfig
    dtype: str
    attention_backend: str
    load_format: str


class Place(Struct, frozen=True):
    """A rank's place in a pool, and how it reaches the engine's process, which asks for the `secret`.

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


class Hello(Struct, frozen=True):
    """What a rank says of itself. meeting_point: of rank 0, where the others find the means of the collectives."""

    rank: int
    pid: int
    available_memory: int
    meeting_point: str = ""


class Start(Struct, frozen=True):
    meeting_point: str
    settings: RunnerSettings


def make_runner(settings: RunnerSettings, shard: Shard, device: torch.device) -> ModelRunner:
    """Load a rank's shard of the model and allocate its part of the KV pool.

    Raises ConfigError and CheckpointError as `load_model` and `make_backend` do.
    """
    model_config, engine, dtype = settings.model, settings.engine, DTYPES[settings.dtype]
    held = kv_heads(model_config.num_kv_heads, shard)
    shape = CacheShape(model_config.num_layers, held.count, model_config.head_dim, engine.block_size, dtype)
    cache = PagedKVCache(shape, engine.num_blocks, device)
    num_query_heads = model_config.num_query_heads // shard.world_size
    # Made before the weights are read: a wrong name must not cost a minute.
    backend = make_backend(settings.attention_backend, cache, num_query_heads, shape.head_dim**-0.5)
    arguments = (model_config, shard, dtype, device, engine.max_model_len)
    if settings.load_format == "dummy":
        model = random_model(*arguments, seed=engine.seed)
    else:
        model = load_model(Path(settings.path), *arguments)
    runner = ModelRunner(model, cache, backend, engine, model_config.eos_token_ids)
    if runner.compressor and engine.compression and shard.world_size > 1:
        runner.compressor.select = ShardedMethod(engine.compression.method, held, shard)
    return runner


class Rank:
    """The Ray actor. Its only call lasts as long as the rank, so that its end, and its traceback, are that call's."""

    def run(self, encoded_place: bytes) -> None:
        place = msgspec.msgpack.decode(encoded_place, type=Place)
        torch.set_num_threads(place.num_threads)
        channel = Channel(socket.create_connection(place.address))
        channel.connection.sendall(place.secret)
        meeting = _open_meeting_point(place, channel) if place.rank == 0 and place.world_size > 1 else None
        hello = Hello(place.rank, os.getpid(), _available_memory(place), meeting.name if meeting else "")
        channel.send(0, msgspec.msgpack.encode(hello))
        try:
            _serve(channel, place, meeting)
        except (EOFError, ConnectionError):
            return  # the engine's process is gone, or wants this pool no more


def _serve(channel: Channel, place: Place, meeting: _MeetingPoint | None) -> None:
    start = msgspec.msgpack.decode(channel.receive()[1], type=Start)
    runner = make_runner(start.settings, _join(place, meeting, start.meeting_point), torch.device(place.device))
    channel.send(0)
    with _heartbeat(channel) as busy:
        while True:
            number, plan = channel.receive()
            busy.set()
            result = runner.execute(decode_plan(plan))
            busy.clear()
            channel.send(number, encode(result) if place.rank == 0 else b"")


def _available_memory(place: Place) -> int:
    """Bytes on the rank's device, shared out among the ranks that use it."""
    if place.device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return psutil.virtual_memory().available // place.neighbours


@contextmanager
def _heartbeat(channel: Channel) -> Iterator[threading.Event]:
    """Says every second that this process is alive, but only while the event is set: nobody listens between steps."""
    busy, ended = threading.Event(), threading.Event()

    def beat() -> None:
        while not ended.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):  # the main thread will notice
                if busy.is_set():
                    channel.send(HEARTBEAT)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield busy
    finally:
        ended.set()
        thread.join()


# Collectives


@dataclass(frozen=True)
class _MeetingPoint:
    """What rank 0 opens, shared memory or a store, and the name under which the other ranks find it."""

    name: str
    means: Any


def _open_meeting_point(place: Place, channel: Channel) -> _MeetingPoint:
    if place.collectives == "shared_memory":
        descriptor = create_memory(place.world_size)
        return _MeetingPoint(f"/proc/{os.getpid()}/fd/{descriptor}", descriptor)
    host = channel.connection.getsockname()[0]  # under which others on this network reach the machine
    store = torch.distributed.TCPStore(host, 0, place.world_size, is_master=True, wait_for_workers=False)
    return _MeetingPoint(f"{host}:{store.port}", store)


def _join(place: Place, meeting: _MeetingPoint | None, name: str) -> Shard:
    if place.world_size == 1:
        return SingleRank()
    if place.collectives == "shared_memory":
        descriptor = meeting.means if meeting else os.open(name, os.O_RDWR)
        return SharedMemoryShard(place.rank, place.world_size, descriptor, COLLECTIVE_TIMEOUT)
    host, port = name.rsplit(":", 1)
    store = meeting.means if meeting else torch.distributed.TCPStore(host, int(port), place.world_size, is_master=False)
    return ProcessGroupShard(place.rank, place.world_size, place.collectives, store, COLLECTIVE_TIMEOUT)
