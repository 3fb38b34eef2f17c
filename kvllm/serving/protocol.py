"""Requests and answers of the routes that OpenAI and vLLM share, with their names and defaults.

In a request, null is as good as absent. Fields of an answer that are always null stand for what this server has not:
clients of vLLM look for them.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal, get_type_hints

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from kvllm.core.spans import Span
from kvllm.serving.errors import bad_request

REFERENCE = "#/components/schemas/{name}"
"""Where the schema of a type is in /openapi.json."""
RawMessage = Annotated[dict[str, Any], Meta(extra_json_schema={"$ref": REFERENCE.format(name="ChatMessage")})]
RawTool = Annotated[dict[str, Any], Meta(extra_json_schema={"$ref": REFERENCE.format(name="Tool")})]
"""What the chat template gets: all keys, in the client's order. `kvllm.chat_messages` checks them."""


class Refused:
    """Marks a field that is known and cannot be obeyed. instead: what to do. neutral: values that ask for nothing."""

    def __init__(self, instead: str, *neutral: Any) -> None:
        self.instead = instead
        self.neutral = neutral


OPERATORS_CHOICE = Refused("the server's operator chooses it: start the server with --chat-template FILE")


@cache
def refused_fields(kind: type[Struct]) -> dict[str, Refused]:
    """The fields of a request that are marked so."""
    hints = get_type_hints(kind, include_extras=True)
    marks = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: each for name, found in marks.items() for each in found if isinstance(each, Refused)}


def check_fields(request: Struct) -> None:
    """Raises ApiError for a known field that asks for what cannot be done."""
    for field, refused in refused_fields(type(request)).items():
        value = getattr(request, field)
        if value is not None and value not in refused.neutral:
            raise bad_request(f"{field} is not supported: {refused.instead}", field)


class StreamOptions(Struct, kw_only=True):
    """include_usage: end the stream with a chunk that has the usage. continuous_usage_stats: give it in every chunk.
    include_kv_spans: with the first usage after each compression, tell what is left of the KV cache.
    include_kv_pairs: tell there, too, which KV pairs each layer and head has left."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_kv_spans: bool | None = None
    include_kv_pairs: bool | None = None


class CompressionOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """How the KV cache of one request is compressed, within what the engine was started with.

    compress: False drops nothing.
    retain_blocks: blocks that stay of each window.
    budget_tokens: KV pairs that compression by threshold leaves.
    """

    compress: bool | None = None
    retain_blocks: int | None = None
    budget_tokens: int | None = None


class JsonSchema(Struct, kw_only=True):
    """The schema of a `response_format`."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    """The form that an answer has. type: text, json_object or json_schema."""

    type: str
    json_schema: JsonSchema | None = None


class FunctionName(Struct, kw_only=True):
    """The function that is to be called."""

    name: str


class AllowedTools(Struct, kw_only=True):
    """Tools that the model gets to know. mode: whether it has to call one of them, auto or required."""

    mode: str
    tools: list[NamedToolChoice]


class NamedToolChoice(Struct, kw_only=True):
    """type: function, the tool that is to be called, or allowed_tools."""

    type: str = "function"
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    @property
    def name(self) -> str:
        return self.function.name if self.function else ""


class SamplingFields(Struct, kw_only=True):
    """How an answer is generated, for each route with fields of vLLM."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    compression: CompressionOptions | None = None
    structured_outputs: dict[str, Any] | None = None

    spaces_between_special_tokens: Annotated[Any, Refused("text is what the tokenizer makes of the tokens", True)] = (
        None
    )
    thinking_token_budget: Annotated[Any, Refused("use max_tokens")] = None
    logits_processors: Annotated[Any, Refused("no code of a request is run", [])] = None
    kv_transfer_params: Annotated[Any, Refused("KV pairs stay in their engine", {})] = None
    vllm_xargs: Annotated[Any, Refused("there are no such arguments", {})] = None
    repetition_detection: Annotated[
        Any, Refused("use repetition_penalty, frequency_penalty or presence_penalty", {})
    ] = None
    logprob_token_ids: Annotated[Any, Refused("use logprobs", [])] = None


