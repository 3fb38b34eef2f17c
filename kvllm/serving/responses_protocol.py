"""Bodies of POST /v1/responses, and the chat that each of them is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Struct

from kvllm.chat_messages import function_tool, text_of
from kvllm.serving.errors import bad_request
from kvllm.serving.protocol import (
    ChatCompletionRequest,
    FunctionName,
    JsonSchema,
    NamedToolChoice,
    Refused,
    ResponseFormat,
    SamplingFields,
    check_fields,
)
from kvllm.serving.tool_choice import check_allowed
from kvllm.serving.tool_parsers.json_calls import UNFINISHED_ESCAPE, clean, decoded

TOOL_TYPES = ("function", "custom")
CUSTOM_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
LOGPROBS = "message.output_text.logprobs"
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


class InputPart(Struct, kw_only=True, omit_defaults=True):
    """A part of an item: text alone is understood."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(Struct, kw_only=True, omit_defaults=True):
    """A message, a call of a tool, its output, a thought, or the id of such an item; fields as the type needs them."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    status: str | None = None


class ResponsesTool(Struct, kw_only=True):
    """A tool that the model may call. type: function, or custom, whose input is text."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    defer_loading: Annotated[Any, Refused("the model sees all tools that are given", False)] = None
    allowed_callers: Annotated[Any, Refused("the model itself calls tools", ["direct"])] = None


class ResponsesToolChoice(Struct, kw_only=True, omit_defaults=True):
    """type: function or custom, the tool that is to be called, or allowed_tools. mode, tools: of allowed_tools."""

    type: str
    name: str = ""
    mode: str | None = None
    tools: list[ResponsesToolChoice] | None = None


class Reasoning(Struct, kw_only=True):
    """effort: see `reasoning_effort` of chats. summary: none is made."""

    effort: str | None = None
    summary: str | None = None
    mode: Annotated[Any, Refused("use reasoning.effort", "standard")] = None


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


class ResponsesRequest(SamplingFields, kw_only=True):
    """Body of POST /v1/responses."""

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    previous_response_id: str | None = None
    truncation: str | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    conversation: Annotated[Any, Refused("use previous_response_id, or send the whole conversation as input")] = None
    background: Annotated[Any, Refused("leave it out, and read the answer as a stream", False)] = None
    background_options: Annotated[Any, Refused("nothing runs in the background", {})] = None
    prompt: Annotated[Any, Refused("there are no stored prompts: give instructions and input")] = None
    context_management: Annotated[Any, Refused("use truncation, or send the items that the model is to see", [])] = None
    moderation: Annotated[Any, Refused("the server has no model for it")] = None
    image: Annotated[Any, Refused("messages are text", {})] = None
    access_programs: Annotated[Any, Refused("there are none", [], {})] = None

    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    enable_response_messages: Annotated[
        Any, Refused("use /tokenize for the prompt, and return_token_ids of chats", False)
    ] = None
    previous_input_messages: Annotated[Any, Refused("send them as input", [])] = None


SAME_NAME = (*SamplingFields.__struct_fields__, "parallel_tool_calls", "chat_template_kwargs", "include_reasoning")
decoder = msgspec.json.Decoder(ResponsesRequest)


def chat_of(body: ResponsesRequest, earlier: Sequence[InputItem] = ()) -> ChatCompletionRequest:
    """The chat that a request is. earlier: items before its input. Raises ApiError for what a chat has not."""
    check_fields(body)
    check_fields(body.reasoning or Reasoning())
    shows_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not shows_logprobs:
        raise bad_request(f"top_logprobs needs {LOGPROBS!r} in include", "top_logprobs")
    if body.truncation not in (None, "auto", "disabled"):
        raise bad_request(f"truncation={body.truncation[:100]!r} is not allowed: auto or disabled", "truncation")
    tools, choice = _choice(body.tools or [], body.tool_choice)
    chat = ChatCompletionRequest(messages=_messages(body, earlier), tools=_tools(tools), tool_choice=choice)
    for name in SAME_NAME:
        setattr(chat, name, getattr(body, name))
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise bad_request(f"max_output_tokens={body.max_output_tokens} is not allowed: at least 1", "max_output_tokens")
    chat.max_completion_tokens = body.max_output_tokens
    chat.logprobs, chat.top_logprobs = shows_logprobs, body.top_logprobs
    chat.reasoning_effort = body.reasoning.effort if body.reasoning else None
    if body.text is not None and body.text.format is not None:
        chat.response_format = _format(body.text.format)
    chat.continue_final_message = _is_continued(body, chat.messages)
    return chat


