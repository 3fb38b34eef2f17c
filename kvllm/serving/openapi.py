"""/openapi.json, made from the types of requests and answers."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

import kvllm
from kvllm.chat_messages import ChatMessage, Tool
from kvllm.serving import (
    adapters,
    messages,
    messages_protocol,
    pooling_protocol,
    protocol,
    responses,
    responses_protocol,
    stored_responses,
)
from kvllm.serving.protocol import REFERENCE

Route = tuple[str, str, type | None, type | None, str]
ROUTES: tuple[Route, ...] = (
    ("post", "/v1/completions", protocol.CompletionRequest, protocol.CompletionResponse, "Complete prompts."),
    (
        "post",
        "/v1/chat/completions",
        protocol.ChatCompletionRequest,
        protocol.ChatCompletionResponse,
        "Answer a conversation.",
    ),
    (
        "post",
        "/v1/responses",
        responses_protocol.ResponsesRequest,
        responses.ResponsesResponse,
        "Answer a conversation, in the form of OpenAI's newer API.",
    ),
    ("get", "/v1/responses/{id}", None, responses.ResponsesResponse, "A response that is kept."),
    ("delete", "/v1/responses/{id}", None, stored_responses.DeletedResponse, "Keep a response no longer."),
    ("get", "/v1/responses/{id}/input_items", None, stored_responses.ItemList, "The items of a response's request."),
    ("post", "/v1/responses/{id}/cancel", None, None, "Refused: no response runs in the background."),
    (
        "post",
        "/v1/messages",
        messages_protocol.MessagesRequest,
        messages.MessagesResponse,
        "Answer a conversation, in the form of Anthropic's API.",
    ),
    (
        "post",
        "/v1/messages/count_tokens",
        messages_protocol.CountTokensRequest,
        messages.TokenCount,
        "Count the tokens of such a conversation.",
    ),
    (
        "post",
        "/v1/embeddings",
        pooling_protocol.EmbeddingRequest,
        pooling_protocol.EmbeddingResponse,
        "Embed texts, of a pooling model; and so the routes below.",
    ),
    (
        "post",
        "/pooling",
        pooling_protocol.PoolingBody,
        pooling_protocol.PoolingResponse,
        "What the model makes of texts.",
    ),
    (
        "post",
        "/classify",
        pooling_protocol.ClassificationRequest,
        pooling_protocol.ClassificationResponse,
        "Score the classes of texts.",
    ),
    *(
        ("post", path, pooling_protocol.ScoreRequest, pooling_protocol.ScoreResponse, "Score documents.")
        for path in ("/score", "/v1/score")
    ),
    *(
        ("post", path, pooling_protocol.RerankRequest, pooling_protocol.RerankResponse, "Sort documents.")
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    ("get", "/v1/models", None, protocol.ModelList, "The names under which the model is served."),
    ("get", "/v1/models/{id}", None, protocol.Model, "One of these names."),
    ("post", "/tokenize", protocol.TokenizeRequest, protocol.TokenizeResponse, "Token ids of a prompt."),
    ("post", "/detokenize", protocol.DetokenizeRequest, protocol.DetokenizeResponse, "The text of token ids."),
    ("get", "/tokenizer_info", None, None, "The tokenizer's configuration, if a flag of the server allows it."),
    (
        "post",
        "/v1/load_lora_adapter",
        adapters.LoadAdapterRequest,
        None,
        "Serve an adapter as a model, if a flag does.",
    ),
    ("post", "/v1/unload_lora_adapter", adapters.UnloadAdapterRequest, None, "Serve it no longer."),
    ("get", "/health", None, None, "Status 200 if requests are taken, else 503."),
    ("get", "/ping", None, None, "As /health."),
    ("post", "/ping", None, None, "As /health."),
    ("get", "/version", None, None, "The version of the package."),
    ("get", "/load", None, None, "How many requests are being answered."),
    ("get", "/metrics", None, None, "Prometheus metrics."),
)
"""Method, path, types of the body and of the answer, and what it does."""
OPTIONAL = frozenset({"/tokenizer_info", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Paths that are there if the server's flags say so."""
STREAMED = (
    protocol.CompletionResponse,
    protocol.ChatCompletionResponse,
    responses.ResponsesResponse,
    messages.MessagesResponse,
)
"""Answers that may come as a stream of events."""
REFUSALS = {
    "400": "The body is wrong, or asks for what cannot be done.",
    "401": "No key, or a wrong one.",
    "404": "There is no such route or model.",
    "408": "The body came too slowly.",
    "413": "The body is too large.",
    "415": "The body is not declared as JSON, or is compressed in a way that is not known.",
    "503": "The server is busy, about to stop, or its engine is being started again. Try again later.",
}


@cache
def document(root_path: str = "", optional: frozenset[str] = frozenset()) -> bytes:
    """The JSON text. root_path: where a proxy has the server. optional: those of OPTIONAL that are there."""
    types = {kind for route in ROUTES for kind in route[2:4] if kind is not None} | {
        protocol.ErrorResponse,
        messages.MessagesError,
        ChatMessage,
        Tool,
    }
    _, schemas = msgspec.json.schema_components(sorted(types, key=lambda kind: kind.__name__), ref_template=REFERENCE)
    paths: dict[str, Any] = {}
    for route in ROUTES:
        if route[1] not in OPTIONAL - optional:
            paths.setdefault(route[1], {})[route[0]] = _operation(*route)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "KvLLM", "version": kvllm.__version__},
            "servers": [{"url": root_path or "/"}],
            "paths": paths,
            "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
            "security": [{}, {"key": []}],
        }
    )


def _operation(method: str, path: str, body: type | None, answer: type | None, text: str) -> dict[str, Any]:
    good: dict[str, Any] = {"description": "Success."}
    if answer is not None:
        good["content"] = _content(answer)
    error = messages.MessagesError if path.startswith(messages.PATH) else protocol.ErrorResponse
    refusals = {status: {"description": text, "content": _content(error)} for status, text in REFUSALS.items()}
    operation: dict[str, Any] = {"summary": text, "responses": {"200": good} | refusals}
    operation["operationId"] = f"{method}{path.replace('/', '_').replace('{', '').replace('}', '')}"
    if body is not None:
        operation["requestBody"] = {"required": True, "content": _content(body)}
    if "{id}" in path:
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _content(kind: type) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": REFERENCE.format(name=kind.__name__)}}}
    if kind in STREAMED:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return content
