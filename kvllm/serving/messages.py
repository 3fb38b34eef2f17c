"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the same chats."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from kvllm.outputs import CompletionOutput
from kvllm.serving.blocks import Block, BlockStep, BlockWriter
from kvllm.serving.bodies import json_response
from kvllm.serving.chat import ChatAnswer, prepare
from kvllm.serving.chat_format import MessagePart
from kvllm.serving.context import read_request
from kvllm.serving.errors import ApiError, ContextTooLong, unavailable
from kvllm.serving.messages_protocol import INVALID_JSON, chat_of, count_decoder, messages_decoder
from kvllm.serving.prompts import chat_prompt
from kvllm.serving.protocol import Usage
from kvllm.serving.sse import Write, named_event, respond, write_out
from kvllm.serving.tool_choice import tool_choice
from kvllm.serving.tool_parsers.json_calls import clean

PATH = "/v1/messages"
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class TokenCount(Struct):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int


class MessagesResponse(Struct, kw_only=True):
    """Answer of /v1/messages. content: blocks of type thinking, text and tool_use."""

    id: str
    model: str
    content: list[dict[str, Any]]
    usage: dict[str, Any]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    type: str = "message"
    role: str = "assistant"


class MessagesErrorDetail(Struct):
    """What is wrong."""

    type: str
    message: str


class MessagesError(Struct, kw_only=True):
    """Every answer of these routes that is an error."""

    error: MessagesErrorDetail
    type: str = "error"


async def create(request: Request) -> Any:
    """Answer a conversation: at once, or as a stream of events."""
    context, body = await read_request(request, messages_decoder)
    answer = MessagesAnswer(await prepare(context, chat_of(body)), f"msg_{context.request_id}", body.model)
    return await respond(request, answer, body.stream, done=b"", failure=failure_event)


async def count_tokens(request: Request) -> Response:
    """The number of tokens that a conversation has after the chat template."""
    context, body = await read_request(request, count_decoder)
    chat = chat_of(body)
    tool_choice(chat, context.state.options)
    prompt = await chat_prompt(context.state, chat, chat.messages)
    return json_response(TokenCount(len(prompt.token_ids)))


class MessagesAnswer:
    """A chat's answer in the form of Anthropic's API."""

    def __init__(self, chat: ChatAnswer, message_id: str, model: str) -> None:
        self._chat = chat
        self._id = message_id
        self._model = model
        self._writer = BlockWriter()
        self._end: tuple[str | None, str | None] = None, None  # stop_reason, stop_sequence

    async def complete(self) -> MessagesResponse:
        """The whole answer."""

        def receive(part: MessagePart, completion: CompletionOutput) -> None:
            self._writer.push(part)
            self._note_end(completion)

        await self._chat.deliver(receive)
        content = [_content(block) for block in self._writer.blocks]
        return self._message(content, self._chat.usage())

    async def stream(self, write: Write) -> None:
        """Write the events of a stream."""
        begun = False

        def receive(part: MessagePart, completion: CompletionOutput) -> Awaitable[None] | None:
            nonlocal begun
            data = b""
            if not begun:
                begun = True
                data = _event("message_start", message=self._message([], self._chat.usage().before_output()))
            data += b"".join(map(_block_event, self._writer.push(part)))
            self._note_end(completion)
            return write(data) if data else None

        await self._chat.deliver(receive)
        reason, sequence = self._end
        usage = _usage(self._chat.usage())
        end = [*map(_block_event, self._writer.finish())]
        end.append(_event("message_delta", delta={"stop_reason": reason, "stop_sequence": sequence}, usage=usage))
        await write_out(write, b"".join([*end, _event("message_stop")]))

    def _message(self, content: list[dict[str, Any]], usage: Usage) -> MessagesResponse:
        reason, sequence = self._end
        return MessagesResponse(
            id=self._id,
            model=self._model,
            content=content,
            usage=_usage(usage),
            stop_reason=reason,
            stop_sequence=sequence,
        )

    def _note_end(self, completion: CompletionOutput) -> None:
        reason = self._chat.finish_reason(completion)
        if reason is None:
            return
        if reason == "abort":  # the API has no name for half an answer
            raise unavailable("the answer was ended before it was complete: the server stops, or somebody cancelled it")
        sequence = completion.stop_reason if isinstance(completion.stop_reason, str) else None
        self._end = "stop_sequence" if sequence is not None else STOP_REASONS[reason], sequence


def _usage(usage: Usage) -> dict[str, Any]:
    """Tokens; those that the prefix cache had are counted apart."""
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "output_tokens": usage.completion_tokens,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "kvllm": usage.kvllm,
    }


def error_body(error: ApiError) -> bytes:
    """An error in the form of Anthropic's API."""
    kind = ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = _too_long(error) if isinstance(error, ContextTooLong) else error.message
    return msgspec.json.encode(MessagesError(error=MessagesErrorDetail(kind, message)))


def _too_long(error: ContextTooLong) -> str:
    """In Anthropic's words, which clients look for."""
    if error.asked is None or error.tokens > error.longest:
        return f"prompt is too long: {error.tokens} tokens > {error.longest} maximum"
    problem = f"{error.tokens} + {error.asked} > {error.longest}, decrease input length or `max_tokens` and try again"
    return f"input length and `max_tokens` exceed context limit: {problem}"


def failure_event(error: ApiError) -> bytes:
    """The event of an error after the beginning of a stream."""
    return named_event("error", error_body(error))


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, msgspec.json.encode({"type": kind, **fields}))


def _block_event(step: BlockStep) -> bytes:
    block = step.block
    if step.what == "start":
        return _event("content_block_start", index=block.index, content_block=_content(block, is_empty=True))
    if step.what == "stop":
        return _event("content_block_stop", index=block.index)
    if block.kind == "call":
        delta = {"type": "input_json_delta", "partial_json": step.text}
    elif block.kind == "text":
        delta = {"type": "text_delta", "text": step.text}
    else:
        delta = {"type": "thinking_delta", "thinking": step.text}
    return _event("content_block_delta", index=block.index, delta=delta)


def _content(block: Block, is_empty: bool = False) -> dict[str, Any]:
    """The block as clients have it. is_empty: as its stream begins."""
    text = "" if is_empty else block.text
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": text}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {} if is_empty else tool_input(text)}


def tool_input(arguments: str) -> msgspec.Raw | dict[str, str]:
    """The arguments of a call. What is no object, which a model without a rule may write, is given as text.

    Halves of surrogate pairs are replaced, because clients could not send them back.
    """
    try:
        found = json.loads(arguments or "{}")
        text = clean(json.dumps(found, ensure_ascii=False, allow_nan=False))
    except (ValueError, RecursionError):
        return {INVALID_JSON: arguments}
    return msgspec.Raw(text.encode()) if isinstance(found, dict) else {INVALID_JSON: arguments}