class GenerationFields(SamplingFields, kw_only=True):
    """What completions and chat completions have in common."""

    n: int | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    response_format: ResponseFormat | None = None
    use_beam_search: bool | None = None
    best_of: int | None = None
    length_penalty: float | None = None

    guided_json: Annotated[Any, Refused('use structured_outputs: {"json": ...}')] = None
    guided_regex: Annotated[Any, Refused('use structured_outputs: {"regex": ...}')] = None
    guided_choice: Annotated[Any, Refused('use structured_outputs: {"choice": ...}')] = None
    guided_grammar: Annotated[Any, Refused('use structured_outputs: {"grammar": ...}')] = None


class CompletionRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/completions.

    prompt: text, token ids, or a list of one of them.
    echo: give the prompt back before the completion, with its log probabilities if `logprobs` are asked for.
    """

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    suffix: Annotated[Any, Refused("the models complete text at its end only", "")] = None
    prompt_embeds: Annotated[Any, Refused("prompts are text or token ids")] = None


class ChatCompletionRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[RawMessage]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[Any, OPERATORS_CHOICE] = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[RawTool] | None = None
    mm_processor_kwargs: Annotated[Any, Refused("messages are text", {})] = None
    media_io_kwargs: Annotated[Any, Refused("messages are text", {})] = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None
    tool_choice: str | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    functions: Annotated[Any, Refused("use tools", [])] = None
    function_call: Annotated[Any, Refused("use tool_choice", "none", "auto")] = None
    modalities: Annotated[Any, Refused("messages are text", ["text"])] = None
    audio: Annotated[Any, Refused("messages are text")] = None
    web_search_options: Annotated[Any, Refused("the server reaches no other host")] = None
    moderation: Annotated[Any, Refused("the server has no model for it")] = None
    prompt_logprobs: int | None = None


class TokenizeRequest(Struct, kw_only=True):
    """Body of POST /tokenize: a prompt, or messages as in a chat completion."""

    model: str | None = None
    prompt: str | None = None
    messages: list[RawMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[Any, OPERATORS_CHOICE] = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[RawTool] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class PromptTokensDetails(Struct):
    """cached_tokens: prompt tokens that came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """reasoning_tokens: output tokens that belong to the thought."""

    reasoning_tokens: int


class PairsLeft(Struct):
    """Which KV pairs of the positions `first .. end - 1` are left after a compression.

    layers: numbers of those that attend all tokens. heads: KV heads of each.
    bits: compressed by zlib; for each layer and there for each head, in whole bytes, a bit for each position, the first
        one in the lowest bit of the first byte.
    """

    first: int
    end: int
    layers: list[int]
    heads: int
    bits: bytes


class CompressionUsage(Struct, omit_defaults=True):
    """What compression did to the request's KV cache.

    kept_share: of the KV pairs of prompt and output, the share that was not dropped.
    windows: windows compressed, summed over the completions.
    evicted_pairs: KV pairs dropped, in the same way. After a preemption, both count again what is compressed again.
    preemptions: times that a completion lost its cache and was computed again.
    kv_spans: positions from, positions up to, and how many KV pairs of these are left, in order.
    kv_pairs: what compressions since the last usage have left; of their positions, it takes the place of what was told
        before. Both are of the first completion, and told only where a stream asks for them.
    """

    kept_share: float
    windows: int
    evicted_pairs: int
    preemptions: int
    kv_spans: list[Span] = []
    kv_pairs: list[PairsLeft] = []


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


class TokenLogprob(TopLogprob):
    """A token of the answer, and the most likely ones at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """One item for each token."""

    content: list[TokenLogprob]


class ChatFunctionCall(Struct, kw_only=True):
    """A function's name, and its arguments as JSON text; or what is new of these."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ChatToolCall(Struct, kw_only=True):
    """A call, or what is new of one. index: its number among the message's calls, in a stream."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: ChatFunctionCall


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
