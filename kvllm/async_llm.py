"""AsyncLLM: an engine for asyncio, whose requests come and go one by one while it runs."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import structs

from kvllm.beam_search import BeamSearch, begin_search
from kvllm.core.engine_loop import EngineLoop
from kvllm.core.input_processor import check_sampling
from kvllm.core.output_stream import OutputStream, Receive
from kvllm.engine_args import EngineArgs
from kvllm.engine_builder import build_engine, dtype_of
from kvllm.errors import EngineDeadError, RequestError
from kvllm.lora.request import Adapter, LoRARequest
from kvllm.models.config import ModelConfig
from kvllm.outputs import RequestMetrics, RequestOutput
from kvllm.prompts import Prompt
from kvllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from kvllm.stats import EngineStats
from kvllm.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from kvllm.engine_builder import Engine

LONG_TEXT = 10_000
"""Characters. A longer prompt is encoded in a thread: it would hold up the event loop."""
MOST_DELTAS_PER_SECOND = 500
"""Of all requests together. A delta takes tens of microseconds of a processor on its way to a client. Where the model
runs on the same processors, or the loop's thread holds the interpreter's lock, that is time that a step waits."""
LONGEST_HOLD = 0.1
"""Seconds for which news may be held back, however many requests there are: text then still flows for a human eye."""
HEALTH_SECONDS = 1.0
"""Time between two looks whether an engine that has not answered is alive."""
T = TypeVar("T")


class AsyncLLM:
    """An engine of any kind in a thread of its own.

    Its methods belong into event loops, one or several. `stats`, the properties and `shutdown` may be used anywhere.

    config: the engine's. tokenizer: None if the checkpoint has none.
    """

    def __init__(self, engine: Engine, model_config: ModelConfig) -> None:
        self.model_config = model_config
        self.config = engine.config
        self.tokenizer = engine.inputs.tokenizer
        self._engine = engine
        self._streams: dict[str, OutputStream] = {}
        self._searches: dict[str, BeamSearch] = {}
        self._unread: set[str] = set()  # requests of whose output nothing was published
        self._last_round = -math.inf
        self._stats = copy(engine.stats)
        self._is_shut_down = False
        self._loop = EngineLoop(engine, self._publish, self._fail_all)

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> AsyncLLM:
        """Build the engine. Raises ConfigError and CheckpointError as `LLM` does."""
        return cls(build_engine(args), structs.replace(args.model_config, dtype=dtype_of(args)))

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str | None = None,
        lora_request: LoRARequest | Adapter | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt, and yield what is new as it comes.

        Each item is a delta. It has the completions with news alone, and of these the text, token ids and logprobs
        since the item before. `finish_reason` and `stop_reason` come with a completion's last part, `finished` with the
        last item. `cumulative_logprob` and `metrics` are those of the request so far. With
        `sampling_params.output_kind` CUMULATIVE, each item is one object that has all so far; with FINAL_ONLY there is
        one item. A slow reader gets fewer and larger items, and so do all where there are many
        (MOST_DELTAS_PER_SECOND); no first or last one is held back for that. Closing the iterator, or cancelling the
        task that reads it, aborts the request.

        Args:
            request_id: unique among unfinished requests.
            prompt: see `LLM.generate`.
            priority: see `kvllm.core.sequence.ServiceClass`, also for `tenant` and `cache_salt`.
            lora_request: the adapter to compute it with, None for the model as it is.

        Raises:
            RequestError: the request cannot be served: before the first item. One that fails later has an `error`.
            EngineDeadError: the engine has failed or was shut down.
        """
        options = {"priority": priority, "tenant": tenant, "cache_salt": cache_salt, "lora_request": lora_request}
        async with self._open(prompt, sampling_params, request_id, options) as stream:
            kind, whole = sampling_params.output_kind, None
            while not stream.has_ended:
                item = await stream.take()
                if kind in (RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY):
                    whole = whole or replace(item, outputs=[])
                    whole.add(item)
                    item = whole
                if kind is not RequestOutputKind.FINAL_ONLY or stream.has_ended:
                    yield item

    async def deliver(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        receive: Receive,
        *,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str | None = None,
        lora_request: LoRARequest | Adapter | None = None,
    ) -> None:
        """Complete a prompt, and call `receive` in the event loop with each item that `generate` would yield.

        This costs a good deal less where there are many requests: no task wakes up for an item.

        receive: must be quick. It returns None, or what has to end before it is called again.

        Raises:
            RequestError, EngineDeadError: see `generate`. What `receive` raises aborts the request.
        """
        options = {"priority": priority, "tenant": tenant, "cache_salt": cache_salt, "lora_request": lora_request}
        async with self._open(prompt, sampling_params, request_id, options) as stream:
            await stream.deliver(receive)

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str,
        *,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str | None = None,
        lora_request: LoRARequest | Adapter | None = None,
        skip_special_tokens: bool = True,
    ) -> RequestOutput:
        """Find the likeliest continuations of a prompt, the best one first: see `LLM.beam_search`. Cancelling the task
        ends the search; `abort` ends it with what it has.

        Raises:
            RequestError: the prompt cannot be served, or an unfinished search has this id.
            EngineDeadError: see `generate`.
        """
        text, search = begin_search(self._engine, await self._encoded(prompt), params)
        _check_id(request_id, self._searches)
        self._searches[request_id] = search
        try:
            options = {"priority": priority, "tenant": tenant, "cache_salt": cache_salt, "lora_request": lora_request}
            return await self._search(text, search, request_id, skip_special_tokens, **options)
        finally:
            del self._searches[request_id]

    async def _search(
        self, text: str | None, search: BeamSearch, request_id: str, skip_special_tokens: bool, **options: Any
    ) -> RequestOutput:
        """Ask for the beams' next tokens until the search is done."""
        metrics = RequestMetrics(arrival_time=time.monotonic())
        while not search.is_done:
            sampling, length = search.sampling_params(), len(search.beams[0].token_ids)
            found = await asyncio.gather(
                *(
                    self._last(self.generate(token_ids, sampling, f"{request_id}-beam-{length}-{i}", **options))
                    for i, token_ids in enumerate(search.prompts())
                )
            )
            _add_metrics(metrics, [each.metrics for each in found])
            if any(each.outputs[0].finish_reason == "abort" for each in found):
                search.abort()
            if not search.is_done:
                search.advance([(each.outputs[0].logprobs or [])[0] for each in found])
        metrics.finished_time = time.monotonic()
        completions = search.completions(self.tokenizer, skip_special_tokens)
        return RequestOutput(request_id, text, search.prompt_token_ids, completions, True, metrics=metrics)

    async def abort(self, request_id: str) -> None:
        """End a request with `finish_reason="abort"`, which its reader gets in its last item. Unknown and finished ids
        are ignored. A beam search ends after its current token."""
        if request_id in self._searches:
            self._searches[request_id].abort()
        self._loop.submit(partial(self._abort, request_id))

    async def reset_prefix_cache(self) -> None:
        """Let later requests find nothing of what is cached so far. Running ones keep their blocks."""
        self._loop.submit(lambda engine: engine.reset_prefix_cache())

    async def inspect(self, look: Callable[[Engine], T]) -> T:
        """What `look` returns: it is called with the engine, in the engine's thread, between two steps. It must be
        quick, as the next step waits for it, and change nothing.

        Raises:
            EngineDeadError: the engine has failed or was shut down.
        """
        found: Future[T] = Future()
        self._loop.submit(partial(_look, found, look))
        waiting = asyncio.wrap_future(found)
        while not waiting.done():
            await self.check_health()
            await asyncio.wait((waiting,), timeout=HEALTH_SECONDS)
        return waiting.result()

    def stats(self) -> EngineStats:
        """The counters as they were after the last step."""
        stats = copy(self._stats)
        stats.packed_timeline = stats.packed_timeline[:]
        stats.stalls, stats.event_stalls = copy(stats.stalls), copy(stats.event_stalls)
        stats.step_tokens = copy(stats.step_tokens)
        return stats

    # Health

    @property
    def is_running(self) -> bool:
        return not self.errored

    @property
    def errored(self) -> bool:
        """Whether the engine serves nothing any more."""
        return self._is_shut_down or self._loop.failure is not None

    @property
    def dead_error(self) -> BaseException:
        """The error that requests get once the engine serves nothing any more."""
        failure = self._loop.failure
        if failure is None:
            return EngineDeadError("the engine was shut down: build another one")
        error = EngineDeadError(f"the engine has failed: {type(failure).__name__}: {failure}")
        error.__cause__ = failure
        return error

    async def check_health(self) -> None:
        """Raises EngineDeadError if the engine serves nothing any more."""
        if self.errored:
            raise self.dead_error

    def shutdown(self) -> None:
        """End the engine after its current step, and its workers. Readers get an EngineDeadError. Idempotent."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._loop.stop()
            self._fail_all()
            self._engine.close()

    # In the engine's thread

    def _publish(self, outputs: Iterable[RequestOutput]) -> None:
        """Tell readers what is new: all of them together in rounds, because many deltas one after the other cost less
        than as many on their own; and at once those of whom it is the first or last news."""
        self._stats = copy(self._engine.stats)
        now = time.monotonic()
        hold = min((len(self._streams) - 1) / MOST_DELTAS_PER_SECOND, LONGEST_HOLD)  # a lone reader gets every token
        if now - self._last_round >= hold:
            self._last_round = now
            told = list(self._streams.values())
            self._unread.difference_update(output.request_id for output in outputs)
        else:
            ends = [output.request_id for output in outputs if output.finished or output.request_id in self._unread]
            self._unread.difference_update(ends)
            told = [stream for request_id in ends if (stream := self._streams.get(request_id))]
        _wake([stream for stream in told if stream.publish()])

    def _add(
        self,
        stream: OutputStream,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams,
        options: dict[str, Any],
        engine: Engine,
    ) -> None:
        """Add a request to the engine, or let its reader raise the refusal."""
        try:
            stream.output = engine.add_request(request_id, prompt, sampling_params, stream=False, **options)
            self._unread.add(request_id)
        except Exception as error:
            if stream.fail(error):
                _wake([stream])

    def _drop(self, request_id: str, engine: Engine) -> None:
        """Abort a request that nobody reads any more."""
        self._unread.discard(request_id)
        engine.abort(request_id)

    def _abort(self, request_id: str, engine: Engine) -> None:
        engine.abort(request_id)
        stream = self._streams.get(request_id)
        if stream is not None and stream.output is not None:
            self._publish([stream.output])

    def _fail_all(self) -> None:
        """Let all readers raise that the engine is dead. The last call, in whatever thread."""
        _wake([stream for stream in list(self._streams.values()) if stream.fail(self.dead_error)])

    # In the event loop

    async def check_rule(self, rule: StructuredOutputsParams) -> None:
        """Raises RequestError for a rule that cannot be obeyed. The verdict is remembered."""
        await asyncio.to_thread(self._engine.inputs.check_grammar, rule)

    async def open_adapter(self, request: LoRARequest) -> Adapter:
        """Check the files of an adapter. What this returns may be given to `generate` for as long as they stay.

        Raises RequestError if it cannot be used.
        """
        adapter = await asyncio.to_thread(self._engine.inputs.adapter_of, request)
        assert adapter is not None
        return adapter

    @asynccontextmanager
    async def _open(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str, options: dict[str, Any]
    ) -> AsyncIterator[OutputStream]:
        """The stream of a new request. One that has not ended after it is aborted."""
        check_sampling(sampling_params)
        _check_id(request_id, self._streams)
        stream = self._streams[request_id] = OutputStream(self.tokenizer, sampling_params)
        try:
            prompt = await self._encoded(prompt)
            if isinstance(lora_request := options["lora_request"], LoRARequest):
                options = {**options, "lora_request": await self.open_adapter(lora_request)}
            if sampling_params.structured_outputs is not None:  # the engine's thread then finds it compiled
                await self.check_rule(sampling_params.structured_outputs)
            self._loop.submit(partial(self._add, stream, request_id, prompt, sampling_params, options))
            await self.check_health()  # nobody reads orders after a failure
            yield stream
        finally:
            del self._streams[request_id]
            if not stream.has_ended and stream.failure is None:
                self._loop.submit(partial(self._drop, request_id))

    @staticmethod
    async def _last(items: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
        """The last item of a request of one token, which is the only one."""
        last = [item async for item in items][-1]
        if last.error:
            raise last.error
        return last

    async def _encoded(self, prompt: Prompt) -> Prompt:
        """The prompt with its token ids, if it is text: to encode it would lengthen a step of the engine."""
        if not isinstance(prompt, str) or self.tokenizer is None:
            return prompt
        if len(prompt) > LONG_TEXT:
            token_ids = await asyncio.to_thread(self.tokenizer.encode, prompt)
        else:
            token_ids = self.tokenizer.encode(prompt)
        return {"prompt": prompt, "prompt_token_ids": token_ids}


def _check_id(request_id: str, unfinished: Container[str]) -> None:
    if request_id in unfinished:
        raise RequestError(f"request_id={request_id!r} is in use by an unfinished request: choose another")


def _add_metrics(metrics: RequestMetrics, of_step: list[RequestMetrics]) -> None:
    """Account for a step of a search. The prefix that its first step found cached is that of the prompt."""
    if metrics.first_token_time is None:
        first = of_step[0]
        metrics.scheduled_time, metrics.first_token_time = first.scheduled_time, first.first_token_time
        metrics.num_cached_tokens = first.num_cached_tokens
    metrics.preemptions += sum(each.preemptions for each in of_step)


def _look(found: Future[T], look: Callable[[Engine], T], engine: Engine) -> None:
    if not found.set_running_or_notify_cancel():
        return
    try:
        found.set_result(look(engine))
    except Exception as error:
        found.set_exception(error)


def _wake(streams: list[OutputStream]) -> None:
    """Wake the readers in their event loops. A loop that was closed has none any more."""
    for loop in {stream.loop for stream in streams}:
        of_loop = [stream.wake for stream in streams if stream.loop is loop]
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_call_all, of_loop)


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()
