"""Beam search: the likeliest continuations of a prompt, found token by token.

Each step is a request of one token for each beam, whose cached blocks the next step finds as a prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvllm.outputs import BeamSearchSequence, CompletionOutput, FinishReason, Logprob
from kvllm.sampling_params import BeamSearchParams, SamplingParams
from kvllm.tokenizer import IncrementalDecoder, Tokenizer

if TYPE_CHECKING:
    from kvllm.engine_builder import Engine
    from kvllm.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Beam:
    """A continuation. cumulative_logprob: of all its tokens."""

    token_ids: tuple[int, ...] = ()
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None

    def score(self, length_penalty: float, length: int | None = None) -> float:
        """The rank among finished beams: log probability by length to the power of the penalty."""
        return self.cumulative_logprob / (length or len(self.token_ids)) ** length_penalty


class NextTokens(SamplingParams, frozen=True, kw_only=True, array_like=True):
    """Options of a step of a search, to which the engine's `max_logprobs` does not apply."""

    def check_vocabulary(self, vocab_size: int, max_logprobs: int) -> None:
        super().check_vocabulary(vocab_size, -1)


class BeamSearch:
    """The search for one prompt. The caller asks an engine for the next tokens of `beams`, and gives them to `advance`.

    At each step the `beam_width` likeliest candidates are looked at: those that end the text are finished, and the
    likeliest others go on. The search ends at the longest length, or when no beam could become better than the finished
    ones.
    """

    def __init__(
        self, prompt_token_ids: list[int], params: BeamSearchParams, eos_token_ids: frozenset[int], max_tokens: int
    ) -> None:
        """max_tokens: that there is room for, too."""
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.max_tokens = max_tokens
        self.beams = [Beam()]
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._finished: list[Beam] = []

    @property
    def is_done(self) -> bool:
        return not self.beams

    def prompts(self) -> list[list[int]]:
        """The token ids after which each beam's next token comes."""
        return [[*self.prompt_token_ids, *beam.token_ids] for beam in self.beams]

    def sampling_params(self) -> SamplingParams:
        """The options that report as many next tokens as may matter: `beam_width` that go on, beside those that end."""
        count = self.params.beam_width + len(self._eos_token_ids)
        return NextTokens(temperature=0, max_tokens=1, logprobs=count, ignore_eos=True)

    def advance(self, logprobs: Sequence[dict[int, Logprob]]) -> None:
        """Go on by one token. logprobs: of the likeliest next tokens, for each beam."""
        width = self.params.beam_width
        candidates = [
            self._candidate(beam, token_id, found.logprob)
            for beam, of_beam in zip(self.beams, logprobs, strict=True)
            for token_id, found in of_beam.items()
        ]
        candidates.sort(key=lambda beam: -beam.cumulative_logprob)  # a stable order: ties stay as the beams are
        self._finished += [beam for beam in candidates[:width] if beam.finish_reason]
        self._finished.sort(key=lambda beam: -beam.score(self.params.length_penalty))
        del self._finished[width:]
        self.beams = [beam for beam in candidates if not beam.finish_reason][:width]
        if self.beams and len(self._finished) == width and not self._may_improve():
            self.beams = []

    def abort(self) -> None:
        """End the search with what it has: the beams that go on come after the finished ones."""
        self._finished += [replace(beam, finish_reason="abort") for beam in self.beams]
        del self._finished[self.params.beam_width :]
        self.beams = []

    def completions(self, tokenizer: Tokenizer | None, skip_special_tokens: bool = True) -> list[CompletionOutput]:
        """The finished beams, the best one first."""
        found = enumerate(self._finished)
        return [self._completion(index, beam, tokenizer, skip_special_tokens) for index, beam in found]

    def sequences(self, tokenizer: Tokenizer | None) -> list[BeamSearchSequence]:
        """The same, after the prompt."""
        found = []
        for beam in self._finished:
            tokens = [*self.prompt_token_ids, *beam.token_ids]
            text = None if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=True)
            found.append(BeamSearchSequence(tokens, text, beam.cumulative_logprob, beam.finish_reason))
        return found

    def _candidate(self, beam: Beam, token_id: int, logprob: float) -> Beam:
        token_ids = (*beam.token_ids, token_id)
        reason: FinishReason | None = "length" if len(token_ids) >= self.max_tokens else None
        if token_id in self._eos_token_ids:
            reason = "stop"
        return Beam(token_ids, beam.cumulative_logprob + logprob, reason)

    def _may_improve(self) -> bool:
        """Whether the likeliest beam could still be better than the worst finished one. Log probabilities only fall, so
        with a positive penalty nothing is better than to stay as it is up to the longest length."""
        penalty = self.params.length_penalty
        length = self.max_tokens if penalty > 0 else len(self.beams[0].token_ids)
        return self.beams[0].score(penalty, length) > self._finished[-1].score(penalty)

    def _completion(
        self, index: int, beam: Beam, tokenizer: Tokenizer | None, skip_special_tokens: bool
    ) -> CompletionOutput:
        text = ""
        if tokenizer is not None:
            decoder = IncrementalDecoder(tokenizer, skip_special_tokens, self.prompt_token_ids)
            text = decoder.push(beam.token_ids[:-1] if beam.finish_reason == "stop" else beam.token_ids)
            text += decoder.finish()
        return CompletionOutput(
            index, text, list(beam.token_ids), beam.cumulative_logprob, finish_reason=beam.finish_reason
        )


def begin_search(engine: Engine, prompt: Prompt, params: BeamSearchParams) -> tuple[str | None, BeamSearch]:
    """The text of a prompt, if there is one, and its search. Raises RequestError as `add_request` does."""
    text, token_ids = engine.inputs.tokens_of(prompt)
    engine.inputs.check(token_ids, SamplingParams())
    max_tokens = min(params.max_tokens, engine.config.max_model_len - len(token_ids))
    return text, BeamSearch(token_ids, params, engine.outputs.eos_token_ids, max_tokens)
