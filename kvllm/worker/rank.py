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
import torch
import torch.distributed
from msgspec import Struct

from kvllm import host_memory
from kvllm.attention.backend import AttentionBackend
from kvllm.attention.backends import make_backend
from kvllm.attention.cache import CacheShape, PagedKVCache
from kvllm.config import RAGGED_METHODS, EngineConfig
from kvllm.core.protocol import decode_plan, encode
from kvllm.model_config import ModelConfig
from kvllm.models.llama import LlamaModel
from kvllm.models.loader import load_model, random_model
from kvllm.parallel import Counted, ProcessGroupShard, Shard, SingleRank, kv_heads
from kvllm.worker.channel import Channel
from kvllm.worker.graphs import cuda_capture
from kvllm.worker.memory import enough_memory, fitting_blocks, run_heaviest_steps
from kvllm.worker.model_runner import ModelRunner
from kvllm.worker.sharded_method import ShardedMethod
from kvllm.worker.shared_memory import SharedMemoryShard, create_memory

COLLECTIVE_TIMEOUT = 3600.0
"""As long as loading may take: the first collective waits for the slowest disk. In a step, the engine's process notices
sooner who keeps the others waiting."""
HEARTBEAT_SECONDS = 1.0
HEARTBEAT = -1
"""In place of a step's number: the rank is at work. The message changes as long as it advances."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


class RunnerSettings(Struct, frozen=True):
    """All that a rank needs to know to load its shard. load_format, enforce_eager: see `kvllm.llm.LLM`.

    gpu_memory_utilization: if set, `engine.num_blocks` is the most that is of use, and the pool gets as many as fit.
    """

    path: str
    model: ModelConfig
    engine: EngineConfig
    dtype: str
    attention_backend: str
    load_format: str
    enforce_eager: bool = False
    gpu_memory_utilization: float | None = None


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
    """Load a rank's shard of the model, and allocate its part of the KV pool. All ranks do it together.

    Raises ConfigError and CheckpointError as `load_model` and `make_backend` do, and ConfigError if a GPU's memory is
    too small.
    """
    engine, num_blocks, utilization = settings.engine, settings.engine.num_blocks, settings.gpu_memory_utilization
    with_graphs = device.type == "cuda" and not settings.enforce_eager
    small = _backend(settings, shard, device, 1)  # before the weights are read: a wrong name must not cost a minute
    with enough_memory("the model", "take a smaller one"):
        model = _load(settings, shard, device)
    if utilization is not None:
        fitting = fitting_blocks(_runner(settings, shard, model, small), engine, utilization, with_graphs)
        num_blocks = min(num_blocks, _least(fitting, shard, device))
    with enough_memory(f"a KV pool of {num_blocks} blocks", "give it less"):
        runner = _runner(settings, shard, model, _backend(settings, shard, device, num_blocks))
    if device.type == "cuda" and utilization is None:
        run_heaviest_steps(runner, engine)  # no request shall wait until kernels are compiled
    if with_graphs:
        with enough_memory("what CUDA graphs need", "set enforce_eager=True, give the KV pool less"):
            runner.use_graphs(cuda_capture(), num_blocks)
    return runner


def _backend(settings: RunnerSettings, shard: Shard, device: torch.device, num_blocks: int) -> AttentionBackend:
    """The attention backend of a rank, over a cache of its own."""
    model = settings.model
    held = kv_heads(model.num_kv_heads, shard)
    shape = CacheShape(model.num_layers, held.count, model.head_dim, settings.engine.block_size, DTYPES[settings.dtype])
    compression = settings.engine.compression
    return make_backend(
        settings.attention_backend,
        PagedKVCache(shape, num_blocks, device),
        model.num_query_heads // shard.world_size,
        shape.head_dim**-0.5,
        ragged=compression is not None and compression.method in RAGGED_METHODS,
        observed=settings.engine.observes_attention,
    )


def _runner(settings: RunnerSettings, shard: Shard, model: LlamaModel, backend: AttentionBackend) -> ModelRunner:
    engine, select = settings.engine, None
    if engine.compression and shard.world_size > 1:
        held = kv_heads(settings.model.num_kv_heads, shard)
        select = ShardedMethod(engine.compression.method, held, shard)
    return ModelRunner(
        model, backend.cache, backend, engine, settings.model.eos_token_ids, select, samples=shard.rank == 0
    )


def _load(settings: RunnerSettings, shard: Shard, device: torch.device) -> LlamaModel:
    arguments = (settings.model, shard, DTYPES[settings.dtype], device, settings.engine.max_model_len)
    if settings.load_format == "dummy":
        return random_model(*arguments, seed=settings.engine.seed)
    return load_model(Path(settings.path), *arguments)


def _least(number: int, shard: Shard, device: torch.device) -> int:
    """The least of all ranks' numbers."""
    return int(shard.all_gather_last_dim(torch.tensor([[number]], device=device)).min())


class Rank:
    """The Ray actor. Its only call lasts as long as the rank, so that its end, and its traceback, are that call's."""

    def run(self, encoded_place: bytes) -> None:
        place = msgspec.msgpack.decode(encoded_place, type=Place)
        torch.set_num_threads(place.num_threads)
        channel = Channel(socket.create_connection(place.address))
        channel.connection.sendall(place.secret)
        meeting = _open_meeting_point(place, channel) if place.rank == 0 and place.world_size > 1 else None
        memory = available_memory(place.device, place.neighbours)
        hello = Hello(place.rank, os.getpid(), memory, meeting.name if meeting else "")
        channel.send(0, msgspec.msgpack.encode(hello))
        try:
            _serve(channel, place, meeting)
        except (EOFError, ConnectionError):
            return  # the engine's process is gone, or wants this pool no more


def _serve(channel: Channel, place: Place, meeting: _MeetingPoint | None) -> None:
    start = msgspec.msgpack.decode(channel.receive()[1], type=Start)
    shard = Counted(_join(place, meeting, start.meeting_point))
    runner = make_runner(start.settings, shard, torch.device(place.device))
    channel.send(0, str(runner.cache.num_blocks).encode())
    with _heartbeat(channel, shard) as busy:
        while True:
            number, plan = channel.receive()
            busy.set()
            result = runner.execute(decode_plan(plan))
            busy.clear()
            channel.send(number, encode(result) if place.rank == 0 else b"")


def available_memory(device: str, neighbours: int) -> int:
    """Bytes on a rank's device; a machine's memory is shared out among the ranks that run there."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return host_memory.available_memory() // neighbours


@contextmanager
def _heartbeat(channel: Channel, shard: Counted) -> Iterator[threading.Event]:
    """Says every second that this process is alive, and how far it is in its work. Only while the event is set: nobody
    listens between steps."""
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
