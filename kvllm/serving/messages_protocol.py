"""Bodies of POST /v1/messages, as Anthropic's clients send them, and the chat that each of them is."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Struct

from kvllm.chat_messages import function_tool, text_of
from kvllm.serving.errors import bad_request
from kvllm.serving.protocol import (
    ChatCompletionRequest,
    CompressionOptions,
    FunctionName,
    JsonSchema,
    NamedToolChoice,
    Refused,
    ResponseFormat,
    check_fields,
)

INVALID_JSON = "INVALID_JSON"
"""The only key of an input that stands for arguments which are no JSON of an object; its value is their text."""

ERROR = "Error: "
"""In front of the result of a tool that has failed."""
BILLED_HERE = {"type": "billing_policy"}
KEEP_ALL = tuple({"edits": [{"type": "clear_thinking_20251015", "keep": keep}]} for keep in ("all", {"type": "all"}))
"""Edits of a conversation that leave it as it is."""


class ContentBlock(Struct, kw_only=True):
    """A part of a message. type: text, thinking, tool_use, tool_result; fields as the type needs them.

    input: an object, or what else the client has read of a stream.
    """

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = None


class InputMessage(Struct, kw_only=True):
    """A message of the conversation."""

    role: str
    content: str | list[ContentBlock]


class MessagesTool(Struct, kw_only=True):
    """A tool that the model may call. type: "custom", if it is given."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    type: str | None = None
    defer_loading: Annotated[Any, Refused("the model sees all tools that are given", False)] = None
    allowed_callers: Annotated[Any, Refused("the model itself calls tools", ["direct"])] = None


class MessagesToolChoice(Struct, kw_only=True):
    """type: auto, any, tool (by name) or none."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True):
    """type: enabled, adaptive or disabled. display: "omitted" leaves the thought out. Its budget has no effect."""

    type: str
    display: str | None = None


class OutputFormat(Struct, kw_only=True):
    """type: json_schema."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(Struct, kw_only=True):
    """effort: see `reasoning_effort` of chats. format: what the text has to obey."""

    effort: str | None = None
    format: OutputFormat | None = None
    task_budget: Annotated[Any, Refused("use max_tokens")] = None


class CountTokensRequest(Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens. output_format: an older name of `output_config.format`."""

    model: str
    messages: list[InputMessage]
    system: str | list[ContentBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    mcp_servers: Annotated[Any, Refused("the server reaches no other host: call the tools yourself", [])] = None
    context_management: Annotated[
        Any, Refused("send the messages that the model is to see", {}, {"edits": []}, *KEEP_ALL)
    ] = None
    compaction: Annotated[Any, Refused("ask for a summary in a message")] = None
    billing_policy: Annotated[Any, Refused("nothing is billed", BILLED_HERE, BILLED_HERE | {"bill_to": "self"})] = None
    speed: Annotated[Any, Refused("the server has one speed", "standard")] = None
    container: Annotated[Any, Refused("the server runs no code")] = None
    diagnostics: Annotated[
        Any, Refused("usage.cache_read_input_tokens says what was cached", {}, {"previous_message_id": None})
    ] = None
    fallbacks: Annotated[Any, Refused("the server has one model", [], "default")] = None
    fallback_credit_token: Annotated[Any, Refused("the server has given none")] = None
    inference_geo: Annotated[Any, Refused("it is where the server runs", "global")] = None
    thread: Annotated[Any, Refused("nothing is stored: send the whole conversation as messages")] = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of POST /v1/messages. The last fields are those of the other routes."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    seed: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    compression: CompressionOptions | None = None


def chat_of(body: CountTokensRequest) -> ChatCompletionRequest:
    """The chat that a request is. Raises ApiError for what a chat has not."""
    check_fields(body)
    chat = ChatCompletionRequest(model=body.model, messages=_messages(body), tools=_tools(body))
    _set_format(chat, body)
    _continue(chat, body)
    if body.tools and body.tool_choice is not None:
        chat.tool_choice = _choice(body.tool_choice)
        chat.parallel_tool_calls = not body.tool_choice.disable_parallel_tool_use
    if body.thinking is not None:
        _set_thinking(chat, body.thinking)
    if isinstance(body, MessagesRequest):
        if body.max_tokens < 1:
            raise bad_request(f"max_tokens={body.max_tokens} is not allowed: at least 1", "max_tokens")
        chat.stop = body.stop_sequences
        for name in ("max_tokens", "temperature", "top_p", "top_k", "seed", "priority", "cache_salt", "compression"):
            setattr(chat, name, getattr(body, name))
    return chat


def _set_thinking(chat: ChatCompletionRequest, thinking: Thinking) -> None:
    if thinking.type not in ("enabled", "adaptive", "disabled"):
        problem = f"thinking.type={thinking.type[:100]!r} is not supported: enabled, adaptive or disabled"
        raise bad_request(problem, "thinking")
    chat.chat_template_kwargs = {"enable_thinking": thinking.type != "disabled"}
    chat.include_reasoning = thinking.display != "omitted"


def _set_format(chat: ChatCompletionRequest, body: CountTokensRequest) -> None:
    """The effort, and the schema that the text obeys."""
    config = body.output_config or OutputConfig()
    check_fields(config)
    chat.reasoning_effort = config.effort
    wanted = config.format or body.output_format
    if wanted is None:
        return
    field = "output_config.format" if config.format else "output_format"
    if wanted.type != "json_schema" or wanted.schema is None:
        problem = f"{field} of type {wanted.type[:100]!r} is not supported: json_schema with a schema is"
        raise bad_request(problem, field)
    chat.response_format = ResponseFormat(type=wanted.type, json_schema=JsonSchema(schema=wanted.schema))


def _continue(chat: ChatCompletionRequest, body: CountTokensRequest) -> None:
    """Let the answer go on with the last message, if it is the assistant's. An empty one is none."""
    if not body.messages or body.messages[-1].role != "assistant":
        return
    content = body.messages[-1].content
    where = f"messages[{len(body.messages) - 1}]"
    if content and isinstance(content, list) and content[-1].type != "text":
        problem = f"{where} ends the conversation with a block of type {content[-1].type[:100]!r}"
        raise bad_request(f"{problem}: an answer goes on with text only, and after a tool_use with its result", where)
    text = text_of(chat.messages[-1]["content"])
    if not text:
        chat.messages.pop()
        return
    if text[-1].isspace():
        raise bad_request("messages: final assistant content cannot end with trailing whitespace", "messages")
    if chat.response_format is not None:
        problem = "an answer of the form of output_config.format cannot go on with a message of the assistant"
        raise bad_request(f"{problem}: leave out {where}", where)
    chat.continue_final_message = True


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    messages = []
    if body.system:
        system = body.system if isinstance(body.system, str) else text_of(_content(body.system, "system"))
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(body.messages):
        where = f"messages[{index}]"
        if message.role not in ("user", "assistant", "system"):
            raise bad_request(f"{where}.role={message.role[:100]!r} is not allowed: user or assistant", f"{where}.role")
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(message.content, where))
        else:
            messages += _user(message, message.content, where)
    return messages


