"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request

from kvllm.outputs import CompletionOutput, RequestOutput
from kvllm.serving.constraint import constraint
from kvllm.serving.context import RequestContext, read_request
from kvllm.serving.errors import bad_request
from kvllm.serving.generation import EncodedPrompt, Generation
from kvllm.serving.kept_routes import kept
from kvllm.serving.logprobs import LogprobLister, Position, TokenNames, prompt_logprobs
from kvllm.serving.prompts import completion_prompts, max_tokens
from kvllm.serving.protocol import (
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from kvllm.serving.sampling import check_generation, num_logprobs, streamed_usage
from kvllm.serving.sse import Write, event, respond, write_out

DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = 4096
decoder = msgspec.json.Decoder(CompletionRequest)


async def create(request: Request) -> Any:
    """Complete prompts: at once, or as a stream of events."""
    context, body = await read_request(request, decoder)
    check_generation(body)
    answer = CompletionAnswer(context, body, await completion_prompts(context.state, body))
    return kept(request, await respond(request, answer, body.stream))


class CompletionAnswer:
    """The answer to one request: choice i * n + j is completion j of prompt i."""

    def __init__(self, context: RequestContext, body: CompletionRequest, prompts: list[EncodedPrompt]) -> None:
        state = context.state
        self._body = body
        self._options = state.options
        self._head = context.head("cmpl", body)
        self._n = body.n or 1
        self._most = num_logprobs(body, state.llm.config.max_logprobs)
        self._names = TokenNames(state, body)
        if len(prompts) * self._n > MAX_CHOICES:
            raise bad_request(f"{len(prompts)} prompts with n={self._n} are more than {MAX_CHOICES} completions", "n")
        asked = [max_tokens(state, prompt, body.max_tokens, DEFAULT_MAX_TOKENS) for prompt in prompts]
        if body.max_tokens == 0 and not body.echo:
            raise bad_request("max_tokens=0 is not allowed: at least 1, or 0 with echo", "max_tokens")
        of_prompt = self._most if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
        if body.max_tokens == 0 and of_prompt is None:
            of_prompt = 0  # an engine that generates nothing has to compute something
        own = {"logprobs": self._most, "prompt_logprobs": of_prompt, "structured_outputs": constraint(body)}
        self._generation = Generation(context, body, prompts, asked, **own)
        count = len(prompts) * self._n
        self._listers = [LogprobLister(self._names, self._most or 0) for _ in range(count)]
        self._has_prompt = [False] * count

    async def complete(self) -> CompletionResponse:
        """The whole answer."""
        choices = [self._empty(index) for index in range(len(self._has_prompt))]

        def receive(number: int, output: RequestOutput) -> None:
            for piece in self._pieces(number, output):
                _extend(choices[piece.index], piece)

        await self._generation.deliver(receive)
        return CompletionResponse(**self._head, choices=choices, usage=self._generation.usage())

    async def stream(self, write: Write) -> None:
        """Write the chunks of a stream."""
        include_usage, continuous = streamed_usage(self._body.stream_options, self._options)

        def receive(number: int, output: RequestOutput) -> Awaitable[None] | None:
            pieces = self._pieces(number, output)
            if not pieces:
                return None
            usage = self._generation.usage() if continuous else None if include_usage else UNSET
            return write(b"".join(self._chunk([piece], usage) for piece in pieces))

        await self._generation.deliver(receive)
        if include_usage:
            await write_out(write, self._chunk([], self._generation.usage()))

    def _chunk(self, choices: list[CompletionChoice], usage: Any) -> bytes:
        return event(msgspec.json.encode(CompletionChunk(**self._head, choices=choices, usage=usage)))

    def _empty(self, index: int) -> CompletionChoice:
        logprobs = CompletionLogprobs([], [], [], []) if self._most is not None else None
        choice = CompletionChoice(index=index, text="", logprobs=logprobs)
        if self._body.return_token_ids:
            choice.token_ids = []
        return choice

    def _pieces(self, number: int, output: RequestOutput) -> list[CompletionChoice]:
        """What an output of prompt `number` adds to its choices."""
        return [self._piece(number, completion, output) for completion in output.outputs]

    def _piece(self, number: int, completion: CompletionOutput, output: RequestOutput) -> CompletionChoice:
        piece = self._empty(number * self._n + completion.index)
        if not self._has_prompt[piece.index]:
            self._has_prompt[piece.index] = True
            self._add_prompt(number, piece, output)
        piece.text += completion.text
        if piece.logprobs is not None and completion.logprobs is not None:
            own: list[Position] = list(completion.logprobs)
            _append(piece.logprobs, self._listers[piece.index].push(completion.token_ids, own))
        if self._body.return_token_ids:
            piece.token_ids = completion.token_ids
        piece.finish_reason, piece.stop_reason = completion.finish_reason, completion.stop_reason
        return piece

    def _add_prompt(self, number: int, piece: CompletionChoice, output: RequestOutput) -> None:
        """What a choice begins with."""
        prompt = self._generation.prompts[number]
        if self._body.return_token_ids:
            piece.prompt_token_ids = prompt.token_ids
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            piece.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        if self._body.echo:
            piece.text = self._names.text(prompt.token_ids) if prompt.text is None else prompt.text
            if piece.logprobs is not None and output.prompt_logprobs is not None:
                missing = len(prompt.token_ids) - len(output.prompt_logprobs)  # of a request that was aborted
                found = output.prompt_logprobs + [None] * missing
                _append(piece.logprobs, self._listers[piece.index].push(prompt.token_ids, found))


def _extend(choice: CompletionChoice, piece: CompletionChoice) -> None:
    """Add a piece to a choice."""
    choice.text += piece.text
    if choice.logprobs is not None and piece.logprobs is not None:
        _append(choice.logprobs, piece.logprobs)
    if choice.token_ids is not None:
        choice.token_ids += piece.token_ids or []
    choice.prompt_logprobs = choice.prompt_logprobs or piece.prompt_logprobs
    choice.prompt_token_ids = choice.prompt_token_ids or piece.prompt_token_ids
    choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason


def _append(logprobs: CompletionLogprobs, piece: CompletionLogprobs) -> None:
    for name in logprobs.__struct_fields__:
        getattr(logprobs, name).extend(getattr(piece, name))
