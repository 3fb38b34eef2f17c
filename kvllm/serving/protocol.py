"""Requests as clients send them. Names and defaults are those of OpenAI and vLLM; null is as good as absent."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

REFERENCE = "#/components/schemas/{name}"
"""Where the schema of a type is in /openapi.json."""
RawMessage = Annotated[dict[str, Any], Meta(extra_json_schema={"$ref": REFERENCE.format(name="ChatMessage")})]
RawTool = Annotated[dict[str, Any], Meta(extra_json_schema={"$ref": REFERENCE.format(name="Tool")})]
"""What the chat template gets: all keys, in the client's order. `kvllm.chat_messages` checks them."""


class StreamOptions(Struct, kw_only=True):
    """include_usage: end the stream with a chunk that has the usage. continuous_usage_stats: give it in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


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

    # Fields below are known, and are refused unless they ask for nothing (`REFUSED`).
    spaces_between_special_tokens: Any = None
    thinking_token_budget: Any = None
    logits_processors: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None
    repetition_detection: Any = None
    logprob_token_ids: Any = None


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

    # Refused, too.
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


class CompletionRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/completions.

    prompt: text, token ids, or a list of one of them.
    echo: give the prompt back before the completion, with its log probabilities if `logprobs` are asked for.
    """

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    suffix: Any = None
    prompt_embeds: Any = None


class ChatCompletionRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[RawMessage]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[RawTool] | None = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None
    tool_choice: str | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    moderation: Any = None
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
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[RawTool] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


Refusals = dict[str, tuple[tuple[Any, ...], str]]
REFUSED: Refusals = {
    "suffix": (("",), "the models complete text at its end only"),
    "prompt_embeds": ((), "prompts are text or token ids"),
    "spaces_between_special_tokens": ((True,), "text is what the tokenizer makes of the tokens"),
    "thinking_token_budget": ((), "use max_tokens"),
    "logits_processors": (([],), "no code of a request is run"),
    "kv_transfer_params": (({},), "KV pairs stay in their engine"),
    "vllm_xargs": (({},), "there are no such arguments"),
    "guided_json": ((), 'use structured_outputs: {"json": ...}'),
    "guided_regex": ((), 'use structured_outputs: {"regex": ...}'),
    "guided_choice": ((), 'use structured_outputs: {"choice": ...}'),
    "guided_grammar": ((), 'use structured_outputs: {"grammar": ...}'),
    "repetition_detection": (({},), "use repetition_penalty, frequency_penalty or presence_penalty"),
    "logprob_token_ids": (([],), "use logprobs"),
    "chat_template": ((), "the server's operator chooses it: start the server with --chat-template FILE"),
    "functions": (([],), "use tools"),
    "function_call": (("none", "auto"), "use tool_choice"),
    "mm_processor_kwargs": (({},), "messages are text"),
    "media_io_kwargs": (({},), "messages are text"),
    "modalities": ((["text"],), "messages are text"),
    "audio": ((), "messages are text"),
    "web_search_options": ((), "the server reaches no other host"),
    "moderation": ((), "the server has no model for it"),
}
"""Fields that cannot be obeyed: values that ask for nothing, and what to do instead."""
