"""Routes of pooling models: /v1/embeddings, /pooling, /classify, /score and /rerank."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch
from starlette.requests import Request
from starlette.responses import Response

from kvllm.errors import RequestError
from kvllm.pooling.engine import PoolingEngine
from kvllm.pooling.pairs import Pairs
from kvllm.pooling.params import PoolingParams
from kvllm.pooling.runner import PoolingRequest
from kvllm.serving.bodies import json_response
from kvllm.serving.context import RequestContext, read_request
from kvllm.serving.errors import ContextTooLong, bad_request, check_count
from kvllm.serving.pooling_protocol import (
    Classification,
    ClassificationRequest,
    ClassificationResponse,
    Document,
    Embedding,
    EmbeddingRequest,
    EmbeddingResponse,
    InputFields,
    Pooled,
    PoolingBody,
    PoolingFields,
    PoolingResponse,
    PoolingUsage,
    RerankRequest,
    RerankResponse,
    RerankResult,
    Score,
    ScoreRequest,
    ScoreResponse,
)
from kvllm.serving.prompts import LONG_TEXT
from kvllm.serving.state import ServerState

MAX_INPUTS = 2048
"""Of one request, as in OpenAI's API."""
QUERIES, DOCUMENTS = ("text_1", "queries", "data_1"), ("text_2", "documents", "data_2")
T = TypeVar("T")
embedding_decoder = msgspec.json.Decoder(EmbeddingRequest)
pooling_decoder = msgspec.json.Decoder(PoolingBody)
classification_decoder = msgspec.json.Decoder(ClassificationRequest)
score_decoder = msgspec.json.Decoder(ScoreRequest)
rerank_decoder = msgspec.json.Decoder(RerankRequest)


async def embeddings(request: Request) -> Response:
    """Embed texts."""
    context, body = await read_request(request, embedding_decoder)
    _check_task(context.state, "embed")
    found, usage = await _pool(context, body, dimensions=body.dimensions)
    data = [Embedding(i, _encoded(each, body.encoding_format)) for i, each in enumerate(found)]
    return json_response(EmbeddingResponse(**context.head("embd", body), usage=usage, data=data))


async def pooling(request: Request) -> Response:
    """Whatever the model makes of texts, of the whole or of each token."""
    context, body = await read_request(request, pooling_decoder)
    found, usage = await _pool(context, body, dimensions=body.dimensions, task=body.task)
    data = [Pooled(i, _encoded(each, body.encoding_format)) for i, each in enumerate(found)]
    return json_response(PoolingResponse(**context.head("pool", body), usage=usage, data=data))


async def classify(request: Request) -> Response:
    """Score the classes of texts."""
    context, body = await read_request(request, classification_decoder)
    _check_task(context.state, "classify")
    found, usage = await _pool(context, body)
    labels = context.state.pooling.engine.config.labels
    data = [Classification(i, labels[int(each.argmax())], each.tolist(), len(labels)) for i, each in enumerate(found)]
    return json_response(ClassificationResponse(**context.head("classify", body), usage=usage, data=data))


async def score(request: Request) -> Response:
    """Score how well documents fit a query, or each its own."""
    context, body = await read_request(request, score_decoder)
    queries, documents = _texts(body, QUERIES), _texts(body, DOCUMENTS)
    scores, usage = await _score(context, body, queries, documents)
    data = [Score(i, each) for i, each in enumerate(scores)]
    return json_response(ScoreResponse(**context.head("score", body), usage=usage, data=data))


async def rerank(request: Request) -> Response:
    """Sort documents by how well they fit a query."""
    context, body = await read_request(request, rerank_decoder)
    documents = [each if isinstance(each, str) else each.text for each in body.documents]
    scores, usage = await _score(context, body, [body.query], documents)
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
    results = [RerankResult(i, Document(documents[i]), scores[i]) for i in order]
    head = context.head("rerank", body)
    return json_response(RerankResponse(head["id"], head["model"], usage, results))


def _check_task(state: ServerState, task: str) -> None:
    """Raises ApiError if the model does something else."""
    own = state.pooling.engine.config.task
    if own != task:
        made, routes = {"embed": ("embeddings", "/v1/embeddings"), "classify": ("scores of classes", "/classify")}[own]
        raise bad_request(f"the model makes {made}: use {routes} or /pooling", "model")


