"""The prompts of one HTTP request in the engine: admission, outputs as they come, usage, metrics."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from kvllm.core.protocol import KeptPairs
from kvllm.core.regions import Region
from kvllm.core.spans import Span, kept_spans
from kvllm.errors import RequestError
from kvllm.outputs import RequestMetrics, RequestOutput
from kvllm.serving.context import RequestContext
from kvllm.serving.protocol import CompletionTokensDetails, CompressionUsage, PairsLeft, PromptTokensDetails, Usage
from kvllm.serving.sampling import GenerationRequest, beam_search, check_logprobs, sampling_params

Receive = Callable[[int, RequestOutput], Awaitable[None] | None]
"""Takes a delta and the number of its prompt. What it returns must have ended before it gets the next one."""


@dataclass(slots=True)
class EncodedPrompt:
    """A prompt as the engine gets it. text: None if it came as token ids."""

    token_ids: list[int]
    text: str | None = None


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
    """Runs the prompts of a request, each with its options, and counts what they produce."""

    def __init__(
        self,
        context: RequestContext,
        body: GenerationRequest,
        prompts: list[EncodedPrompt],
        max_tokens: Sequence[int | None],
        **own: Any,
    ) -> None:
        """max_tokens: after each prompt, None for as many as fit. own: options of the engine that the route sets.

        Raises ApiError and ConfigError for what cannot be obeyed, or an answer that may become too large.
        """
        state = context.state
        asked = body.stream_options
        self._tells_spans = bool(asked and asked.include_kv_spans)
        if asked and asked.include_kv_pairs:
            own["report_kept_pairs"] = True
        self.prompts = prompts
        self._params = [sampling_params(body, number, state.sampling_defaults, **own) for number in max_tokens]
        # Each search gives the best `params.n` continuations.
        self._beams = beam_search(body, [state.max_model_len if most is None else most for most in max_tokens])
        lengths = [len(prompt.token_ids) for prompt in prompts]
        check_logprobs(lengths, self._params, state.max_model_len, state.llm.model_config.vocab_size)
        # Prefixes are shared within a key alone; a salt parts them further.
        salt = f"{context.tenant}\0{body.cache_salt or ''}" if context.tenant or body.cache_salt else None
        self._options: Any = {"priority": body.priority or 0, "tenant": context.tenant, "cache_salt": salt}
        self._options["lora_request"] = context.adapter
        self._request_id = context.request_id
        self._state = state
        self._progress = [Progress(each.n) for each in self._params]
        self._regions_told = self._pairs_told = 0
        self._begin = time.monotonic()
        self.first_token_seconds: float | None = None
        context.generation = self

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def output_tokens(self) -> int:
        return sum(progress.num_tokens for progress in self._progress)

    async def deliver(self, receive: Receive) -> None:
        """Call `receive` with what is new of each prompt, until all have ended. Cancelling it aborts what still runs.

        Raises what `receive` raises, and:
            ApiError: the server does not take the request now.
            KvLLMError: the engine cannot serve it, or cannot serve it to its end.
        """
        self._state.check_ready()
        widths = [each.n for each in self._params] if self._beams is None else [each.beam_width for each in self._beams]
        completions = sum(widths)
        self._state.admission.enter(completions, self.prompt_tokens)
        runs = [asyncio.ensure_future(self._run(index, receive)) for index in range(len(self.prompts))]
        try:
            await asyncio.gather(*runs)
        finally:
            for run in runs:
                run.cancel()
            try:
                await asyncio.wait(runs)
            finally:  # a second cancel may interrupt the wait
                self._state.admission.leave(completions)
                for index, progress in enumerate(self._progress):
                    self._leave_prefill(index)
                    if not progress.is_finished:
                        self._state.metrics.count_abort(progress.completions)

    def usage(self, reasoning_tokens: int | None = None) -> Usage:
        """What has been used so far, for the client to be told. reasoning_tokens: None if nobody has looked for a
        thought."""
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
                self._new_spans(),
                self._new_pairs(),
            ),
        )
        if reasoning_tokens is not None:
            usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens)
        return usage

    def _new_spans(self) -> list[Span]:
        """What is left of the KV cache, if there was a compression since the last call and the request wants it."""
        regions: list[Region] = list(self._progress[0].metrics.regions) if self._tells_spans else []
        if len(regions) == self._regions_told:
            return []
        self._regions_told = len(regions)
        length = self.prompt_tokens + self.output_tokens - 1
        dropped = 0
        for region in regions:  # the engine may be ahead of what was delivered
            length = max(length, region.end + dropped)
            dropped += region.dropped
        return kept_spans(regions, length)

    def _new_pairs(self) -> list[PairsLeft]:
        """What compressions since the last call have left, if the request wants it."""
        found: Sequence[KeptPairs] = self._progress[0].metrics.kept_pairs
        new = found[self._pairs_told :] if len(found) >= self._pairs_told else found  # else it was preempted
        self._pairs_told = len(found)
        return [_pairs_left(each) for each in new]

    async def _run(self, index: int, receive: Receive) -> None:
        """Run a prompt, under an id that no other has."""
        state, prompt = self._state, {"prompt_token_ids": self.prompts[index].token_ids}
        request_id = f"{self._request_id}-{index}-{next(state.numbers)}"
        counted = partial(self._receive, receive, index)
        state.running.add(request_id)
        try:
            if self._beams is None:
                await state.llm.deliver(prompt, self._params[index], request_id, counted, **self._options)
                return
            options = self._options | {"skip_special_tokens": self._params[index].skip_special_tokens}
            found = await state.llm.beam_search(prompt, self._beams[index], request_id, **options)
            del found.outputs[self._params[index].n :]
            if (receiving := counted(found)) is not None:
                await receiving
        except RequestError:  # the engine has refused the prompt, or has counted how it ended
            self._progress[index].is_finished = True
            raise
        finally:
            state.running.discard(request_id)

    def _receive(self, receive: Receive, index: int, output: RequestOutput) -> Awaitable[None] | None:
        self._count(index, output)
        return receive(index, output)

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


def _pairs_left(kept: KeptPairs) -> PairsLeft:
    bits = zlib.compress(b"".join(chain.from_iterable(kept.bits)), level=1)
    return PairsLeft(kept.first, kept.end, kept.layers, len(kept.bits[0]), bits)