def _is_continued(body: ResponsesRequest, messages: list[dict[str, Any]]) -> bool:
    """Whether the answer goes on with the last message, because it is one of the assistant that was cut off."""
    item = body.input[-1] if isinstance(body.input, list) and body.input else InputItem()
    is_cut = item.role == "assistant" and item.status in ("in_progress", "incomplete")
    return is_cut and "tool_calls" not in messages[-1] and bool(text_of(messages[-1]["content"]))


def is_reference(item: InputItem) -> bool:
    """Whether an item stands for another one with its id. The type may be left out."""
    return item.type == "item_reference" or (item.type is None and item.role is None and item.id is not None)


def custom_input(arguments: str) -> str:
    """The input of a custom tool in the arguments of the function that the model takes it for, which may be cut off."""
    whole = UNFINISHED_ESCAPE.sub(r"\1", arguments)
    for end in ("", "}", '"}'):
        found = decoded(whole + end)
        if isinstance(found, dict) and isinstance(found.get("input"), str):
            return clean(found["input"])
    return arguments


def _choice(
    tools: list[ResponsesTool], choice: str | ResponsesToolChoice | None
) -> tuple[list[ResponsesTool], str | NamedToolChoice | None]:
    """The tools that the model gets to know, and its choice among them."""
    if not isinstance(choice, ResponsesToolChoice):
        return tools, choice
    if choice.type in TOOL_TYPES:
        return tools, NamedToolChoice(function=FunctionName(name=choice.name))
    if choice.type != "allowed_tools":
        problem = "function, custom and allowed_tools are"
        raise bad_request(f"tool_choice of type {choice.type[:100]!r} is not supported: {problem}", "tool_choice")
    allowed = {(each.type, each.name) for each in choice.tools or ()}
    kept = [tool for tool in tools if (tool.type, tool.name) in allowed]
    check_allowed(choice.mode, {name for _, name in allowed}, {tool.name for tool in kept})
    return kept, choice.mode


def _format(given: TextFormat) -> ResponseFormat:
    if given.type != "json_schema":
        return ResponseFormat(type=given.type)
    schema = JsonSchema(name=given.name, schema=given.schema, strict=given.strict)
    return ResponseFormat(type=given.type, json_schema=schema)


def _tools(given: list[ResponsesTool]) -> list[dict[str, Any]] | None:
    """Tools of chats, their keys in the order that models know. A custom tool is a function of one text."""
    tools = []
    for tool in given:
        check_fields(tool)
        if tool.type not in TOOL_TYPES:
            problem = "functions and custom tools are"
            raise bad_request(f"a tool of type {tool.type[:100]!r} is not supported: {problem}", "tools")
        parameters = tool.parameters
        if tool.type == "custom":
            parameters = CUSTOM_PARAMETERS
            if tool.format is not None and tool.format.get("type") != "text":
                raise bad_request(f"the custom tool {tool.name[:100]!r} has a format that is not text", "tools")
        tools.append(function_tool(tool.name, tool.description, parameters, tool.strict))
    return tools or None


def _messages(body: ResponsesRequest, earlier: Sequence[InputItem]) -> list[dict[str, Any]]:
    """Items of the assistant that follow each other are one message, as templates expect it."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    for item in earlier:
        _add(messages, item, "previous_response_id")
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for index, item in enumerate(body.input):
        _add(messages, item, f"input[{index}]")
    return messages


def _add(messages: list[dict[str, Any]], item: InputItem, where: str) -> None:
    """Add an item to the messages."""
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
    elif kind in ("function_call", "custom_tool_call"):
        arguments = item.arguments if kind == "function_call" else json.dumps({"input": item.input or ""})
        function = {"name": item.name or "", "arguments": arguments}
        calls = _assistant(messages).setdefault("tool_calls", [])
        calls.append({"id": item.call_id, "type": "function", "function": function})
    elif kind in ("function_call_output", "custom_tool_call_output"):
        content = _content(item.output, where)
        messages.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
    elif kind == "reasoning":
        parts = item.content or item.summary or []
        thought = "".join(part.text or "" for part in parts if isinstance(part, InputPart))
        if thought:
            message = _assistant(messages)
            message["reasoning"] = message.get("reasoning", "") + thought
    else:
        problem = "messages, calls of functions and custom tools, their outputs, reasoning and item_reference are"
        raise bad_request(f"{where} of type {kind[:100]!r} is not supported: {problem}", where)


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