async def _pool(context: RequestContext, body: InputFields, **own: Any) -> tuple[list[torch.Tensor], PoolingUsage]:
    """What becomes of the inputs of a request, and its usage. own: options that the route has."""
    prompts, params = _inputs(body.input), _params(body, **own)
    state, special = context.state, body.add_special_tokens is not False
    engine = state.pooling.engine
    params.check(engine.config, engine.size)
    prompts = [_bounded(state, prompt, params) for prompt in prompts]
    make = partial(_requests, engine, prompts, params, special)
    return await _run(context, await _made(state, make, prompts))


async def _score(
    context: RequestContext, body: PoolingFields, queries: list[str], documents: list[str]
) -> tuple[list[float], PoolingUsage]:
    """The score of each document, and the usage."""
    check_count("documents", len(documents), MAX_INPUTS)
    check_count("queries", len(queries), MAX_INPUTS)
    state, params = context.state, _params(body)
    for text in (*queries, *documents):
        _bounded(state, text, params)
    engine, template = state.pooling.engine, state.options.chat_template
    make = partial(Pairs, engine, queries, documents, params, template)
    pairs = await _made(state, make, [*queries, *documents])
    found, usage = await _run(context, pairs.requests)
    return pairs.scores(found), usage


async def _made(state: ServerState, make: Callable[[], T], prompts: Sequence[str | list[int]]) -> T:
    """What `make` returns, which encodes prompts: in a thread if that takes long."""
    if sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) <= LONG_TEXT:
        return make()
    return await asyncio.get_running_loop().run_in_executor(state.pool, make)


async def _run(context: RequestContext, requests: Sequence[PoolingRequest]) -> tuple[list[torch.Tensor], PoolingUsage]:
    """What becomes of requests. Raises ApiError if the server takes none now."""
    state, begin = context.state, time.monotonic()
    tokens = sum(len(request.token_ids) for request in requests)
    context.pooled_tokens = tokens
    state.check_ready()
    state.admission.enter(len(requests), tokens)
    try:
        found = await state.pooling.compute(requests)
    finally:
        state.admission.leave_prefill(tokens)
        state.admission.leave(len(requests))
    state.metrics.count_pooled([len(request.token_ids) for request in requests], time.monotonic() - begin)
    return found, PoolingUsage(tokens, tokens)


def _requests(
    engine: PoolingEngine, prompts: list[str | list[int]], params: PoolingParams, special: bool
) -> list[PoolingRequest]:
    found = []
    for number, prompt in enumerate(prompts):
        try:
            found.append(engine.request(prompt, params, special=special))
        except RequestError as error:
            raise bad_request(f"input[{number}]: {error}", "input") from None
    return found


def _params(body: PoolingFields, **own: Any) -> PoolingParams:
    return PoolingParams(
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        use_activation=body.use_activation,
        normalize=body.normalize,
        **own,
    )


def _inputs(given: Any) -> list[str | list[int]]:
    """The texts, or lists of token ids. Raises ApiError."""
    if isinstance(given, str) or (given and all(isinstance(each, int) for each in given)):
        return [given]
    if not given:
        raise bad_request("input is empty: give a text, token ids, or a list of one of them", "input")
    if not (all(isinstance(each, str) for each in given) or all(isinstance(each, list) for each in given)):
        raise bad_request("input mixes texts and token ids: give a list of texts, or of lists of ids", "input")
    check_count("input", len(given), MAX_INPUTS)
    return list(given)


def _bounded(state: ServerState, prompt: Any, params: PoolingParams) -> Any:
    """The prompt, cut to what may be needed of it, so that no endless text is encoded. Raises ApiError."""
    if not isinstance(prompt, str):
        return prompt
    most = params.truncate_prompt_tokens
    kept = state.max_model_len if most in (None, -1) else most
    if len(prompt) > kept * state.longest_token and most is None:
        tokens = -(-len(prompt) // state.longest_token)
        problem = f"your text has {len(prompt)} characters, which are at least {tokens} tokens"
        raise ContextTooLong(problem, tokens, state.max_model_len)
    return prompt[: kept * state.longest_token]


def _texts(body: ScoreRequest, names: tuple[str, ...]) -> list[str]:
    """Those of the one field that is given. Raises ApiError."""
    given = [getattr(body, name) for name in names if getattr(body, name) is not None]
    if len(given) != 1:
        raise bad_request(f"give one of {', '.join(names)}: a text, or a list of them", names[0])
    return [given[0]] if isinstance(given[0], str) else given[0]


def _encoded(vectors: torch.Tensor, encoding: str | None) -> Any:
    if encoding == "base64":
        return base64.b64encode(vectors.contiguous().numpy().astype("<f4").tobytes()).decode()
    return vectors.tolist()
