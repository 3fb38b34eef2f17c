"""The ASGI application: routes, keys, request ids, one shape for all errors, one log line for each request."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvllm.pooling.engine import wrong_runner
from kvllm.serving import (
    adapters,
    chat,
    completions,
    information,
    kept_routes,
    live_routes,
    messages,
    pooling,
    responses,
    stored_responses,
)
from kvllm.serving.context import RequestContext, clean_request_id, context_of
from kvllm.serving.errors import ApiError, as_api_error
from kvllm.serving.live_feed import Refusal
from kvllm.serving.sse import ClientGone
from kvllm.serving.state import ServerState

logger = logging.getLogger(__name__)
Handler = Callable[[Request], Awaitable[Any]]
GENERATING: dict[str, Handler] = {
    "/v1/completions": completions.create,
    "/v1/chat/completions": chat.create,
    "/v1/responses": responses.create,
    "/v1/messages": messages.create,
}
POOLING: dict[str, Handler] = {
    "/v1/embeddings": pooling.embeddings,
    "/pooling": pooling.pooling,
    "/classify": pooling.classify,
    "/score": pooling.score,
    "/v1/score": pooling.score,
    "/rerank": pooling.rerank,
    "/v1/rerank": pooling.rerank,
    "/v2/rerank": pooling.rerank,
}
"""What servers of the two kinds of models do, and answer for each other with a refusal."""
EXPOSED = ("X-Request-Id", "Retry-After")
"""Headers of an answer that scripts of other origins may read."""
GONE = 499
"""Status in the log of a request whose client went away, as nginx has it."""


def make_app(state: ServerState) -> ASGIApp:
    """The application that serves an engine."""
    own, other = (POOLING, GENERATING) if state.pools else (GENERATING, POOLING)
    routes = [Route(path, handler, methods=["POST"]) for path, handler in own.items()]
    routes += [Route(path, _wrong_runner, methods=["POST"]) for path in other]
    routes += [
        Route("/v1/models", information.list_models),
        Route("/v1/models/{id:path}", information.get_model),
        Route("/tokenize", information.tokenize, methods=["POST"]),
        Route("/detokenize", information.detokenize, methods=["POST"]),
        Route("/health", information.health),
        Route("/ping", information.health, methods=["GET", "POST"]),
        Route("/version", information.version),
        Route("/metrics", information.metrics),
        Route("/load", information.load),
        Route("/openapi.json", information.openapi),
    ]
    if not state.pools:
        routes += _around_generation()
    if state.updates_adapters:
        routes.append(Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]))
        routes.append(Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]))
    if state.options.enable_tokenizer_info_endpoint:
        routes.append(Route("/tokenizer_info", information.tokenizer_info))
    # Without Starlette's own middleware, which would answer errors in a shape of its own.
    app = Middleware(Router(routes, redirect_slashes=False), state)
    # Outside of the gate: browsers ask for leave without a key, and read errors only with these headers.
    cors = state.options.cors
    return app if cors is None else CORSMiddleware(app, expose_headers=EXPOSED, **asdict(cors))


def _around_generation() -> list[Route]:
    return [
        _by_method("/v1/responses/{id}", GET=stored_responses.retrieve, DELETE=stored_responses.delete),
        Route("/v1/responses/{id}/input_items", stored_responses.input_items, methods=["GET"]),
        Route("/v1/responses/{id}/cancel", stored_responses.cancel, methods=["POST"]),
        Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
        Route("/live/events", live_routes.events),
        _by_method("/live/answers/{id}", GET=kept_routes.read, DELETE=kept_routes.cancel),
        _by_method("/live/requests/{id}", GET=live_routes.open_request, DELETE=live_routes.cancel_request),
        Route("/", live_routes.file),
        Route("/page/{name}", live_routes.file),
    ]


async def _wrong_runner(request: Request) -> Any:
    """Refuse what the model of this server does not do: as a route that is not there, but with the reason."""
    refusal = wrong_runner(get_route_path(request.scope), pooling=context_of(request).state.pools)
    raise ApiError(404, str(refusal))


def _by_method(path: str, **handlers: Handler) -> Route:
    """One route of several methods: of two with one path, the first would tell the methods of all."""

    async def handle(request: Request) -> Any:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, handle, methods=list(handlers))


class Middleware:
    """All that a request passes before and after its route. Only errors leave it as answers, no exceptions."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._state.options.root_path:
            scope["root_path"] = self._state.options.root_path
        path = get_route_path(scope)  # the router's own view: what needs no key is what it takes for such a route
        headers = dict(scope["headers"])
        request_id = clean_request_id(headers.get(b"x-request-id", b"").decode("latin-1"))
        context = RequestContext(self._state, request_id)
        scope["kvllm"] = context
        scope["app"] = self  # lets the router raise what it cannot route
        answer = Answer(send, context)
        begin = time.monotonic()
        computes = path in GENERATING or path in POOLING
        self._state.requests += computes
        try:
            context.tenant = self._state.options.keys.tenant(path, scope["headers"])
            await self._app(scope, receive, answer)
        except ClientGone:
            answer.status = GONE
        except Exception as error:
            await self._tell(error, answer, scope, receive, context)
        finally:
            self._state.requests -= computes
            _log(scope, context, answer.status, time.monotonic() - begin)

    async def _tell(
        self, error: Exception, answer: Answer, scope: Scope, receive: Receive, context: RequestContext
    ) -> None:
        if isinstance(error, HTTPException):
            where = f"{scope['method']} {scope['path'][:200]}"
            message = "there is no such route" if error.status_code == 404 else error.detail
            error = ApiError(error.status_code, f"{where}: {message}", headers=error.headers)
        known = as_api_error(error)
        path = get_route_path(scope)
        if path in GENERATING:
            refusal = Refusal(time.time(), context.tenant, path, known.status, known.kind)
            self._state.live.refused.appendleft(refusal)
        if answer.status is None:
            is_message = path.startswith(messages.PATH)
            body = messages.error_body(known) if is_message else known.body()
            response = Response(body, known.status, known.headers, "application/json")
            await response(scope, receive, answer)


class Answer:
    """Sends an answer with the request's id, and remembers its status."""

    def __init__(self, send: Send, context: RequestContext) -> None:
        self._send = send
        self._context = context
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            request_id = (b"x-request-id", self._context.request_id.encode())
            message = {**message, "headers": [*message.get("headers", ()), request_id]}
        await self._send(message)


def _log(scope: Scope, context: RequestContext, status: int | None, seconds: float) -> None:
    """A line of the log: never what was asked or answered. Those of probes are for debugging."""
    fields: dict[str, Any] = {
        "request": context.request_id,
        "key": context.tenant or "-",
        "method": scope["method"],
        "path": scope["path"][:80].encode("unicode_escape").decode(),
        "status": status,
        "seconds": f"{seconds:.3f}",
    }
    generation = context.generation
    if generation is not None:
        first = generation.first_token_seconds
        fields["prompt_tokens"] = generation.prompt_tokens
        fields["output_tokens"] = generation.output_tokens
        fields["first_token_seconds"] = "-" if first is None else f"{first:.3f}"
    elif context.pooled_tokens is not None:
        fields["prompt_tokens"] = context.pooled_tokens
    is_probe = generation is None and context.pooled_tokens is None
    level = logging.DEBUG if is_probe and status == 200 else logging.INFO
    logger.log(level, "%s", " ".join(f"{name}={value}" for name, value in fields.items()))
