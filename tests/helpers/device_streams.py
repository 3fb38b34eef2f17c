"""Streams and events of a device: which of its operations come before which, and what memory they use.

An operation comes after those before it on its stream, after what an event brought there, and after what its thread of
the host had waited for when it was launched. A job for another thread comes after what was waited for before it was
submitted, and who has seen its end comes after that.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from tests.helpers.device_memory import INDEXED, UNIT, Clock, Storage, Units, indexed_units, new_clock, units_of


class Stream:
    """owner: set where this takes the place of torch's. clock: of its last operation."""

    owner: Streams
    device = torch.device("cuda", 0)

    def __init__(self, device: torch.device | None = None) -> None:
        self.clock = new_clock()
        self.number = len(self.owner.all)
        self.owner.all.append(self)

    def join(self, clock: Clock) -> None:
        """What comes now comes after a time."""
        np.maximum(self.clock, clock, out=self.clock)

    def wait_stream(self, other: Stream) -> None:
        self.join(other.clock)


class Event:
    """owner: set where this takes the place of torch's."""

    owner: Streams

    def __init__(self, enable_timing: bool = False) -> None:
        self.clock = new_clock()

    def record(self) -> None:
        self.clock = self.owner.current.clock.copy()

    def wait(self) -> None:
        self.owner.current.join(self.clock)

    def synchronize(self) -> None:
        self.owner.join_host(self.clock)

    def query(self) -> bool:
        self.synchronize()
        return True

    def elapsed_time(self, later: Event) -> float:
        return 1.0


