"""The prompts of one HTTP request in the engine: admission, outputs as they come, usage, metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from kvllm.errors import RequestError
from kvllm.outputs import RequestMetrics, RequestOutput
from kvllm.prompts import Prompt
from kvllm.sampling_params import BeamSearchParams, SamplingParams
from kvllm.serving.responses import CompletionTokensDetails, CompressionUsage, PromptTokensDetails, Usage
from kvllm.serving.sampling import check_logprobs
from kvllm.serving.state import ServerState

Receive = Callable[[int, RequestOutput], Awaitable[None] | None]
"""Takes a delta and the number of its prompt. What it returns must have ended before it gets the next one."""
T = TypeVar("T")


@dataclass(slots=True)
class EncodedPrompt:
    """A prompt as the engine gets it. text: None if it came as token ids."""

    token_ids: list[int]
    text: str | None = None


@dataclass(slots=True)
class Origin:
    """Where a request comes from. tenant: the name of its key. cache_salt: None if its prefixes are shared with all."""

    request_id: str
    tenant: str
    priority: int
    cache_salt: str | None


@dataclass(slots=True)
class Progress:
    """How far a prompt is. Times are those of `time.monotonic`."""

    completions: int
    has_begun: bool = False
    num_tokens: int = 0
    last_token_time: dict[int, float] = field(default_factory=dict)
    unfinished: set[int] = field(default_factory=set)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    is_finished: bool = False


class Generation:
    """Runs prompts, each with its options, and counts what they produce."""

    def __init__(
        self,
        state: ServerState,
        origin: Origin,
        prompts: list[EncodedPrompt],
        params: list[SamplingParams],
        beams: list[BeamSearchParams] | None = None,
    ) -> None:
        """beams: one beam search for each prompt, of which the best `params.n` continuations are given.

        Raises ApiError if the answer may become too large.
        """
        lengths = [len(prompt.token_ids) for prompt in prompts]
        check_logprobs(lengths, params, state.max_model_len, state.llm.model_config.vocab_size)
        self._state = state
        self._origin = origin
        self.prompts = prompts
        self._params = params
        self._beams = beams
        self._progress = [Progress(each.n) for each in params]
        self._begin = time.monotonic()
        self.first_token_seconds: float | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def output_tokens(self) -> int:
        return sum(progress.num_tokens for progress in self._progress)

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Deltas, each with the number of its prompt.

        Closing the generator aborts what still runs.

        Raises:
            ApiError: the server does not take the request now.
            KvLLMError: the engine cannot serve it, or cannot serve it to its end.
        """
        with self._admitted():
            runs = [self._run(index) for index in range(len(self.prompts))]
            # Merging costs a task for each item, and most requests have one prompt.
            async with aclosing(runs[0] if len(runs) == 1 else merge(runs)) as outputs:
                async for index, output in outputs:
                    self._count(index, output)
                    yield index, output

    async def deliver(self, receive: Receive) -> None:
        """Call `receive` with what `outputs` would yield, at less cost. Raises what `outputs` and `receive` raise."""
        if len(self.prompts) > 1 or self._beams is not None:
            async with aclosing(self.outputs()) as outputs:
                async for index, output in outputs:
                    if (waiting := receive(index, output)) is not None:
                        await waiting
            return
        with self._admitted(), self._named(0) as (prompt, request_id, options):
            counted = partial(self._receive, receive)
            await self._state.llm.deliver(prompt, self._params[0], request_id, counted, **options)

    def usage(self, reasoning_tokens: int | None = None) -> Usage:
        """What has been used so far. reasoning_tokens: None if nobody has looked for a thought."""
        prompt, output = self.prompt_tokens, self.output_tokens
        metrics = [progress.metrics for progress in self._progress]
        missing = sum(each.missing_entries for each in metrics)
        pairs = output + sum(len(p.token_ids) * q.n for p, q in zip(self.prompts, self._params, strict=True))
        usage = Usage(
            prompt,
            output,
            prompt + output,
            PromptTokensDetails(sum(each.num_cached_tokens for each in metrics)),
            CompressionUsage(
                round(1 - missing / pairs, 4),
                sum(each.windows_compressed for each in metrics),
                sum(each.evicted_entries for each in metrics),
                sum(each.preemptions for each in metrics),
            ),
        )
        if reasoning_tokens is not None:
            usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens)
        return usage

    async def _run(self, index: int) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        llm = self._state.llm
        with self._named(index) as (prompt, request_id, options):
            if self._beams is not None:
                found = await llm.beam_search(prompt, self._beams[index], request_id, **options)
                del found.outputs[self._params[index].n :]
                yield index, found
                return
            async with aclosing(llm.generate(prompt, self._params[index], request_id, **options)) as stream:
                async for output in stream:
                    yield index, output

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        """Count the request among those in flight. Raises ApiError if it is not taken."""
        self._state.check_ready()
        widths = [params.n for params in self._params] if self._beams is None else [b.beam_width for b in self._beams]
        completions = sum(widths)
        self._state.admission.enter(completions, self.prompt_tokens)
        try:
            yield
        finally:
            self._state.admission.leave(completions)
            for index, progress in enumerate(self._progress):
                self._leave_prefill(index)
                if not progress.is_finished:
                    self._state.metrics.count_abort(progress.completions)

    @contextmanager
    def _named(self, index: int) -> Iterator[tuple[Prompt, str, dict[str, Any]]]:
        """A prompt as the engine takes it, with an id that no other has, and options that tell where it comes from."""
        origin = self._origin
        request_id = f"{origin.request_id}-{index}-{next(self._state.numbers)}"
        self._state.running.add(request_id)
        try:
            options = {"priority": origin.priority, "tenant": origin.tenant, "cache_salt": origin.cache_salt}
            yield {"prompt_token_ids": self.prompts[index].token_ids}, request_id, options
        except RequestError:  # the engine has refused the prompt, or has counted how it ended
            self._progress[index].is_finished = True
            raise
        finally:
            self._state.running.discard(request_id)

    def _receive(self, receive: Receive, output: RequestOutput) -> Awaitable[None] | None:
        self._count(0, output)
        return receive(0, output)

    def _count(self, index: int, output: RequestOutput) -> None:
        """Account for a delta. Raises the error that it ends with."""
        now, progress = time.monotonic(), self._progress[index]
        progress.metrics = output.metrics
        live = self._state.live
        if not progress.has_begun:
            self._leave_prefill(index)
            live.first_tokens.add(now - self._begin)
        if self.first_token_seconds is None:
            self.first_token_seconds = now - self._begin
        metrics = self._state.metrics
        for completion in output.outputs:
            new = len(completion.token_ids)
            progress.num_tokens += new
            if new:
                before = progress.last_token_time.get(completion.index)
                seconds = None if before is None else now - before
                metrics.count_tokens(new, seconds)
                if seconds is not None:
                    live.gaps.add(seconds / new, new)
                progress.last_token_time[completion.index] = now
            if completion.finish_reason is not None:
                metrics.count_finish(completion.finish_reason)
        if output.finished:
            progress.is_finished = True
            metrics.count_request(
                output.metrics, len(self.prompts[index].token_ids), progress.num_tokens, self._params[index]
            )
        if output.error is not None:
            raise output.error

    def _leave_prefill(self, index: int) -> None:
        progress = self._progress[index]
        if not progress.has_begun:
            progress.has_begun = True
            self._state.admission.leave_prefill(len(self.prompts[index].token_ids))


async def merge(runs: list[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of several generators as they come. Closing it closes all of them."""
    following = {asyncio.ensure_future(_next(run)): run for run in runs}
    try:
        while following:
            done, _ = await asyncio.wait(following, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                run = following.pop(task)
                for item in task.result():
                    following[asyncio.ensure_future(_next(run))] = run
                    yield item
    finally:
        for task in following:
            task.cancel()
        if following:
            await asyncio.wait(following)
        for run in runs:
            await run.aclose()


async def _next(run: AsyncGenerator[T, None]) -> list[T]:
    """The next item, or nothing at the end."""
    async for item in run:
        return [item]
    return []