def _assistant(blocks: list[ContentBlock], where: str) -> dict[str, Any]:
    own = ("thinking", "redacted_thinking", "tool_use")
    thoughts = [block.thinking or "" for block in blocks if block.type == "thinking"]
    return {
        "role": "assistant",
        "content": _content(blocks, f"{where}.content", own),
        "reasoning": "\n".join(thoughts) or None,
        "tool_calls": [_call(block) for block in blocks if block.type == "tool_use"],
    }


def _call(block: ContentBlock) -> dict[str, Any]:
    arguments = block.input
    if isinstance(arguments, dict) and list(arguments) == [INVALID_JSON]:
        arguments = arguments[INVALID_JSON]
    return {"id": block.id, "type": "function", "function": {"name": block.name or "", "arguments": arguments}}


def _user(message: InputMessage, blocks: list[ContentBlock], where: str) -> list[dict[str, Any]]:
    """The results of tools first, as the template expects them after the calls; then the text."""
    messages: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        if block.type == "tool_result":
            content = _result(block, f"{where}.content[{index}].content")
            messages.append({"role": "tool", "content": content, "tool_call_id": block.tool_use_id})
    if any(block.type != "tool_result" for block in blocks):
        content = _content(blocks, f"{where}.content", ("tool_result",))
        messages.append({"role": message.role, "content": content})
    return messages


def _result(block: ContentBlock, where: str) -> str | list[dict[str, Any]]:
    """What a tool has returned. Templates know no failures, so the text says that it is one."""
    content = block.content if isinstance(block.content, str) else _content(block.content or [], where)
    if not block.is_error:
        return content
    text = text_of(content)
    return f"{ERROR}{text}" if text else ERROR.strip(": ")


def _content(blocks: list[ContentBlock], where: str, others: tuple[str, ...] = ()) -> str | list[dict[str, Any]]:
    """The content of a chat's message: text, or several parts. others: types of blocks that are not part of it."""
    parts = []
    for index, block in enumerate(blocks):
        if block.type in others:
            continue
        if block.type != "text" or block.text is None:
            place = f"{where}[{index}]"
            problem = f"{place} is a block of type {block.type[:100]!r}: only text blocks are understood there"
            raise bad_request(problem, place)
        parts.append({"type": "text", "text": block.text})
    return text_of(parts) if len(parts) < 2 else parts


def _tools(body: CountTokensRequest) -> list[dict[str, Any]] | None:
    """Tools of chats, their keys in the order that models know."""
    tools = []
    for tool in body.tools or ():
        check_fields(tool)
        if tool.type not in (None, "custom"):
            raise bad_request(f"a tool of type {tool.type[:100]!r} is not supported: tools of your own are", "tools")
        tools.append(function_tool(tool.name, tool.description, tool.input_schema, tool.strict))
    return tools or None


def _choice(choice: MessagesToolChoice) -> str | NamedToolChoice:
    if choice.type == "tool":
        return NamedToolChoice(function=FunctionName(name=choice.name or ""))
    names = {"auto": "auto", "any": "required", "none": "none"}
    if choice.type not in names:
        problem = f"tool_choice.type={choice.type[:100]!r} is not allowed: auto, any, tool or none"
        raise bad_request(problem, "tool_choice")
    return names[choice.type]


messages_decoder = msgspec.json.Decoder(MessagesRequest)
count_decoder = msgspec.json.Decoder(CountTokensRequest)
