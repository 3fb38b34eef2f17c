"""Keeping the stream of a request, and the routes that read it again or end it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from kvllm.serving.context import context_of
from kvllm.serving.errors import bad_request
from kvllm.serving.kept_answers import HEADER, KeptAnswer
from kvllm.serving.sse import EventStream


def kept(request: Request, answer: Response | EventStream) -> Response | EventStream:
    """The answer to a request; if that asks to keep its stream, a reader of it. Raises ApiError."""
    name = request.headers.get(HEADER)
    if name is None or isinstance(answer, Response):
        return answer
    if not (name.isascii() and name.replace("-", "").isalnum() and len(name) <= 64):
        raise bad_request(f"{HEADER} is not allowed: letters, digits and hyphens, 64 at most", HEADER)
    context = context_of(request)
    return context.state.kept_answers.start(context.tenant, name, lambda: KeptAnswer(answer)).reader(0)


async def read(request: Request) -> EventStream:
    """An answer from the event after number `after` on."""
    after = request.query_params.get("after", "0")
    if not (after.isdecimal() and len(after) <= 9):
        raise bad_request(f"after={after[:100]!r} is not allowed: the number of an event", "after")
    return _named(request).reader(int(after))


async def cancel(request: Request) -> Response:
    """End an answer; one that has ended stays as it is."""
    _named(request).cancel()
    return Response(status_code=204)


def _named(request: Request) -> KeptAnswer:
    context = context_of(request)
    return context.state.kept_answers.get(context.tenant, request.path_params["id"])
