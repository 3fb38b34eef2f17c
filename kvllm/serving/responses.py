"""Answers of the routes that generate, as OpenAI and vLLM have them.

Fields that are always null stand for what this server has not: clients of vLLM look for them.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from kvllm.serving.tools import ChatToolCall


class PromptTokensDetails(Struct):
    """cached_tokens: prompt tokens that came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """reasoning_tokens: output tokens that belong to the thought."""

    reasoning_tokens: int


class CompressionUsage(Struct, omit_defaults=True):
    """What compression did to the request's KV cache.

    kept_share: of the KV pairs of prompt and output, the share that was not dropped.
    windows: windows compressed, summed over the completions.
    evicted_pairs: KV pairs dropped, in the same way. After a preemption, both count again what is compressed again.
    preemptions: times that a completion lost its cache and was computed again.
    """

    kept_share: float
    windows: int
    evicted_pairs: int
    preemptions: int


class Usage(Struct):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    kvllm: CompressionUsage
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    def before_output(self) -> Usage:
        """What it was before the first token of output: a stream's first chunk tells this."""
        thought = CompletionTokensDetails(0) if self.completion_tokens_details else UNSET
        return replace(self, completion_tokens=0, total_tokens=self.prompt_tokens, completion_tokens_details=thought)


class CompletionLogprobs(Struct):
    """One item for each token; the log probability of a prompt's first token is null."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct, kw_only=True):
    """A completion, or what is new of it in a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    routed_experts: None = None


class CompletionChunk(Struct, kw_only=True):
    """A chunk of the stream of /v1/completions."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    usage: Usage | UnsetType | None = UNSET


class CompletionResponse(CompletionChunk, kw_only=True):
    """Answer of /v1/completions."""

    service_tier: None = None
    system_fingerprint: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    metrics: None = None


class TopLogprob(Struct):
    """bytes: of the token's text in UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    """A token of the answer, and the most likely ones at its position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """One item for each token."""

    content: list[TokenLogprob]


class Message(Struct, kw_only=True):
    """The assistant's message. Without calls it has no `tool_calls`."""

    role: str
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class MessageDelta(Struct, kw_only=True):
    """What is new of the assistant's message in a chunk."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    """An answer of the assistant."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: None = None


class ChatChunkChoice(Struct, kw_only=True):
    """What is new of an answer."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | None = None


class ChatCompletionResponse(Struct, kw_only=True):
    """Answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    service_tier: None = None
    system_fingerprint: None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    metrics: None = None


class ChatCompletionChunk(Struct, kw_only=True):
    """A chunk of the stream of /v1/chat/completions. prompt_token_ids: in the first one of each choice."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class TokenizeResponse(Struct):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(Struct):
    """Answer of /detokenize."""

    prompt: str


class Model(Struct, kw_only=True):
    """A name under which the model is served."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: str = "model"
    owned_by: str = "kvllm"
    parent: str | None = None


class ModelList(Struct, kw_only=True):
    """Answer of /v1/models."""

    data: list[Model]
    object: str = "list"


class ErrorDetail(Struct):
    """What is wrong. param: the field, if it is one. code: the HTTP status, or OpenAI's name of the error."""

    message: str
    type: str
    param: str | None
    code: int | str


class ErrorResponse(Struct):
    """Every answer that is an error."""

    error: ErrorDetail
