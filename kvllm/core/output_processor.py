"""Tokens in, outputs out: text, stop conditions and log probabilities of the requests in flight."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING

from kvllm.core.protocol import PromptLogprobs, SampledToken
from kvllm.core.request import Request
from kvllm.core.sequence import Sequence
from kvllm.core.text import CompletionText
from kvllm.errors import KvLLMError, RequestError
from kvllm.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
from kvllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvllm.tokenizer import Tokenizer

SequenceToken = tuple[Sequence, SampledToken]


class OutputProcessor:
    """Gives tokens to their requests, and finds out what they end.

    A token counts once it stands in `CompletionOutput.token_ids`. `restore` makes all else agree with these, wherever
    an exception has cut `process` or `abort` short.

    tokenizer: None if the checkpoint has none; then outputs carry no text.
    """

    def __init__(self, eos_token_ids: frozenset[int], tokenizer: Tokenizer | None) -> None:
        self.eos_token_ids = eos_token_ids
        self.tokenizer = tokenizer
        self.requests: dict[str, Request] = {}
        self._touched: dict[str, Request] = {}
        self._receiving: Request | None = None  # the one whose completions may be half written

    def check_id(self, request_id: str) -> None:
        """Raises RequestError if an unfinished request has this id."""
        if request_id in self.requests:
            raise RequestError(f"request_id={request_id!r} is in use by an unfinished request: choose another")

    def sequences(self, request_id: str) -> Collection[Sequence]:
        """The unfinished sequences of a request, none if it is unknown."""
        request = self.requests.get(request_id)
        return () if request is None else request.sequences.values()

    def prepare(self, request: Request) -> None:
        """Make the texts and sequences of a request, whose completions may have tokens already."""
        self._write_again(request)
        request.make_sequences()

    def process(
        self, sampled: list[SequenceToken], prompts: Iterable[tuple[Sequence, PromptLogprobs]] = ()
    ) -> tuple[list[SequenceToken], list[Sequence]]:
        """Give each sequence the log probabilities of its prompt, and its tokens but those after its end. Returns the
        ones that they got, and the sequences that ended, for the caller to let go."""
        now = time.monotonic()
        for seq, _ in sampled:  # forks appear here first, and their request must not end before all are there
            self.requests[seq.request_id].sequences[seq.index] = seq
        received: list[SequenceToken] = []
        ended: list[Sequence] = []
        for seq, prompt in prompts:
            request = self._touched[seq.request_id] = self.requests[seq.request_id]
            ended += self._or_fail(request, partial(self._add_prompt_logprobs, request, prompt))
        for seq, token in sampled:
            if seq.has_ended:
                continue
            received.append((seq, token))
            request = self.requests.get(seq.request_id)
            if request is not None:  # else another of its completions has failed
                self._touched[seq.request_id] = request
                ended += self._or_fail(request, partial(self._receive, request, seq, token, now))
        return received, ended

    def take_touched(self) -> list[RequestOutput]:
        """The outputs that grew or ended since the last call, as their requests want them."""
        touched, self._touched = self._touched, {}
        return [output for request in touched.values() if (output := request.shown())]

    def abort(self, request_id: str) -> list[Sequence]:
        """End a request with `finish_reason="abort"`. Returns its sequences, for the caller to let go."""
        request = self.requests.get(request_id)
        return [] if request is None else self._end(request, "abort")

    def restore(self) -> list[Sequence]:
        """Make all requests consistent after an exception. Returns their sequences, made anew."""
        for request in list(self.requests.values()):
            if request is self._receiving:
                self._write_again(request)
            if request.output.finished or all(completion.finished() for completion in request.output.outputs):
                self._close(request, time.monotonic())
            else:
                request.make_sequences()
        self._receiving = None
        return [seq for request in self.requests.values() for seq in request.sequences.values()]

    # One token

    def _or_fail(self, request: Request, receive: Callable[[], list[Sequence]]) -> list[Sequence]:
        """Let a request receive what is new; an error ends it alone. Returns the sequences that ended."""
        self._receiving = request
        try:
            ended = receive()
        except KvLLMError as error:
            ended = self._fail(request, error)
        except Exception as error:
            ended = self._fail(request, RequestError(f"the output cannot be made: {type(error).__name__}: {error}"))
        self._receiving = None
        return ended

    def _add_prompt_logprobs(self, request: Request, prompt: PromptLogprobs) -> list[Sequence]:
        """Add what is new of a prompt's log probabilities. After a failure some of them come again."""
        found = request.output.prompt_logprobs
        assert found is not None
        for token in prompt.tokens[len(found) - prompt.first :]:
            found.append(self._logprobs(token, request.sampling))
        return []

    def _receive(self, request: Request, seq: Sequence, token: SampledToken, now: float) -> list[Sequence]:
        if token.error is not None:
            raise RequestError(token.error)
        output, completion = request.output, request.output.outputs[seq.index]
        if request.sampling.max_tokens == 0:
            completion.finish_reason = "length"
            return self._end_sequence(request, seq, now)
        if output.metrics.first_token_time is None:
            output.metrics.first_token_time = now
        if completion.logprobs is not None:
            completion.logprobs.append(self._logprobs(token, request.sampling))
        completion.token_ids.append(token.token_id)
        self._extend(request, completion, len(completion.token_ids))
        if completion.finish_reason is None:
            return []
        return self._end_sequence(request, seq, now)

    def _end_sequence(self, request: Request, seq: Sequence, now: float) -> list[Sequence]:
        """Account for a sequence whose completion is finished."""
        del request.sequences[seq.index]
        seq.has_ended = True
        if not request.sequences:
            self._close(request, now)
        return [seq]

    def _extend(self, request: Request, completion: CompletionOutput, count: int) -> None:
        """Account for the last of the completion's first `count` tokens: its text, and whether it is the last one.

        The reason for the end is written last: a completion that has one is complete.
        """
        sampling, token_id = request.sampling, completion.token_ids[count - 1]
        if completion.logprobs is not None and completion.cumulative_logprob is not None:
            completion.cumulative_logprob += completion.logprobs[count - 1][token_id].logprob
        reason, stop_reason = self._ending(request, token_id, count)
        if request.texts:
            text, stop = request.texts[completion.index], None
            if reason != "stop" or sampling.include_stop_str_in_output:
                piece, stop = text.push(token_id)
                completion.text += piece
            if stop is not None:
                reason, stop_reason = "stop", stop
            elif reason is not None:
                completion.text += text.finish()
        completion.stop_reason = stop_reason
        completion.finish_reason = reason

    def _ending(self, request: Request, token_id: int, count: int) -> tuple[FinishReason | None, int | str | None]:
        """Whether a completion's token number `count` ends it, text aside: the reasons for finishing and stopping."""
        sampling = request.sampling
        if count >= sampling.min_tokens:
            if token_id in (sampling.stop_token_ids or ()):
                return "stop", token_id
            if token_id in self.eos_token_ids and not sampling.ignore_eos:
                return "stop", None
        is_longest = len(request.output.prompt_token_ids) + count >= request.max_length
        return ("length" if is_longest else None), None

    def _logprobs(self, token: SampledToken, sampling: SamplingParams) -> dict[int, Logprob]:
        assert token.logprob is not None and token.top_logprobs is not None
        decode = self.tokenizer.token_name if self.tokenizer and sampling.detokenize else lambda _: None
        found = {
            token_id: Logprob(logprob, rank, decode(token_id))
            for rank, (token_id, logprob) in enumerate(token.top_logprobs, start=1)
        }
        found.setdefault(token.token_id, Logprob(token.logprob, token.rank, decode(token.token_id)))
        return found

    # The end of a request

    def _fail(self, request: Request, error: KvLLMError) -> list[Sequence]:
        request.output.error = error
        return self._end(request, "error")

    def _end(self, request: Request, reason: FinishReason) -> list[Sequence]:
        """End what still runs. Returns the sequences that ended."""
        for completion in request.output.outputs:
            if completion.finish_reason is None and request.texts and reason == "abort":
                completion.text += request.texts[completion.index].finish()  # what a stop string might have begun with
            completion.finish_reason = completion.finish_reason or reason
        ended = list(request.sequences.values())
        for seq in ended:
            seq.has_ended = True
            self._close(request, time.monotonic())
        return ended

    def _close(self, request: Request, now: float) -> None:
        request.output.finished = True
        request.output.metrics.finished_time = now
        self.requests.pop(request.request_id, None)

    # Again from the tokens

    def _write_again(self, request: Request) -> None:
        """Text, log probabilities and end of unfinished completions, from their tokens."""
        if self.tokenizer is not None and request.sampling.detokenize:
            prompt = request.output.prompt_token_ids
            request.texts = [
                CompletionText(self.tokenizer, request.sampling, prompt, request.stream) for _ in request.output.outputs
            ]
        for completion in request.output.outputs:
            if completion.finished():
                continue
            completion.text = ""
            if completion.logprobs is not None:
                del completion.logprobs[len(completion.token_ids) :]
                completion.cumulative_logprob = 0.0
            for count in range(1, len(completion.token_ids) + 1):
                self._extend(request, completion, count)
