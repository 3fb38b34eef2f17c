"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request

from kvllm.outputs import CompletionOutput, RequestOutput
from kvllm.serving.chat_format import ChatFormat, MessagePart, continued_text
from kvllm.serving.context import RequestContext, read_request
from kvllm.serving.errors import bad_request
from kvllm.serving.generation import EncodedPrompt, Generation
from kvllm.serving.kept_routes import kept
from kvllm.serving.logprobs import Position, TokenNames, chat_logprobs, prompt_logprobs
from kvllm.serving.prompts import chat_prompt, max_tokens, truncation
from kvllm.serving.protocol import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatLogprobs,
    Message,
    MessageDelta,
    Usage,
)
from kvllm.serving.sampling import check_generation, num_logprobs, streamed_usage
from kvllm.serving.sse import Write, event, respond, write_out
from kvllm.serving.tool_choice import tool_choice, with_usable_schemas

decoder = msgspec.json.Decoder(ChatCompletionRequest)


async def create(request: Request) -> Any:
    """Answer a conversation: at once, or as a stream of events."""
    context, body = await read_request(request, decoder)
    return kept(request, await respond(request, await prepare(context, body), body.stream))


async def prepare(context: RequestContext, body: ChatCompletionRequest) -> ChatAnswer:
    """Check a request, and make its prompt. Raises ApiError, RequestError and ConfigError."""
    check_generation(body)
    state = context.state
    tools = tool_choice(body, state.options)
    tools = await with_usable_schemas(tools, state.llm.check_rule, state.tokenizer.added_token_ids.get)
    if body.max_completion_tokens is not None:
        body.max_tokens = body.max_completion_tokens
    if body.max_tokens == 0:
        raise bad_request("max_tokens=0 is not allowed: at least 1", "max_tokens")
    prompt = await chat_prompt(state, body, body.messages, truncation(state, body))
    return ChatAnswer(context, body, prompt, ChatFormat(state, body, tools, prompt.text or ""))


