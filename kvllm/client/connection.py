"""The connection of a command to a server, for one answer at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import httpx2

from kvllm.client.address import headers, root_of
from kvllm.client.events import DONE, Chunk, EventReader, decode_chunk, describe_error, first_model, problem_of
from kvllm.errors import ConfigError, ServerError

CONNECT_SECONDS = 10


class Connection:
    """Requests to one server. Raises ServerError when it cannot be reached, refuses a request or breaks off."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.root = root_of(url)
        timeout = httpx2.Timeout(CONNECT_SECONDS, read=None)  # an answer may wait in the server's queue
        self._client = httpx2.Client(base_url=self.root, headers=headers(api_key), timeout=timeout)

    def get(self, path: str) -> bytes:
        with self._reporting_failures():
            response = self._client.get(path, timeout=CONNECT_SECONDS)
            _check(response)
            return response.content

    def answers(self) -> bool:
        """Whether a server listens there, whatever it says."""
        try:
            self._client.get("/health", timeout=CONNECT_SECONDS)
        except httpx2.TransportError:
            return False
        return True

    def first_model(self) -> str:
        """The name of the first model that the server lists."""
        return first_model(self.root, self.get("/v1/models")).id

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[Chunk]:
        """The chunks of a streamed answer. Closing the iterator ends the request. Raises ConfigError for a body with
        text that is no UTF-8, or with a number that JSON lacks."""
        try:
            request = self._client.build_request("POST", path, json=body | {"stream": True})
        except ValueError as error:
            raise ConfigError(f"the request cannot be written as JSON in UTF-8: {error}") from None
        reader = EventReader()
        with self._reporting_failures(), closing(self._client.send(request, stream=True)) as response:
            _check(response)
            for data in response.iter_bytes():
                for event in reader.feed(data):
                    if event == DONE:
                        return
                    chunk = decode_chunk(event)
                    if chunk.error:
                        raise ServerError(describe_error(chunk.error).message)
                    yield chunk
        raise ServerError(f"{self.root} ended the answer before it was complete")

    @contextmanager
    def _reporting_failures(self) -> Iterator[None]:
        try:
            yield
        except httpx2.TransportError as error:
            raise ServerError(f"{self.root} cannot be reached: {error}; kvllm serve starts a server") from None


def _check(response: httpx2.Response) -> None:
    if response.is_success:
        return
    message = problem_of(response.read()).message
    raise ServerError(f"{response.request.url.path} was refused with {response.status_code}: {message}")