class Streams:
    """Those of a device.

    on_host: called when a thread of the host has waited. all: streams by their numbers, the default one first.
    host: what any thread has waited for.
    live_bytes: of the tensors that there are. peak_bytes: the most that there were since it was set.
    races: accesses that nothing orders.
    """

    def __init__(self, on_host: Callable[[], None]) -> None:
        self.stream_type = type("Stream", (Stream,), {"owner": self})
        self.event_type = type("Event", (Event,), {"owner": self})
        self.all: list[Stream] = []
        self.host = new_clock()
        self.live_bytes = self.peak_bytes = 0
        self.races: list[str] = []
        self._on_host = on_host
        self._default = self.stream_type()
        self._threads = threading.local()
        self._storages: WeakValueDictionary[int, Storage] = WeakValueDictionary()
        self._launched: list[tuple[int, Storage]] = []

    @property
    def current(self) -> Stream:
        return getattr(self._threads, "stream", self._default)

    @contextmanager
    def use(self, stream: Stream | None) -> Iterator[None]:
        before, self._threads.stream = self.current, stream or self.current
        try:
            yield
        finally:
            self._threads.stream = before

    @property
    def thread(self) -> Clock:
        """What this thread has waited for."""
        if not hasattr(self._threads, "clock"):
            self._threads.clock = new_clock()
        return self._threads.clock

    def join_host(self, clock: Clock) -> None:
        """This thread has waited for a time."""
        np.maximum(self.thread, clock, out=self.thread)
        np.maximum(self.host, clock, out=self.host)
        self._on_host()

    @contextmanager
    def following_threads(self) -> Iterator[None]:
        """As long as this lasts, futures take along what was waited for."""
        ends: WeakKeyDictionary[Future, list[Clock]] = WeakKeyDictionary()
        submit, result, done, wait = ThreadPoolExecutor.submit, Future.result, Future.done, concurrent.futures.wait

        def seen(future: Future) -> None:
            for clock in ends.get(future, ()):
                self.join_host(clock)

        def following_submit(executor: ThreadPoolExecutor, job: Callable[..., Any], *args: Any) -> Future:
            begin, end = self.thread.copy(), list[Clock]()

            def run() -> Any:
                self.join_host(begin)
                try:
                    return job(*args)
                finally:
                    end.append(self.thread.copy())

            future = submit(executor, run)
            ends[future] = end
            return future

        def following(watch: Callable[..., Any]) -> Callable[..., Any]:
            def watched(future: Future, *args: Any, **kwargs: Any) -> Any:
                try:
                    return watch(future, *args, **kwargs)
                finally:
                    seen(future)

            return watched

        def following_wait(futures: Any, *args: Any) -> Any:
            found = wait(futures, *args)
            for future in found.done:
                seen(future)
            return found

        with ExitStack() as stack:
            stack.enter_context(patch.object(ThreadPoolExecutor, "submit", following_submit))
            stack.enter_context(patch.object(Future, "result", following(result)))
            stack.enter_context(patch.object(Future, "done", following(done)))
            stack.enter_context(patch.object(concurrent.futures, "wait", following_wait))
            yield

    # Memory

    def memory(self, tensor: torch.Tensor, *, is_written: bool) -> Storage | None:
        """That of a result. is_written: by the last operation, if it is new."""
        storage = tensor.untyped_storage()
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if not num_bytes:
            return None
        known = self._storages.get(address)
        if known is None:
            known = self._storages[address] = Storage(num_bytes, self.current.number, self._freed)
            self.live_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            if is_written:
                known.access(lambda: slice(None), self.current.number, self.current.clock, writes=True)
        return known

    def host_memory(self, tensor: torch.Tensor) -> Storage:
        """Pinned memory."""
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = known = Storage(storage.nbytes(), 0, lambda _: None)
        return known

    def _freed(self, storage: Storage) -> None:
        self.live_bytes -= storage.num_bytes
        if problem := storage.unordered(np.maximum(self.all[storage.stream].clock, self.thread)):
            self.races.append(f"memory of stream {storage.stream} is given back while it is {problem}")

    # Operations

    def note(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """One of torch's begins on the current stream."""
        if any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns):
            return  # a view
        self._begin()
        for number, argument in enumerate(func._schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            writes = bool(argument.alias_info and argument.alias_info.is_write)
            for tensor in tree_leaves(value):
                if isinstance(tensor, torch.Tensor):
                    indexed = number == 0 and func in INDEXED
                    self._access(func, tensor, args if indexed else None, writes=writes)

    @contextmanager
    def running(self, kernel: Any, tensors: list[torch.Tensor]) -> Iterator[None]:
        """A kernel runs on the current stream. All memory that no other stream has used yet is taken to be written."""
        self._begin()
        addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        found = [(each, storage) for each in addresses if (storage := self._storages.get(each)) is not None]
        for _, storage in found:
            if not storage.is_shared:
                self._check(kernel, storage, lambda: slice(None), writes=True)
        self._launched = [(address, storage) for address, storage in found if storage.is_shared]
        try:
            yield
        finally:
            self._launched = []

    def note_pointers(self, pointers: np.ndarray, mask: np.ndarray, *, writes: bool) -> None:
        """The running kernel reads or writes through some pointers."""
        for address, storage in self._launched:
            places = pointers[np.broadcast_to(mask, pointers.shape)].astype(np.int64) - address
            places = places[(places >= 0) & (places < storage.num_bytes)] // UNIT
            self._check("a kernel", storage, lambda places=places: places, writes=writes)

    def _begin(self) -> None:
        self.current.join(self.thread)
        self.current.clock[self.current.number] += 1

    def _access(self, func: Any, tensor: torch.Tensor, indexed: Any, *, writes: bool) -> None:
        """indexed: the arguments of an operation on some elements of the tensor."""
        storage = self._storages.get(tensor.untyped_storage().data_ptr())
        if storage is not None:
            units = lambda: indexed_units(func, indexed) if indexed else units_of(tensor)  # noqa: E731
            self._check(func, storage, units, writes=writes)

    def _check(self, what: Any, storage: Storage, units: Callable[[], Units], *, writes: bool) -> None:
        if problem := storage.access(units, self.current.number, self.current.clock, writes=writes):
            verb = "writes" if writes else "reads"
            self.races.append(f"{what} {verb}, on stream {self.current.number}, {problem}, and nothing orders them")
