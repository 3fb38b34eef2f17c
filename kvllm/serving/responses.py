"""POST /v1/responses: OpenAI's newer API over the same chats."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Iterator
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request

from kvllm.outputs import CompletionOutput
from kvllm.serving.blocks import Block, BlockStep, BlockWriter
from kvllm.serving.chat import ChatAnswer, prepare
from kvllm.serving.chat_format import MessagePart
from kvllm.serving.context import RequestContext, read_request
from kvllm.serving.prompts import drop_earliest
from kvllm.serving.responses_protocol import (
    InputItem,
    Reasoning,
    ResponsesRequest,
    ResponsesTool,
    TextFormat,
    chat_of,
    custom_input,
    decoder,
)
from kvllm.serving.sse import Write, named_event, respond, write_out
from kvllm.serving.stored_responses import StoredResponse, earlier_items, listed_items, without_references

ID_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc", "custom": "ctc"}


class ResponsesResponse(Struct, kw_only=True):
    """Answer of /v1/responses, and its state in the events of a stream. output: items of type reasoning, message,
    function_call and custom_tool_call."""

    id: str
    created_at: int
    model: str
    output: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    tool_choice: Any
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: Reasoning
    status: str = "in_progress"
    usage: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] = {}
    error: None = None
    previous_response_id: str | None = None
    background: bool = False
    store: bool = True
    truncation: str = "disabled"
    object: str = "response"


async def create(request: Request) -> Any:
    """Answer: at once, or as a stream of events."""
    context, body = await read_request(request, decoder)
    earlier = await earlier_items(context, body)
    body.input = items = await without_references(context, body)
    chat = chat_of(body, earlier)
    if body.truncation == "auto":
        await drop_earliest(context.state, chat)
    answer = ResponsesAnswer(await prepare(context, chat), context, body, items)
    return await respond(request, answer, body.stream, done=b"")


class ResponsesAnswer:
    """A chat's answer in the form of the API of responses."""

    def __init__(
        self, chat: ChatAnswer, context: RequestContext, body: ResponsesRequest, items: list[InputItem]
    ) -> None:
        self._chat = chat
        self._store, self._tenant = context.state.responses, context.tenant
        self._name = context.request_id
        while not self._store.claim(self._tenant, f"resp_{self._name}", self):  # the client may have chosen it
            self._name = f"{context.request_id}-{next(context.state.numbers)}"
        self._items = items
        self._custom = {tool.name for tool in body.tools or () if tool.type == "custom"}
        self._writer = BlockWriter()
        self._finish_reason: str | None = None
        self._number = 0
        wanted = body.text.format if body.text and body.text.format else TextFormat()
        self._response = ResponsesResponse(
            id=f"resp_{self._name}",
            created_at=int(time.time()),
            model=body.model or context.state.model_name,
            output=[],
            tools=[_shown_tool(tool) for tool in body.tools or ()],
            tool_choice=body.tool_choice or "auto",
            parallel_tool_calls=body.parallel_tool_calls is not False,
            text={"format": {name: value for name, value in msgspec.to_builtins(wanted).items() if value is not None}},
            reasoning=body.reasoning or Reasoning(),
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_logprobs=body.top_logprobs,
            metadata=body.metadata or {},
            previous_response_id=body.previous_response_id,
            store=body.store is not False,
            truncation=body.truncation or "disabled",
        )

    async def complete(self) -> bytes:
        """The whole answer, as JSON."""

        def receive(part: MessagePart, completion: CompletionOutput) -> None:
            self._push(part, completion)

        await self._chat.deliver(receive)
        self._writer.finish()
        return self._keep(self._finished())

    async def stream(self, write: Write) -> None:
        """Write the events of a stream. They begin once the engine has taken the request: a refusal has a status of
        its own."""

        def receive(part: MessagePart, completion: CompletionOutput) -> Awaitable[None] | None:
            data = self._events(self._push(part, completion))
            return write(data) if data else None

        await self._chat.deliver(receive)
        data = self._events(self._writer.finish(), self._last_status) if self._number else self._begin()
        response = self._finished()
        data += self._event(f"response.{response.status}", response=msgspec.Raw(self._keep(response)))
        await write_out(write, data)

    def _begin(self) -> bytes:
        states = ("created", "in_progress")
        return b"".join(self._event(f"response.{state}", response=self._response) for state in states)

    def _push(self, part: MessagePart, completion: CompletionOutput) -> list[BlockStep]:
        logprobs = self._chat.logprobs(completion)
        self._finish_reason = self._chat.finish_reason(completion) or self._finish_reason
        return self._writer.push(part, logprobs.content if logprobs else ())

    @property
    def _last_status(self) -> str:
        """Of the item that is open when the answer ends."""
        return "incomplete" if self._finish_reason in ("length", "abort") else "completed"

    def _events(self, steps: list[BlockStep], status: str = "completed") -> bytes:
        """status: of items that these steps end."""
        data = self._begin() if steps and not self._number else b""
        events = (self._event(name, **fields) for step in steps for name, fields in self._of_step(step, status))
        return data + b"".join(events)

    def _finished(self) -> ResponsesResponse:
        """The response as it is at its end."""
        response = self._response
        response.status = self._last_status
        if self._finish_reason == "length":
            response.incomplete_details = {"reason": "max_output_tokens"}
        response.output = [self._item(block, "completed") for block in self._writer.blocks]
        if response.output:
            response.output[-1]["status"] = self._last_status
        usage = self._chat.usage()
        details = usage.completion_tokens_details
        response.usage = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": details.reasoning_tokens if details else 0},
            "total_tokens": usage.total_tokens,
            "kvllm": usage.kvllm,
        }
        return response

    def _keep(self, response: ResponsesResponse) -> bytes:
        """The response as JSON, which later requests find if it is to be stored."""
        body = msgspec.json.encode(response)
        if response.store:
            items = listed_items(self._items, self._name)
            ids = tuple(item["id"] for item in (*items, *response.output))
            previous = response.previous_response_id
            stored = StoredResponse(response.id, body, msgspec.json.encode(items), ids, previous)
            self._store.put(self._tenant, stored)
        return body

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return named_event(kind, msgspec.json.encode(data))

    def _of_step(self, step: BlockStep, status: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """The events of what happens to an item: their types, and their fields. status: of one that ends."""
        block = step.block
        place: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind != "call":
            place["content_index"] = 0
        name = {"text": "response.output_text", "reasoning": "response.reasoning_text"}.get(
            block.kind, "response.function_call_arguments"
        )
        if step.what == "delta":
            if self._is_custom(block):  # its input is inside the JSON of the arguments: it is told at the end
                return
            extra = {"logprobs": step.logprobs} if block.kind == "text" else {}
            yield f"{name}.delta", place | {"delta": step.text} | extra
            return
        if step.what == "start":
            item = self._item(block, "in_progress", is_empty=True)
            yield "response.output_item.added", {"output_index": block.index, "item": item}
            if block.kind != "call":
                yield "response.content_part.added", place | {"part": _part(block, is_empty=True)}
            return
        if self._is_custom(block):
            text = custom_input(block.text)
            yield "response.custom_tool_call_input.delta", place | {"delta": text}
            yield "response.custom_tool_call_input.done", place | {"input": text}
        elif block.kind == "call":
            yield f"{name}.done", place | {"name": block.name, "arguments": block.text}
        else:
            extra = {"logprobs": block.logprobs} if block.kind == "text" else {}
            yield f"{name}.done", place | {"text": block.text} | extra
            yield "response.content_part.done", place | {"part": _part(block)}
        item = self._item(block, status)
        yield "response.output_item.done", {"output_index": block.index, "item": item}

    def _item_id(self, block: Block) -> str:
        kind = "custom" if self._is_custom(block) else block.kind
        return f"{ID_PREFIXES[kind]}_{self._name}_{block.index}"

    def _is_custom(self, block: Block) -> bool:
        return block.kind == "call" and block.name in self._custom

    def _item(self, block: Block, status: str, is_empty: bool = False) -> dict[str, Any]:
        """An item of the output. is_empty: as its stream begins."""
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        content = [] if is_empty else [_part(block)]
        if self._is_custom(block):
            text = "" if is_empty else custom_input(block.text)
            own = {"type": "custom_tool_call", "call_id": block.call_id, "name": block.name, "input": text}
        elif block.kind == "call":
            arguments = "" if is_empty else block.text
            own = {"type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": arguments}
        elif block.kind == "reasoning":
            own = {"type": "reasoning", "summary": [], "content": content}
        else:
            own = {"type": "message", "role": "assistant", "content": content}
        return item | own


def _shown_tool(tool: ResponsesTool) -> dict[str, Any]:
    """A tool as answers have it."""
    names = ("type", "name", "description", "format" if tool.type == "custom" else "parameters")
    shown = {name: getattr(tool, name) for name in names}
    return shown if tool.type == "custom" else shown | {"strict": tool.strict}


def _part(block: Block, is_empty: bool = False) -> dict[str, Any]:
    """The content of an item. is_empty: as its stream begins."""
    text = "" if is_empty else block.text
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": [] if is_empty else block.logprobs}
