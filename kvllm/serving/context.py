"""One HTTP request on its way through the server: its id, its key, and what it asks for."""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request

from kvllm.lora.request import Adapter
from kvllm.serving.bodies import read_json
from kvllm.serving.errors import ApiError
from kvllm.serving.state import ServerState

MAX_ID_LENGTH = 64
T = TypeVar("T")
UNSAFE = re.compile(r"[^A-Za-z0-9._:-]")


class Counts(Protocol):
    """What the log tells of a request's generation. first_token_seconds: None before there is one."""

    first_token_seconds: float | None

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def output_tokens(self) -> int: ...


@dataclass(slots=True)
class RequestContext:
    """What is known of a request. tenant: the name of its key, "" without keys. generation: once there is one.
    pooled_tokens: of the prompts that a pooling model computes for it. adapter: the one that it names as its model."""

    state: ServerState
    request_id: str
    tenant: str = ""
    generation: Counts | None = None
    pooled_tokens: int | None = None
    adapter: Adapter | None = None

    def head(self, prefix: str, body: Any) -> dict[str, Any]:
        """The fields that an answer, and each chunk of a stream, begins with."""
        model = body.model or self.state.model_name
        return {"id": f"{prefix}-{self.request_id}", "created": int(time.time()), "model": model}


def context_of(request: Request) -> RequestContext:
    return request.scope["kvllm"]


async def read_request(request: Request, decoder: msgspec.json.Decoder[T]) -> tuple[RequestContext, T]:
    """The request and its body, which may give an id, and names a model that is served here. Raises ApiError."""
    context = context_of(request)
    body: Any = await read_json(request, decoder, context.state.pool, context.state.bodies)
    if getattr(body, "request_id", None):
        context.request_id = clean_request_id(body.request_id)
    check_model(context.state, body.model)
    context.adapter = context.state.adapters.get(body.model)
    return context, body


def clean_request_id(given: str) -> str:
    """The id that a client gave, cut and without what is unsafe in logs and headers; a new one if nothing is left."""
    return UNSAFE.sub("", given)[:MAX_ID_LENGTH] or uuid.uuid4().hex


def check_model(state: ServerState, name: str | None) -> None:
    """Raises ApiError with status 404 for a model that is not served here."""
    if name is not None and name not in state.model_names:
        known = ", ".join(state.model_names)
        raise ApiError(404, f"The model `{name[:200]}` does not exist: this server has {known}.", param="model")
