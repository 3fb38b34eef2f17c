"""Routes that generate nothing: models, tokens, health, version, metrics, load."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

import kvllm
from kvllm.serving.bodies import json_response
from kvllm.serving.context import check_model, context_of, read_request
from kvllm.serving.errors import ContextTooLong, bad_request
from kvllm.serving.openapi import document
from kvllm.serving.prompts import chat_prompt, encode
from kvllm.serving.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    Model,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
    check_fields,
)
from kvllm.serving.state import ServerState

tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)
MAX_TOKEN = 1 << 31
PLACES = ("vocab_file", "merges_file", "tokenizer_file", "name_or_path")


async def list_models(request: Request) -> Response:
    """The names under which the model is served, and those of its adapters."""
    state = context_of(request).state
    return json_response(ModelList(data=[_model(state, name) for name in state.model_names]))


async def get_model(request: Request) -> Response:
    """One of these names."""
    state, name = context_of(request).state, request.path_params["id"]
    check_model(state, name)
    return json_response(_model(state, name))


async def health(request: Request) -> Response:
    """Status 200 if requests are taken, else 503."""
    context_of(request).state.check_ready()
    return Response()


async def version(request: Request) -> Response:
    """The version of the package."""
    return json_response({"version": kvllm.__version__})


async def load(request: Request) -> Response:
    """How many requests are being answered."""
    return json_response({"server_load": context_of(request).state.requests})


async def tokenize(request: Request) -> Response:
    """Token ids of a prompt, or of messages after the chat template."""
    context, body = await read_request(request, tokenize_decoder)
    state = context.state
    check_fields(body)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give one of prompt and messages", "prompt")
    if body.messages is not None:
        prompt = await chat_prompt(state, body, body.messages)
    else:
        prompt = await encode(state, body.prompt or "", body.add_special_tokens is not False)
    ids = prompt.token_ids
    names = [str(name) for name in state.tokenizer.hf.convert_ids_to_tokens(ids)] if body.return_token_strs else None
    return json_response(TokenizeResponse(len(ids), state.max_model_len, ids, names))


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    context, body = await read_request(request, detokenize_decoder)
    state = context.state
    if len(body.tokens) > state.max_model_len:
        raise ContextTooLong(f"you gave {len(body.tokens)} tokens", len(body.tokens), state.max_model_len)
    if outside := [token for token in body.tokens if not 0 <= token < MAX_TOKEN]:
        raise bad_request(f"token id {outside[0]} is not in the vocabulary", "tokens")
    decode = partial(state.tokenizer.decode, body.tokens)
    return json_response(DetokenizeResponse(await asyncio.get_running_loop().run_in_executor(state.pool, decode)))


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
    state = context_of(request).state
    there = {"/tokenizer_info"} if state.options.enable_tokenizer_info_endpoint else set[str]()
    if state.updates_adapters:
        there |= {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    return json_response(document(state.options.root_path, frozenset(there)))


def _model(state: ServerState, name: str) -> Model:
    parent = state.model_name if name in state.adapters else None
    return Model(
        id=name, created=state.created, root=state.model_name, max_model_len=state.max_model_len, parent=parent
    )
