"""One row of logits, and what its request asks for."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvllm.sampling_params import SamplingParams
from kvllm.structured.matcher import Matcher
from kvllm.worker.penalties import Penalties, bad_endings


@dataclass(slots=True)
class SampleRow:
    """One row of logits: what its request asks for, and the tokens known so far.

    eos_token_ids: forbidden, with `params.stop_token_ids`, until `params.min_tokens` are generated.
    matcher: of the grammar that the output follows. failure: why no token can be sampled.
    """

    params: SamplingParams
    seed: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    eos_token_ids: tuple[int, ...] = ()
    matcher: Matcher | None = None
    failure: str | None = None
    is_penalized: bool = field(init=False)
    is_masked: bool = field(init=False)
    """Whether it has a mask of allowed tokens."""
    forbids: bool = field(init=False)
    """Whether there may be tokens that it must not have."""
    changes_logits: bool = field(init=False)
    reads_output: bool = field(init=False)
    """Whether the next token depends on which ones came before, beside the logits."""
    is_plain: bool = field(init=False)
    """Whether the most likely token is the next one, whatever came before."""
    _penalties: Penalties | None = None

    def __post_init__(self) -> None:
        params = self.params
        penalties = params.repetition_penalty - 1, params.presence_penalty, params.frequency_penalty
        self.is_penalized = any(penalties)
        self.is_masked = params.structured_outputs is not None or params.allowed_token_ids is not None
        self.forbids = bool(params.min_tokens or params.bad_words_token_ids)
        self.changes_logits = self.is_penalized or self.is_masked or self.forbids or bool(params.logit_bias)
        self.is_plain = params.greedy and not self.changes_logits
        structured = params.structured_outputs is not None
        self.reads_output = self.is_penalized or structured or bool(params.bad_words_token_ids)

    def branch(self, token_ids: list[int]) -> SampleRow:
        """One that goes on after more tokens, and leaves this one as it is."""
        output, matcher = [*self.output_token_ids, *token_ids], self.matcher and self.matcher.branch()
        return SampleRow(self.params, self.seed, self.prompt_token_ids, output, self.eos_token_ids, matcher)

    def fail(self, reason: str) -> None:
        """Let the row have an error in place of a token."""
        self.failure, self.is_plain = reason, False

    def penalties(self) -> Penalties:
        """With the output as it is now."""
        if self._penalties is None:
            self._penalties = Penalties(self.params, self.prompt_token_ids)
        self._penalties.count(self.output_token_ids)
        return self._penalties

    def forbidden(self) -> list[set[int]]:
        """Tokens that must not come after the output as it is now, in sets, the more important ones first."""
        params, output = self.params, self.output_token_ids
        sets = [bad_endings(params.bad_words_token_ids or [], output)]
        if len(output) < params.min_tokens:  # nothing may end the sequence
            sets.append({*self.eos_token_ids, *(params.stop_token_ids or [])})
        return sets