class ChatAnswer:
    """The answer to one request, with `n` choices."""

    def __init__(
        self, context: RequestContext, body: ChatCompletionRequest, prompt: EncodedPrompt, chat_format: ChatFormat
    ) -> None:
        state = context.state
        self._format = chat_format
        self._parsers = [chat_format.parser() for _ in range(body.n or 1)]
        self._body = body
        self._prompt = prompt
        self._head = context.head("chatcmpl", body)
        self._most = num_logprobs(body, state.llm.config.max_logprobs)
        self._names = TokenNames(state, body)
        self._options = state.options
        number = max_tokens(state, prompt, body.max_tokens, state.sampling_defaults.get("max_tokens"))
        self._generation = Generation(context, body, [prompt], [number], logprobs=self._most, **chat_format.sampling())

    async def complete(self) -> ChatCompletionResponse:
        """The whole answer."""
        choices = [self._empty(index) for index in range(self._body.n or 1)]
        of_prompt: list[Position] | None = None

        def receive(_: int, output: RequestOutput) -> None:
            nonlocal of_prompt
            of_prompt = of_prompt or output.prompt_logprobs
            for completion in output.outputs:
                self._extend(choices[completion.index], completion)

        await self._generation.deliver(receive)
        for choice in choices:
            _leave_out_what_is_empty(choice.message)
        response = ChatCompletionResponse(**self._head, choices=choices, usage=self.usage())
        if self._body.prompt_logprobs is not None and of_prompt is not None:
            response.prompt_logprobs = prompt_logprobs(of_prompt)
        if self._body.return_token_ids:
            response.prompt_token_ids = self._prompt.token_ids
        return response

    async def deliver(self, receive: Callable[[MessagePart, CompletionOutput], Awaitable[None] | None]) -> None:
        """Call `receive` with what is new of the only choice: of its message, and the completion that it comes from."""

        def parse(_: int, output: RequestOutput) -> Awaitable[None] | None:
            return receive(self._parse(output.outputs[0]), output.outputs[0]) if output.outputs else None

        await self._generation.deliver(parse)

    async def stream(self, write: Write) -> None:
        """Write the chunks of a stream: the role first, then what the model writes."""
        include_usage, continuous = streamed_usage(self._body.stream_options, self._options)
        first = self._first_choices()

        def receive(_: int, output: RequestOutput) -> Awaitable[None] | None:
            choices = self._chunk_choices(output)
            if not (first or choices):
                return None
            usage = self.usage() if continuous else None if include_usage else UNSET
            data = b"".join(self._first_chunk(choice, usage) for choice in first)
            first.clear()
            return write(data + b"".join(self._chunk([choice], usage) for choice in choices))

        await self._generation.deliver(receive)
        if include_usage:
            await write_out(write, self._chunk([], self.usage()))

    def _chunk(self, choices: list[ChatChunkChoice], usage: Any, **first: Any) -> bytes:
        return event(msgspec.json.encode(ChatCompletionChunk(**self._head, choices=choices, usage=usage, **first)))

    def _first_chunk(self, choice: ChatChunkChoice, usage: Any) -> bytes:
        usage = usage.before_output() if usage else usage
        ids = self._prompt.token_ids if self._body.return_token_ids else None
        return self._chunk([choice], usage, prompt_token_ids=ids)

    def _first_choices(self) -> list[ChatChunkChoice]:
        """The role of each choice, and the message that is continued if it is to be echoed."""
        delta = MessageDelta(role="assistant", content=self._echo())
        return [ChatChunkChoice(index=index, delta=delta) for index in range(self._body.n or 1)]

    def _chunk_choices(self, output: RequestOutput) -> list[ChatChunkChoice]:
        choices = []
        for completion in output.outputs:
            part = self._parse(completion)
            choice = ChatChunkChoice(
                index=completion.index,
                delta=_delta(part),
                logprobs=self.logprobs(completion),
                finish_reason=self.finish_reason(completion),
            )
            if completion.finish_reason is not None:
                choice.stop_reason = completion.stop_reason
            if self._body.return_token_ids:
                choice.token_ids = completion.token_ids
            if part or choice.finish_reason or choice.logprobs or choice.token_ids:  # else the text is held back
                choices.append(choice)
        return choices

    def _parse(self, completion: CompletionOutput) -> MessagePart:
        """What is new of a completion, as parts of a message."""
        parser = self._parsers[completion.index]
        part = parser.push(completion.text, completion.token_ids)
        if completion.finish_reason is not None:
            part += parser.finish()
        return self._format.shown(part)

    def finish_reason(self, completion: CompletionOutput) -> str | None:
        """Why a completion has ended, None if it has not."""
        called = completion.finish_reason == "stop" and self._parsers[completion.index].has_calls
        return "tool_calls" if called else completion.finish_reason

    def usage(self) -> Usage:
        """What has been used so far."""
        thinks = self._format.tags is not None
        return self._generation.usage(sum(parser.reasoning_tokens for parser in self._parsers) if thinks else None)

    def _empty(self, index: int) -> ChatChoice:
        choice = ChatChoice(index=index, message=Message(role="assistant", content=self._echo()))
        if self._most is not None:
            choice.logprobs = ChatLogprobs([])
        if self._body.return_token_ids:
            choice.token_ids = []
        return choice

    def _extend(self, choice: ChatChoice, completion: CompletionOutput) -> None:
        """Add what is new of a completion."""
        _add(choice.message, self._parse(completion))
        if choice.logprobs is not None and (piece := self.logprobs(completion)) is not None:
            choice.logprobs.content += piece.content
        if choice.token_ids is not None:
            choice.token_ids += completion.token_ids
        choice.finish_reason, choice.stop_reason = self.finish_reason(completion), completion.stop_reason

    def logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        """Those of what is new of a completion, None if they were not asked for."""
        if self._most is None or completion.logprobs is None:
            return None
        return ChatLogprobs(chat_logprobs(self._names, completion.token_ids, completion.logprobs, self._most))

    def _echo(self) -> str:
        """The text of the last message, if it is continued and to be given back."""
        return continued_text(self._body) if self._body.echo else ""


def _delta(part: MessagePart) -> MessageDelta:
    """What is new of a message, in a chunk. Clients know one or the other name of the thought."""
    message = MessageDelta()
    if part.content:
        message.content = part.content
    if part.reasoning:
        message.reasoning = message.reasoning_content = part.reasoning
    if part.tool_calls:
        message.tool_calls = part.tool_calls
    return message


def _add(message: Message, part: MessagePart) -> None:
    """Add a part to a whole message."""
    message.content = (message.content or "") + part.content
    if part.reasoning:
        message.reasoning = message.reasoning_content = (message.reasoning or "") + part.reasoning
    if part.tool_calls and message.tool_calls is UNSET:
        message.tool_calls = []
    for call in part.tool_calls:
        assert message.tool_calls is not UNSET
        if call.id is UNSET:
            message.tool_calls[-1].function.arguments += call.function.arguments
        else:
            call.index = UNSET  # it belongs to streams
            message.tool_calls.append(call)


def _leave_out_what_is_empty(message: Message) -> None:
    """A message without text has no content beside a thought or calls."""
    if not message.content and (message.reasoning or message.tool_calls):
        message.content = None
