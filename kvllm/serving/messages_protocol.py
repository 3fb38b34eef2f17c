"""Bodies of POST /v1/messages, as Anthropic's clients send them, and the chat that each of them is."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from kvllm.serving.errors import bad_request
from kvllm.serving.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    CompressionOptions,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    NamedToolChoice,
    Tool,
    ToolCall,
)


class ContentBlock(Struct, kw_only=True):
    """A part of a message. type: text, thinking, tool_use, tool_result; fields as the type needs them."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
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


def _messages(body: CountTokensRequest) -> list[ChatMessage]:
    messages = []
    if body.system:
        system = body.system if isinstance(body.system, str) else _text(body.system, "system")
        messages.append(ChatMessage(role="system", content=system))
    for index, message in enumerate(body.messages):
        where = f"messages[{index}]"
        if message.role not in ("user", "assistant", "system"):
            raise bad_request(f"{where}.role={message.role[:100]!r} is not allowed: user or assistant", f"{where}.role")
        if isinstance(message.content, str):
            messages.append(ChatMessage(role=message.role, content=message.content))
        elif message.role == "assistant":
            messages.append(_assistant(message.content, where))
        else:
            messages += _user(message, message.content, where)
    return messages


def _assistant(blocks: list[ContentBlock], where: str) -> ChatMessage:
    texts = [block for block in blocks if block.type not in ("thinking", "redacted_thinking", "tool_use")]
    thoughts = [block.thinking or "" for block in blocks if block.type == "thinking"]
    calls = [
        ToolCall(id=block.id, function=FunctionCall(name=block.name or "", arguments=block.input or {}))
        for block in blocks
        if block.type == "tool_use"
    ]
    thought = "\n".join(thoughts) or None
    return ChatMessage(role="assistant", content=_text(texts, where), reasoning=thought, tool_calls=calls or None)


def _user(message: InputMessage, blocks: list[ContentBlock], where: str) -> list[ChatMessage]:
    """The results of tools first, as the template expects them behind the calls; then the text."""
    results = [block for block in blocks if block.type == "tool_result"]
    messages = []
    for block in results:
        content = block.content if isinstance(block.content, str) else _text(block.content or [], where)
        messages.append(ChatMessage(role="tool", content=content, tool_call_id=block.tool_use_id))
    if texts := [block for block in blocks if block.type != "tool_result"]:
        messages.append(ChatMessage(role=message.role, content=_text(texts, where)))
    return messages


def _text(blocks: list[ContentBlock], where: str) -> str:
    for block in blocks:
        if block.type != "text" or block.text is None:
            problem = f"{where} has a block of type {block.type[:100]!r}: only text blocks are understood there"
            raise bad_request(problem, f"{where}.content")
    return "\n".join(block.text or "" for block in blocks)


def _tools(body: CountTokensRequest) -> list[Tool] | None:
    tools = []
    for tool in body.tools or ():
        if tool.type not in (None, "custom"):
            raise bad_request(f"a tool of type {tool.type[:100]!r} is not supported: tools of your own are", "tools")
        function = FunctionDefinition(name=tool.name, description=tool.description, parameters=tool.input_schema)
        tools.append(Tool(function=function))
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
