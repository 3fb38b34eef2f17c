"""Bodies of POST /v1/responses, and the chat that each of them is."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from kvllm.chat_messages import function_tool
from kvllm.serving.errors import bad_request
from kvllm.serving.protocol import (
    ChatCompletionRequest,
    CompressionOptions,
    FunctionName,
    JsonSchema,
    NamedToolChoice,
    Refusals,
    ResponseFormat,
)
from kvllm.serving.sampling import check_fields

TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


class InputPart(Struct, kw_only=True):
    """A part of an item: text alone is understood."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(Struct, kw_only=True):
    """A message, a call of a function, its output, or a thought; fields as the type needs them."""

    type: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class FunctionTool(Struct, kw_only=True):
    """A function that the model may call."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Struct, kw_only=True):
    """The function that is to be called."""

    type: str
    name: str = ""


class Reasoning(Struct, kw_only=True):
    """effort: see `reasoning_effort` of chats. summary: none is made."""

    effort: str | None = None
    summary: str | None = None


class TextFormat(Struct, kw_only=True):
    """type: text, json_object or json_schema."""

    type: str = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Struct, kw_only=True):
    """The form of the text."""

    format: TextFormat | None = None


class ResponsesRequest(Struct, kw_only=True):
    """Body of POST /v1/responses. Nothing is stored, whatever `store` says. The last fields are those of chats."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None
    top_logprobs: Any = None
    truncation: Any = None

    top_k: int | None = None
    seed: int | None = None
    request_id: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    compression: CompressionOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None


SAME_NAME = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "parallel_tool_calls",
    "request_id",
    "priority",
    "cache_salt",
    "compression",
    "chat_template_kwargs",
)
REFUSED: Refusals = {
    "previous_response_id": ((), "nothing is stored: send the whole conversation as input"),
    "conversation": ((), "nothing is stored: send the whole conversation as input"),
    "background": ((False,), "leave it out, and read the answer as a stream"),
    "prompt": ((), "there are no stored prompts: give instructions and input"),
    "top_logprobs": ((0,), "use logprobs of /v1/chat/completions"),
    "truncation": (("disabled",), "shorten the input"),
}
"""As that of the other routes: values that ask for nothing, and what to do instead."""
decoder = msgspec.json.Decoder(ResponsesRequest)


def chat_of(body: ResponsesRequest) -> ChatCompletionRequest:
    """The chat that a request is. Raises ApiError for what a chat has not."""
    check_fields(body, REFUSED)
    chat = ChatCompletionRequest(messages=_messages(body), tools=_tools(body.tools or []))
    for name in SAME_NAME:
        setattr(chat, name, getattr(body, name))
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise bad_request(f"max_output_tokens={body.max_output_tokens} is not allowed: at least 1", "max_output_tokens")
    chat.max_completion_tokens = body.max_output_tokens
    choice = body.tool_choice
    if isinstance(choice, FunctionChoice):
        if choice.type != "function":
            raise bad_request(
                f"tool_choice of type {choice.type[:100]!r} is not supported: a function is", "tool_choice"
            )
        choice = NamedToolChoice(function=FunctionName(name=choice.name))
    chat.tool_choice = choice
    chat.reasoning_effort = body.reasoning.effort if body.reasoning else None
    if body.text is not None and body.text.format is not None:
        chat.response_format = _format(body.text.format)
    return chat


def _format(given: TextFormat) -> ResponseFormat:
    if given.type != "json_schema":
        return ResponseFormat(type=given.type)
    schema = JsonSchema(name=given.name, schema=given.schema, strict=given.strict)
    return ResponseFormat(type=given.type, json_schema=schema)


def _tools(given: list[FunctionTool]) -> list[dict[str, Any]] | None:
    """Tools of chats, their keys in the order that models know."""
    tools = []
    for tool in given:
        if tool.type != "function":
            raise bad_request(f"a tool of type {tool.type[:100]!r} is not supported: functions are", "tools")
        tools.append(function_tool(tool.name, tool.description, tool.parameters, tool.strict))
    return tools or None


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Items of the assistant that follow each other are one message, as templates expect it."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for index, item in enumerate(body.input):
        where = f"input[{index}]"
        kind = item.type or "message"
        if kind == "message":
            if item.role is None:
                raise bad_request(f"{where} needs a role", where)
            content = _content(item.content, where)
            if item.role != "assistant":
                messages.append({"role": item.role, "content": content})
            else:
                message = _assistant(messages)
                given = message.get("content")
                message["content"] = content if given is None else [*_as_parts(given), *_as_parts(content)]
        elif kind == "function_call":
            function = {"name": item.name or "", "arguments": item.arguments}
            calls = _assistant(messages).setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": function})
        elif kind == "function_call_output":
            content = _content(item.output, where)
            messages.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
        elif kind == "reasoning":
            thought = "".join(part.text or "" for part in item.content or [] if isinstance(part, InputPart))
            if thought:
                message = _assistant(messages)
                message["reasoning"] = message.get("reasoning", "") + thought
        else:
            problem = "messages, function calls, their outputs and reasoning are"
            raise bad_request(f"{where} of type {kind[:100]!r} is not supported: {problem}", where)
    return messages


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that items are added to."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _content(content: str | list[InputPart] | None, where: str) -> str | list[dict[str, Any]]:
    """The content of a chat's message: text, or several parts."""
    if not isinstance(content, list):
        return content or ""
    parts = [{"type": "text", "text": _text(part, where)} for part in content]
    return parts[0]["text"] if len(parts) == 1 else parts


def _text(part: InputPart, where: str) -> str:
    if part.type not in TEXT_PARTS:
        problem = f"{where} has a part of type {part.type[:100]!r}: only text parts are understood"
        raise bad_request(problem, where)
    text: str | None = getattr(part, TEXT_PARTS[part.type])
    if text is None:
        raise bad_request(f"{where} has a part of type {part.type!r} without {TEXT_PARTS[part.type]!r}", where)
    return text


def _as_parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]
