"""Routes that tell about the server: models, health, version, metrics, load."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

import kvllm
from kvllm.serving.context import check_model, context_of
from kvllm.serving.openapi import document
from kvllm.serving.responses import Model, ModelList
from kvllm.serving.state import ServerState

PLACES = ("vocab_file", "merges_file", "tokenizer_file", "name_or_path")


async def list_models(request: Request) -> Response:
    """The names under which the model is served."""
    state = context_of(request).state
    return _json(ModelList(data=[_model(state, name) for name in state.options.served_model_names]))


async def get_model(request: Request) -> Response:
    """One of these names."""
    state, name = context_of(request).state, request.path_params["id"]
    check_model(state, name)
    return _json(_model(state, name))


async def health(request: Request) -> Response:
    """Status 200 if requests are taken, else 503."""
    context_of(request).state.check_ready()
    return Response()


async def version(request: Request) -> Response:
    """The version of the package."""
    return _json({"version": kvllm.__version__})


async def load(request: Request) -> Response:
    """How many requests are being answered."""
    return _json({"server_load": context_of(request).state.requests})


async def tokenizer_info(request: Request) -> Response:
    """What the tokenizer was made with, as in tokenizer_config.json, without files of this machine."""
    state = context_of(request).state
    tokenizer = state.tokenizer.hf
    known: dict[str, Any] = {name: value for name, value in tokenizer.init_kwargs.items() if name not in PLACES}
    known["tokenizer_class"] = type(tokenizer).__name__
    if template := state.options.chat_template or tokenizer.chat_template:
        known["chat_template"] = template
    # msgspec writes no integer as large as the `model_max_length` of many tokenizers. Added tokens become their text.
    return Response(json.dumps(known, default=str), media_type="application/json")


async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    return Response(context_of(request).state.metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def openapi(request: Request) -> Response:
    """The description of all routes."""
    options = context_of(request).state.options
    text = document(options.root_path, tokenizer_info=options.enable_tokenizer_info_endpoint)
    return Response(text, media_type="application/json")


def _model(state: ServerState, name: str) -> Model:
    return Model(id=name, created=state.created, root=state.model_name, max_model_len=state.max_model_len)


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
