"""Files of requests in OpenAI's batch format, and the answers to them.

Answers are appended as they come. So a run that was cut off goes on: what has an answer is left out, and a last line
that was cut is removed.
"""

from __future__ import annotations

import asyncio
import fcntl
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import httpx2
import msgspec
from msgspec import Struct

from kvllm.errors import ConfigError, ServerError

BEGINNING = b'{"id":"batch_req_'
"""Of every line of the output."""
ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/score", "/v1/rerank", "/score", "/rerank")


class BatchRequest(Struct):
    """A line of the input."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class BatchResponse(Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(Struct):
    code: str
    message: str


class BatchResult(Struct):
    """A line of the output. error: of a request that could not be sent; the server's own refusals are responses."""

    id: str
    custom_id: str
    response: BatchResponse | None
    error: BatchError | None

    @property
    def has_failed(self) -> bool:
        return self.response is None or self.response.status_code != 200


_decode_request = msgspec.json.Decoder(BatchRequest).decode
_decode_result = msgspec.json.Decoder(BatchResult).decode


def check_input(path: Path) -> list[str]:
    """The ids of all requests, in order.

    Raises ConfigError for a line that is no request, and for an id that is there twice: its answer could not be told.
    """
    ids: dict[str, int] = {}
    with _open(path) as file:
        for number, request in _requests(path, file):
            if request.custom_id in ids:
                first = ids[request.custom_id]
                raise ConfigError(f"{path}, lines {first} and {number} have the same custom_id {request.custom_id!r}")
            ids[request.custom_id] = number
    return list(ids)


def _requests(path: Path, file: BinaryIO) -> Iterator[tuple[int, BatchRequest]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            try:
                yield number, _decode_request(line)
            except msgspec.DecodeError as error:
                needed = "a JSON object with custom_id, method, url and body"
                raise ConfigError(f"{path}, line {number} must be {needed}: {error}") from None


def _open(path: Path) -> BinaryIO:
    """Raises ConfigError for what cannot be read, or not more than once."""
    if path.is_fifo():
        raise ConfigError(f"{path} is a pipe, and it is read more than once: give a file")
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


class BatchOutput:
    """The file of answers, of which this process is the only writer.

    failed: by custom_id, whether an answer is a failure.
    """

    def __init__(self, file: BinaryIO, failed: dict[str, bool]) -> None:
        self._file = file
        self.failed = failed

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[BatchOutput]:
        """Open a file of answers, new or of an earlier run, and mend its end.

        Raises ConfigError for a file that has other lines, that another process writes, or that cannot be written.
        """
        try:
            file = path.open("a+b", buffering=0)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(f"{path} is being written by another process: wait for it") from None
            yield cls(file, _read_results(path, file))

    def add(self, result: BatchResult) -> None:
        self._file.write(msgspec.json.encode(result) + b"\n")
        self.failed[result.custom_id] = result.has_failed


def _read_results(path: Path, file: BinaryIO) -> dict[str, bool]:
    """Which answers are there, and whether each is a failure. A last line without its end is removed."""
    failed, size = {}, 0
    with _open(path) as reader:
        for number, line in enumerate(reader, start=1):
            if not line.endswith(b"\n") and line[: len(BEGINNING)] == BEGINNING[: len(line)]:
                file.truncate(size)
                break
            size += len(line)
            try:
                result = _decode_result(line)
            except msgspec.DecodeError as error:
                raise ConfigError(
                    f"{path}, line {number} is no answer of a batch: {error}; take another file"
                ) from None
            failed[result.custom_id] = result.has_failed
    return failed


async def run_batch(
    client: httpx2.AsyncClient, path: Path, output: BatchOutput, max_concurrency: int, on_end: Callable[[], object]
) -> None:
    """Send the requests of a file that have no answer yet, at most `max_concurrency` at once.

    on_end: called after each.

    Raises ServerError if the server takes no requests any more. What is not answered then can be sent again.
    """
    with _open(path) as file:
        coming = (request for _, request in _requests(path, file) if request.custom_id not in output.failed)

        async def work() -> None:
            for request in coming:
                output.add(await answer(client, request))
                on_end()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(max_concurrency):
                    group.create_task(work())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None


async def answer(client: httpx2.AsyncClient, request: BatchRequest) -> BatchResult:
    result = BatchResult(f"batch_req_{uuid.uuid4().hex}", request.custom_id, None, None)
    refusal = _refusal(request)
    if refusal:
        result.error = BatchError("invalid_request", refusal)
        return result
    response = await client.post(request.url, json=request.body)
    if response.status_code == 503:
        raise ServerError("the engine has failed: see the log; the same command goes on where this run ended")
    request_id = response.headers.get("x-request-id", "")
    result.response = BatchResponse(response.status_code, request_id, msgspec.Raw(response.content))
    return result


def _refusal(request: BatchRequest) -> str | None:
    if request.method != "POST":
        return f"method {request.method!r} is not allowed: use POST"
    if request.url not in ROUTES:
        return f"url {request.url!r} is not allowed: use one of {', '.join(ROUTES)}"
    if request.body.get("stream"):
        return "a batch has no streams: leave out stream"
    return None
