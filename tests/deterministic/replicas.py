"""Replicas in the event loop in place of Ray's actors: they are sent messages, answer late, and die."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvllm.config import EngineConfig
from kvllm.core.engine import LLMEngine
from kvllm.core.protocol import SequenceStart
from kvllm.distributed.replicas.messages import Report
from kvllm.distributed.replicas.replica import Reporter
from kvllm.stats import EngineStats

encode = msgspec.msgpack.encode
decode_starts = msgspec.msgpack.Decoder(list[SequenceStart]).decode
decode_report = msgspec.msgpack.Decoder(Report).decode


class SimulatedReplica:
    """An engine behind a queue of messages, which it reads one after the other.

    answer: the encoded report that nobody has fetched yet. is_lost: whether its next caller finds it dead.
    """

    def __init__(self, engine: LLMEngine, rng: random.Random) -> None:
        self.reporter = Reporter(engine, Path())
        self.pending = False
        self.loaded = True
        self.answer: bytes | None = None
        self.is_lost = False
        self._engine = engine
        self._events = asyncio.get_running_loop()
        self._rng = rng
        self._messages: deque[tuple[str, bytes]] = deque()
        self._is_reading = False

    def send(self, kind: str, message: bytes) -> None:
        self._messages.append((kind, message))
        if not self._is_reading:
            self._read_later()

    def kill(self) -> None:
        self.is_lost = True
        self.reporter._loop.stop()

    def _read_later(self) -> None:
        self._is_reading = True
        self._events.call_later(self._rng.choice((0.0, 0.001, 0.02)), self._read)

    def _read(self) -> None:
        if self.is_lost:
            return
        kind, message = self._messages.popleft()
        if kind == "exchange":
            self.reporter.start(decode_starts(message))
            self._events.call_later(self._rng.random() * 0.05, self._report)
            return
        if kind == "drop":
            self.reporter.drop(msgspec.msgpack.decode(message, type=list[int]))
        else:
            self.reporter.reset_prefix_cache()
        self._go_on()

    def _report(self) -> None:
        if self.is_lost:
            return
        try:
            self.answer = encode(self.reporter.report(0.0))
        except Exception:
            self.is_lost = True
            return
        self._go_on()

    def _go_on(self) -> None:
        if self._messages:
            self._read_later()
        else:
            self._is_reading = False


class SimulatedReplicas:
    """What a ReplicaSet is to a DataParallelEngine. make_engine: of one replica. before_receiving: may raise."""

    def __init__(
        self,
        config: EngineConfig,
        count: int,
        rng: random.Random,
        make_engine: Callable[[], LLMEngine],
        before_receiving: Callable[[], None],
    ) -> None:
        self.num_blocks = [config.num_blocks] * count
        self._rng = rng
        self._make_engine = make_engine
        self._before_receiving = before_receiving
        self.replicas = [SimulatedReplica(make_engine(), rng) for _ in range(count)]

    def free(self) -> list[int]:
        return [index for index, replica in enumerate(self.replicas) if not replica.pending]

    def send(self, index: int, starts: list[SequenceStart]) -> None:
        self.replicas[index].pending = True
        self.replicas[index].send("exchange", encode(starts))

    def drop(self, index: int, seq_ids: list[int]) -> None:
        if self.replicas[index].loaded:
            self.replicas[index].send("drop", encode(seq_ids))

    def reset_prefix_cache(self) -> None:
        for replica in self.replicas:
            if replica.loaded:
                replica.send("reset", b"")

    def receive(self) -> list[tuple[int, Report | None]]:
        self._before_receiving()
        found: list[tuple[int, Report | None]] = []
        for index, replica in enumerate(self.replicas):
            if replica.pending and replica.is_lost:
                self._replace(index)
                found.append((index, None))
            elif replica.pending and replica.answer is not None:
                found.append((index, decode_report(replica.answer)))
                replica.pending, replica.loaded, replica.answer = False, True, None
        return found

    def close(self) -> None:
        """Nothing to release."""

    def _replace(self, index: int) -> None:
        """Another one, which answers once it has loaded the model."""
        replica = self.replicas[index] = SimulatedReplica(self._make_engine(), self._rng)
        replica.pending, replica.loaded = True, False
        loaded = encode(Report([], EngineStats(0), self.num_blocks[index]))
        asyncio.get_running_loop().call_later(self._rng.random(), setattr, replica, "answer", loaded)
