"""Outputs of requests. Names follow vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvllm.errors import KvLLMError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class Logprob:
    r"""Natural log of a token's probability before any penalty, temperature or filter; rank 1 is the most likely.

    decoded_token: the token's text as it stands after others, with its leading space, or `bytes:\xe4\xb8` for a part
        of a character. None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        logprobs: one dict for each of `token_ids`, from token id to Logprob: the sampled token and the most likely
            ones.
        finish_reason: "stop" (end of sequence or a stop condition), "length", "abort", "error" (see
            `RequestOutput.error`), or None while it is running.
        stop_reason: the stop string or token id that ended it; None for the end of sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None

    def add(self, delta: CompletionOutput) -> None:
        """Take up what is new of the same completion."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if self.logprobs is not None and delta.logprobs is not None:
            self.logprobs += delta.logprobs
        self.cumulative_logprob = delta.cumulative_logprob
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


@dataclass(slots=True)
class RequestMetrics:
    """Facts of a request, kept while it runs. Times are in seconds, all from the same clock.

    With data parallelism, a sequence's counts come when it ends.

    Attributes:
        scheduled_time: the first step of the request; with data parallelism, when a replica was chosen.
        num_cached_tokens: prompt tokens that came from the prefix cache.
        preemptions: times that a sequence of the request lost its blocks and was computed again.
        windows_compressed: windows compressed, summed over the request's sequences, those after a preemption again.
        evicted_entries: KV pairs dropped by compression, summed over the request's sequences; those that a preemption
            brought back and that were dropped again count twice.
        missing_entries: KV pairs that the sequences have computed and do not have now, or did not have at their end.
            What remains of prompts and outputs is the share that was kept.
        regions: what was compressed of the first sequence, see `kvllm.core.sequence.Sequence.compressions`.
        kept_pairs: with `report_kept_pairs`, what each of these compressions has left, see
            `kvllm.core.protocol.KeptPairs`. Empty with data parallelism.
        missing_mass_max, missing_mass_mean: with recall, of the bounds on the share of attention that lies in dropped
            KV pairs. A step's bound is the largest of all layers and heads. None if nothing dropped was scored, and
            with data parallelism.
    """

    arrival_time: float = 0.0
    scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    preemptions: int = 0
    windows_compressed: int = 0
    evicted_entries: int = 0
    missing_entries: int = 0
    regions: Sequence[Any] = ()
    kept_pairs: Sequence[Any] = ()
    missing_mass_max: float | None = None
    missing_mass_sum: float = 0.0
    missing_mass_steps: int = 0

    @property
    def missing_mass_mean(self) -> float | None:
        return self.missing_mass_sum / self.missing_mass_steps if self.missing_mass_steps else None

    def note_missing_mass(self, bound: float) -> None:
        """A step's bound of one of the request's sequences."""
        self.missing_mass_max = max(bound, self.missing_mass_max or 0.0)
        self.missing_mass_sum += bound
        self.missing_mass_steps += 1


@dataclass(slots=True)
class RequestOutput:
    """The state of one request: its `n` completions so far.

    Attributes:
        prompt: None when the prompt was given as token ids.
        prompt_logprobs: one dict for each token of the prompt, as in `CompletionOutput.logprobs`; None for the first
            token, which follows nothing. Complete once there is a first token of output.
        error: set when this request alone could not be served, or could not be served to its end; `finished` is True
            then.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    error: KvLLMError | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return self.metrics.num_cached_tokens

    def add(self, delta: RequestOutput) -> None:
        """Take up what is new of the same request."""
        completions = {completion.index: completion for completion in self.outputs}
        for new in delta.outputs:
            if new.index in completions:
                completions[new.index].add(new)
            else:
                self.outputs.append(new)
        self.finished, self.error, self.metrics = delta.finished, delta.error, delta.metrics
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs


@dataclass(slots=True)
class BeamSearchSequence:
    """A beam as vLLM's scripts read it: tokens and text begin with those of the prompt. text: None without a
    tokenizer."""

    tokens: list[int]
    text: str | None
    cum_logprob: float
    finish_reason: FinishReason | None


@dataclass(slots=True)
class BeamSearchOutput(RequestOutput):
    """What `LLM.beam_search` found for one prompt. sequences: `outputs` with the prompt in front of each."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)
