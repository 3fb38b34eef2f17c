"""Work that runs beside the steps, in order: on a thread, or on a stream of a GPU."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import torch

Job = Callable[[], None]


class Ticket(ABC):
    """A job that was submitted."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it has ended. Does not wait."""

    @abstractmethod
    def wait(self) -> None:
        """Return when it has ended."""

    @abstractmethod
    def precede(self) -> None:
        """Let what is launched from now on begin after its end. Where a device computes, nobody waits here."""

    @abstractmethod
    def cancel(self) -> None:
        """Return when it has ended, or will never begin."""

    @abstractmethod
    def seconds(self) -> float:
        """How long it ran; 0 if it never began. Waits for its end. Raises what it raised."""


class TransferQueue(ABC):
    """Runs jobs one after the other, each after what was launched on the device before it was submitted."""

    @abstractmethod
    def submit(self, job: Job) -> Ticket: ...


def make_queue(device: torch.device) -> TransferQueue:
    return StreamQueue(device) if device.type == "cuda" else ThreadQueue()


class ThreadTicket(Ticket):
    def __init__(self, future: Future[float]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        futures.wait([self._future])

    def precede(self) -> None:
        self.wait()

    def cancel(self) -> None:
        if not self._future.cancel():
            self.wait()

    def seconds(self) -> float:
        try:
            return self._future.result()
        except CancelledError:
            return 0.0


class ThreadQueue(TransferQueue):
    """A thread of its own, for a cache in host memory."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kv-transfer")

    def submit(self, job: Job) -> Ticket:
        return ThreadTicket(self._executor.submit(_timed, job))


@torch.inference_mode()
def _timed(job: Job) -> float:
    begin = time.perf_counter()
    job()
    return time.perf_counter() - begin


class StreamTicket(Ticket):
    def __init__(self, begin: torch.cuda.Event, end: torch.cuda.Event, error: Exception | None) -> None:
        self._begin, self._end = begin, end
        self._error = error

    def done(self) -> bool:
        return self._end.query()

    def wait(self) -> None:
        self._end.synchronize()

    def precede(self) -> None:
        self._end.wait()

    def cancel(self) -> None:
        self.wait()

    def seconds(self) -> float:
        self.wait()
        if self._error:
            raise self._error
        return self._begin.elapsed_time(self._end) / 1000


class StreamQueue(TransferQueue):
    """A stream of its own. A job launches its work and returns."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def submit(self, job: Job) -> Ticket:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        failure = None
        with torch.cuda.stream(self._stream):
            begin.record()
            try:
                job()
            except Exception as error:  # as on a thread, those who ask for the outcome get it
                failure = error
            end.record()
        return StreamTicket(begin, end, failure)
