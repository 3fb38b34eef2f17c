"""Requests in, outputs out: what stands between the API and the scheduler."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from collections.abc import Sequence as Sequences
from numbers import Integral
from typing import TYPE_CHECKING, Any

from kvllm.config import EngineConfig
from kvllm.core.protocol import PhaseSeconds, SampledToken, StepPlan
from kvllm.core.scheduler import Scheduler
from kvllm.core.sequence import Sequence
from kvllm.core.text import CompletionText
from kvllm.errors import RequestError
from kvllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from kvllm.sampling_params import SamplingParams
from kvllm.stats import EngineStats

if TYPE_CHECKING:
    from kvllm.core.executor import Executor
    from kvllm.tokenizer import Tokenizer

Prompt = str | Sequences[int] | Mapping[str, Any]


class _Request:
    """A request in flight: what its caller sees, and the sequences that still run."""

    def __init__(self, output: RequestOutput) -> None:
        self.output = output
        self.sequences: dict[int, Sequence] = {}  # by index of the completion
        self.texts: list[CompletionText] = []  # one for each completion, if there is a tokenizer


class LLMEngine:
    """Adds requests, steps all of them together, reports what each has produced.

    tokenizer: None if the checkpoint has none; then prompts are token ids and outputs carry no text.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.config = config
        self.executor = executor
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.tokenizer = tokenizer
        self.stats = EngineStats(num_blocks=config.num_blocks)
        self.scheduler = Scheduler(config, self.stats)
        self._requests: dict[str, _Request] = {}
        self._next_seq_id = 0
        self._step_seconds = 0.0  # of all steps: time passes for a sequence only while the engine is at work
        self._seeds = random.Random(config.seed)

    def add_request(
        self, request_id: str, prompt: Prompt, sampling_params: SamplingParams, *, stream: bool = True
    ) -> RequestOutput:
        """Queue a request.

        Args:
            request_id: unique among unfinished requests.
            prompt: text, token ids, or a dict with one of `prompt` and `prompt_token_ids`.
            stream: keep the text current at every step; otherwise it is set when a completion ends.

        Returns:
            The output, still empty: the object that `step` returns as it grows.

        Raises:
            RequestError: the request cannot be served. Nothing else is affected.
        """
        if request_id in self._requests:
            raise RequestError(f"request_id={request_id!r} is in use by an unfinished request: choose another")
        text, token_ids = self._tokens_of(prompt)
        self._check(token_ids, sampling_params)
        output = RequestOutput(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            outputs=[_empty_completion(index, sampling_params) for index in range(sampling_params.n)],
            finished=False,
            metrics=RequestMetrics(arrival_time=time.monotonic()),
        )
        request = _Request(output)
        request.sequences[0] = self._queue(request_id, token_ids, sampling_params)
        if self.tokenizer is not None:
            request.texts = [CompletionText(self.tokenizer, sampling_params, token_ids, stream) for _ in output.outputs]
        self._requests[request_id] = request
        return output

    def abort(self, request_id: str) -> None:
        """End a request now, with `finish_reason="abort"`. Unknown or finished ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        for seq in request.sequences.values():
            self.scheduler.finish(seq)
        request.output.finished = True
        for completion in request.output.outputs:
            completion.finish_reason = completion.finish_reason or "abort"

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def step(self) -> list[RequestOutput]:
        """Run one step.

        Returns:
            The requests that got tokens. An output object belongs to its request and grows with it: copy what must not
            change. After an exception no request is lost: the next step computes the running ones again.
        """
        begin = time.monotonic()
        try:
            plan = self.scheduler.schedule()
            result = self.executor.execute(plan)
        except BaseException:  # an interrupt too: whatever ends the step early, the next one must find order
            self.scheduler.recover()
            raise
        sampled = self.scheduler.update(plan, result)
        self._count_stalls(sampled, time.monotonic() - begin)
        touched = self._deliver(sampled)
        self.stats.output_tokens += len(sampled)
        self._count_seconds(plan, result.seconds)
        self.stats.peak_event_bytes = max(self.stats.peak_event_bytes, result.event_bytes)
        if not self.scheduler.has_unfinished and self.scheduler.blocks.num_owned:
            raise RuntimeError(f"{self.scheduler.blocks.num_owned} KV blocks are owned, but no request is unfinished")
        return touched

    def _count_stalls(self, sampled: list[tuple[Sequence, SampledToken]], seconds: float) -> None:
        """seconds: that this step took."""
        self._step_seconds += seconds
        for seq, _ in sampled:
            if seq.last_token_time is not None:
                stall = self._step_seconds - seq.last_token_time
                self.stats.longest_stall_seconds = max(self.stats.longest_stall_seconds, stall)
            seq.last_token_time = self._step_seconds

    def _count_seconds(self, plan: StepPlan, seconds: PhaseSeconds) -> None:
        stats = self.stats
        if any(item.num_tokens > 1 for item in plan.scheduled):
            stats.prefill_seconds += seconds.model
        else:
            stats.decode_seconds += seconds.model
        stats.recompute_seconds += seconds.recompute
        stats.score_seconds += seconds.score
        stats.compact_seconds += seconds.compact

    def close(self) -> None:
        self.executor.close()

    # Into the engine

    def _tokens_of(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            known = [key for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
            if not known:
                raise RequestError(
                    f"a prompt given as a dict needs 'prompt' or 'prompt_token_ids', this one has {sorted(prompt)}"
                )
            prompt = prompt[known[0]]
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("the checkpoint has no tokenizer: give the prompt as {'prompt_token_ids': [...]}")
            return prompt, self.tokenizer.encode(prompt)
        if not isinstance(prompt, Sequences) or isinstance(prompt, bytes | bytearray):
            raise RequestError(
                f"a prompt is a string, a list of token ids or a dict with one of them, not {type(prompt).__name__}"
            )
        for token_id in prompt:
            if not isinstance(token_id, Integral) or isinstance(token_id, bool):
                raise RequestError(f"a prompt is a list of integer token ids, {token_id!r} is not one")
        return None, [int(token_id) for token_id in prompt]

    def _check(self, token_ids: list[int], sampling: SamplingParams) -> None:
        longest = self.config.max_model_len - 1
        if not token_ids:
            raise RequestError("the prompt is empty: it needs at least one token")
        if len(token_ids) > longest:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; max_model_len={self.config.max_model_len} allows {longest} "
                f"and one generated token: shorten the prompt or raise max_model_len"
            )
        outside = [token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size]
        if outside:
            largest = self.vocab_size - 1
            raise RequestError(f"token id {outside[0]} is not in the vocabulary: allowed are 0 to {largest}")
        if sampling.n > self.config.max_num_seqs:
            most = self.config.max_num_seqs
            raise RequestError(f"n={sampling.n} completions of a prompt run together: raise max_num_seqs={most}")
        sampling.check_vocabulary(self.vocab_size)
        compression = self.config.compression
        if sampling.budget_tokens is not None and (compression is None or compression.policy != "threshold"):
            raise RequestError(
                f"budget_tokens={sampling.budget_tokens} needs an engine with "
                'compression=CompressionConfig(policy="threshold", ...): only a threshold has a budget'
            )
        if sampling.stop and self.tokenizer is None:
            raise RequestError(f"stop={sampling.stop!r} needs a tokenizer, and there is none: use stop_token_ids")

    def _queue(self, request_id: str, token_ids: list[int], sampling: SamplingParams) -> Sequence:
        compression = self.config.compression
        max_length = self.config.max_model_len
        if sampling.max_tokens is not None:
            max_length = min(max_length, len(token_ids) + sampling.max_tokens)
        seq = Sequence(
            self._next_seq_id,
            request_id,
            token_ids[:],
            sampling,
            seed=self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed,
            max_length=max_length,
            forks=sampling.n - 1,
            tail_start=0 if compression and compression.compress_prompt else None,
        )
        self.scheduler.add(seq)
        self._next_seq_id += sampling.n
        return seq

    # Out of the engine

    def _deliver(self, sampled: list[tuple[Sequence, SampledToken]]) -> list[RequestOutput]:
        """Give tokens to their requests. Returns the outputs that grew."""
        now = time.monotonic()
        for seq, _ in sampled:  # forks appear here first, and their request must not end before all are known
            self._requests[seq.request_id].sequences[seq.index] = seq
        touched = {}
        for seq, token in sampled:
            request = self._requests[seq.request_id]
            self._receive(request, seq, token, now)
            touched[seq.request_id] = request.output
        return list(touched.values())

    def _receive(self, request: _Request, seq: Sequence, token: SampledToken, now: float) -> None:
        """Account for one sampled token, and end its sequence and request if it was the last."""
        output, completion = request.output, request.output.outputs[seq.index]
        if output.metrics.first_token_time is None:
            output.metrics.first_token_time = now
        completion.token_ids.append(token.token_id)
        if completion.logprobs is not None:
            self._add_logprobs(completion, token)
        text = request.texts[seq.index] if request.texts else None
        self._extend(completion, text, seq, token.token_id)
        if completion.finish_reason is None:
            return
        self.scheduler.finish(seq)
        del request.sequences[seq.index]
        output.metrics.preemptions += seq.preemptions
        output.metrics.evicted_entries += seq.evicted
        output.metrics.num_cached_tokens = max(output.metrics.num_cached_tokens, seq.cache_hits)
        if not request.sequences:
            output.finished = True
            output.metrics.finished_time = now
            del self._requests[output.request_id]

    def _extend(self, completion: CompletionOutput, text: CompletionText | None, seq: Sequence, token_id: int) -> None:
        """Add a token to the text, and find out whether it ends the completion."""
        sampling = seq.sampling
        armed = seq.num_generated >= sampling.min_tokens
        ends = armed and not sampling.ignore_eos and token_id in self.eos_token_ids
        stops = armed and token_id in (sampling.stop_token_ids or ())
        if ends or stops:
            completion.finish_reason = "stop"
            completion.stop_reason = token_id if stops else None
        elif seq.num_tokens >= seq.max_length:
            completion.finish_reason = "length"
        if text is None:
            return
        stop = None
        if not (ends or stops) or sampling.include_stop_str_in_output:
            piece, stop = text.push(token_id)
            completion.text += piece
        if stop is not None:
            completion.finish_reason, completion.stop_reason = "stop", stop
        elif completion.finish_reason is not None:
            completion.text += text.finish()

    def _add_logprobs(self, completion: CompletionOutput, token: SampledToken) -> None:
        assert completion.logprobs is not None and completion.cumulative_logprob is not None
        assert token.logprob is not None and token.top_logprobs is not None
        entries = {
            token_id: Logprob(logprob, rank, self._decode(token_id))
            for rank, (token_id, logprob) in enumerate(token.top_logprobs, start=1)
        }
        entries.setdefault(token.token_id, Logprob(token.logprob, token.rank, self._decode(token.token_id)))
        completion.logprobs.append(entries)
        completion.cumulative_logprob += token.logprob

    def _decode(self, token_id: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode([token_id])


def _empty_completion(index: int, sampling: SamplingParams) -> CompletionOutput:
    if sampling.logprobs is None:
        return CompletionOutput(index, "", [])
    return CompletionOutput(index, "", [], cumulative_logprob=0.0, logprobs=[])
