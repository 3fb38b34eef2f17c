"""Answers of a server: its models, server-sent events, their chunks, and errors. Needs no HTTP library."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from kvllm.errors import ServerError

DONE = b"[DONE]"


class EventReader:
    """The data of server-sent events, read from bytes that are cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that are complete now. Comments are left out."""
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        return [field for event in events if (field := _data(event))]


def _data(event: bytes) -> bytes:
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


class Delta(Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @property
    def thought(self) -> str:
        """The reasoning, under either of the names that servers use."""
        return self.reasoning or self.reasoning_content or ""


class Choice(Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def has_token(self) -> bool:
        """Whether a token came with it. Some tokens have no text; a chat's first chunk may name the role alone, and its
        last one the reason to finish alone."""
        if self.delta is None:
            return bool(self.text) or self.finish_reason is None
        if self.delta.content or self.delta.thought:
            return True
        return self.delta.role is None and self.finish_reason is None


class Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Chunk(Struct):
    """A part of a streamed answer. error: what ended it."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(Chunk).decode


def decode_chunk(data: bytes) -> Chunk:
    """Raises ServerError for what is no chunk."""
    try:
        return _decode_chunk(data)
    except msgspec.DecodeError as error:
        raise ServerError(f"the server sent what is no chunk of an answer: {error}") from None


class ServedModel(Struct):
    """max_model_len: the most tokens of a request; None where the server does not say."""

    id: str
    max_model_len: int | None = None


class ModelList(Struct):
    data: list[ServedModel]


def first_model(root: str, body: bytes) -> ServedModel:
    """The first model of what `root` says under /v1/models. Raises ServerError where there is none."""
    try:
        models = msgspec.json.decode(body, type=ModelList).data
    except msgspec.DecodeError as error:
        raise ServerError(f"{root}/v1/models has no list of models: is another server there? ({error})") from None
    if not models:
        raise ServerError(f"{root} serves no model")
    return models[0]


class Problem(Struct):
    """An error of a server: its type, or else its code, and its message."""

    kind: str
    message: str


def problem_of(body: bytes) -> Problem:
    """Read the body of an error, of OpenAI's shape or any other."""
    try:
        content = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return Problem("", body.decode(errors="replace").strip()[:500])
    return describe_error(content.get("error", content) if isinstance(content, dict) else content)


def describe_error(error: Any) -> Problem:
    if not isinstance(error, dict):
        return Problem("", str(error))
    kind = error.get("type") or error.get("code") or ""
    return Problem(str(kind), str(error.get("message") or error.get("detail") or error))
