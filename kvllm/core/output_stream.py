"""The news of one request on its way from the engine's thread to a reader in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

from kvllm.outputs import CompletionOutput, FinishReason, RequestOutput
from kvllm.sampling_params import SamplingParams
from kvllm.tokenizer import IncrementalDecoder

if TYPE_CHECKING:
    from kvllm.tokenizer import Tokenizer

Receive = Callable[[RequestOutput], Awaitable[None] | None]
"""Takes a delta. What it returns must have ended before it gets the next one."""


class OutputStream:
    """Publishes in one thread what is taken as deltas in another.

    A request's output grows in the engine's thread while it is read here, so that thread publishes how far each
    completion is. A delta is what the reader has not seen of that. A slow reader gets fewer and larger ones, and
    nothing is queued for it.

    Text is made here where the engine does not need it, because decoding would lengthen its steps. It needs the text of
    a request with stop strings.

    output: the request's, once the engine has it. is_announced: whether the reader was told of news that it did not
    take yet. failure: what the reader raises. has_ended: whether the reader has the last delta.
    """

    def __init__(self, tokenizer: Tokenizer | None, sampling: SamplingParams) -> None:
        self.loop = asyncio.get_running_loop()
        self.output: RequestOutput | None = None
        self.is_announced = False
        self.has_ended = False
        self._tokenizer = tokenizer if sampling.detokenize and not sampling.stop else None
        self._sampling = sampling
        self.failure: BaseException | None = None
        self._published: _Published | None = None
        self._readers: list[_CompletionReader] = []
        self._news = asyncio.Event()
        self._receive: Receive | None = None
        self._delivered: asyncio.Future[None] = self.loop.create_future()
        self._receiving: asyncio.Future[None] | None = None

    # In the engine's thread

    def publish(self) -> bool:
        """Let the reader see the output as it is now. Returns whether it must be woken for that."""
        output = self.output
        if output is None or not (output.finished or output.metrics.first_token_time):  # nothing is there yet
            return False
        published = _Published([_progress(completion) for completion in output.outputs], output.finished)
        if published == self._published:
            return False
        self._published = published
        return self._announce()

    def fail(self, failure: BaseException) -> bool:
        """Let the reader raise `failure`. Returns whether it must be woken for that."""
        self.failure = failure
        return self._announce()

    def _announce(self) -> bool:
        was_announced, self.is_announced = self.is_announced, True
        return not was_announced

    # In the event loop

    def wake(self) -> None:
        if self._receive is None:
            self._news.set()
        elif self._receiving is None:
            self._hand_over(self._receive)

    async def take(self) -> RequestOutput:
        """Wait for news, and return them as a delta. Raises what the stream has failed with."""
        while True:
            await self._news.wait()
            self._news.clear()
            if delta := self._next():
                return delta

    async def deliver(self, receive: Receive) -> None:
        """Call `receive` with each delta as soon as there is one, and return after the last one.

        No task wakes up for a delta: with all that it passes on its way back to where it waits, that takes longer than
        to make the delta and to send it. Raises what the stream has failed with, or what `receive` raises.
        """
        self._receive = receive
        self._hand_over(receive)
        try:
            await self._delivered
        finally:
            if self._receiving is not None:
                self._receiving.cancel()

    def _hand_over(self, receive: Receive) -> None:
        """Call `receive` with the next delta, if there is one."""
        self._receiving = None
        if self._delivered.done():  # `deliver` was cancelled
            return
        try:
            delta = self._next()
            waiting = receive(delta) if delta else None
        except Exception as error:
            self._delivered.set_exception(error)
            return
        if waiting is not None:
            self._receiving = asyncio.ensure_future(waiting)
            self._receiving.add_done_callback(self._go_on)
        elif self.has_ended:
            self._delivered.set_result(None)

    def _go_on(self, received: asyncio.Future[None]) -> None:
        """Hand over what has come while `receive` was not ready."""
        error = None if received.cancelled() else received.exception()
        if self._delivered.done():
            return
        if error is not None:
            self._delivered.set_exception(error)
        elif self.has_ended:
            self._delivered.set_result(None)
        elif self._receive is not None:
            self._hand_over(self._receive)

    def _next(self) -> RequestOutput | None:
        """What is new. Raises what the stream has failed with."""
        self.is_announced = False  # before the news are read: what comes meanwhile is announced again
        if self.failure:
            raise self.failure
        delta = self._delta(self._published) if self._published else None
        self.has_ended = delta is not None and delta.finished
        return delta

    def _delta(self, published: _Published) -> RequestOutput | None:
        output = self.output
        assert output is not None
        begins = not self._readers
        if begins:
            self._readers = [self._reader(completion, output) for completion in output.outputs]
        pairs = zip(self._readers, published.completions, strict=True)
        completions = [delta for reader, progress in pairs if (delta := reader.take(progress))]
        if not completions and not published.finished:
            return None
        return RequestOutput(
            output.request_id,
            output.prompt,
            output.prompt_token_ids,
            completions,
            published.finished,
            output.error if published.finished else None,
            output.metrics,
            output.prompt_logprobs if begins else None,
        )

    def _reader(self, completion: CompletionOutput, output: RequestOutput) -> _CompletionReader:
        decoder, sampling = None, self._sampling
        if self._tokenizer:
            decoder = IncrementalDecoder(self._tokenizer, sampling.skip_special_tokens, output.prompt_token_ids)
        return _CompletionReader(completion, decoder, sampling.include_stop_str_in_output)


class _Progress(NamedTuple):
    """How far a completion is. One with a `finish_reason` changes no more."""

    num_tokens: int
    text: str
    cumulative_logprob: float | None
    finish_reason: FinishReason | None


class _Published(NamedTuple):
    completions: list[_Progress]
    finished: bool


def _progress(completion: CompletionOutput) -> _Progress:
    return _Progress(
        len(completion.token_ids), completion.text, completion.cumulative_logprob, completion.finish_reason
    )


class _CompletionReader:
    """The deltas of one completion. decoder: makes its text from the tokens; None if the engine makes any."""

    def __init__(self, completion: CompletionOutput, decoder: IncrementalDecoder | None, includes_stop: bool) -> None:
        self._completion = completion
        self._decoder = decoder
        self._includes_stop = includes_stop
        self._num_tokens = 0
        self._num_characters = 0
        self._finished = False

    def take(self, progress: _Progress) -> CompletionOutput | None:
        """What is new, or None."""
        if self._finished or not (progress.num_tokens > self._num_tokens or progress.finish_reason):
            return None
        completion, begin, end = self._completion, self._num_tokens, progress.num_tokens
        token_ids = completion.token_ids[begin:end]
        logprobs = None if completion.logprobs is None else completion.logprobs[begin:end]
        self._num_tokens, self._finished = end, progress.finish_reason is not None
        return CompletionOutput(
            completion.index,
            self._new_text(token_ids, progress),
            token_ids,
            progress.cumulative_logprob,
            logprobs,
            progress.finish_reason,
            completion.stop_reason if self._finished else None,
        )

    def _new_text(self, token_ids: list[int], progress: _Progress) -> str:
        if self._decoder is None:
            begin, self._num_characters = self._num_characters, len(progress.text)
            return progress.text[begin:]
        stopped = progress.finish_reason == "stop" and not self._includes_stop
        text = self._decoder.push(token_ids[:-1] if stopped else token_ids)
        return text + self._decoder.finish() if progress.finish_reason else text
