"""Bodies of POST /v1/messages, as Anthropic's clients send them, and the chat that each of them is."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from kvllm.chat_messages import function_tool, text_of
from kvllm.serving.errors import bad_request
from kvllm.serving.protocol import ChatCompletionRequest, CompressionOptions, FunctionName, NamedToolChoice

INVALID_JSON = "INVALID_JSON"
"""The only key of an input that stands for arguments which are no JSON of an object; its value is their text."""


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


class MessagesToolChoice(Struct, kw_only=True):
    """type: auto, any, tool (by name) or none."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True):
    """type: enabled, adaptive or disabled. Its budget has no effect."""

    type: str


class CountTokensRequest(Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""

    model: str
    messages: list[InputMessage]
    system: str | list[ContentBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None


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
    chat = ChatCompletionRequest(model=body.model, messages=_messages(body), tools=_tools(body))
    if body.tools and body.tool_choice is not None:
        chat.tool_choice = _choice(body.tool_choice)
        chat.parallel_tool_calls = not body.tool_choice.disable_parallel_tool_use
    if body.thinking is not None:
        chat.chat_template_kwargs = {"enable_thinking": body.thinking.type != "disabled"}
    if isinstance(body, MessagesRequest):
        if body.max_tokens < 1:
            raise bad_request(f"max_tokens={body.max_tokens} is not allowed: at least 1", "max_tokens")
        chat.stop = body.stop_sequences
        for name in ("max_tokens", "temperature", "top_p", "top_k", "seed", "priority", "cache_salt", "compression"):
            setattr(chat, name, getattr(body, name))
    return chat


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
    texts = [block for block in blocks if block.type not in ("thinking", "redacted_thinking", "tool_use")]
    thoughts = [block.thinking or "" for block in blocks if block.type == "thinking"]
    return {
        "role": "assistant",
        "content": _content(texts, where),
        "reasoning": "\n".join(thoughts) or None,
        "tool_calls": [_call(block) for block in blocks if block.type == "tool_use"],
    }


def _call(block: ContentBlock) -> dict[str, Any]:
    arguments = block.input
    if isinstance(arguments, dict) and list(arguments) == [INVALID_JSON]:
        arguments = arguments[INVALID_JSON]
    return {"id": block.id, "type": "function", "function": {"name": block.name or "", "arguments": arguments}}


def _user(message: InputMessage, blocks: list[ContentBlock], where: str) -> list[dict[str, Any]]:
    """The results of tools first, as the template expects them behind the calls; then the text."""
    results = [block for block in blocks if block.type == "tool_result"]
    messages: list[dict[str, Any]] = []
    for block in results:
        content = block.content if isinstance(block.content, str) else _content(block.content or [], where)
        messages.append({"role": "tool", "content": content, "tool_call_id": block.tool_use_id})
    if texts := [block for block in blocks if block.type != "tool_result"]:
        messages.append({"role": message.role, "content": _content(texts, where)})
    return messages


def _content(blocks: list[ContentBlock], where: str) -> str | list[dict[str, Any]]:
    """The content of a chat's message: text, or several parts."""
    for block in blocks:
        if block.type != "text" or block.text is None:
            problem = f"{where} has a block of type {block.type[:100]!r}: only text blocks are understood there"
            raise bad_request(problem, f"{where}.content")
    parts = [{"type": "text", "text": block.text} for block in blocks]
    return text_of(parts) if len(parts) < 2 else parts


def _tools(body: CountTokensRequest) -> list[dict[str, Any]] | None:
    """Tools of chats, their keys in the order that models know."""
    tools = []
    for tool in body.tools or ():
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
