"""The whole cache of each sequence that has become too long."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from typing import ClassVar

from kvllm.compression.specs import Compresses, MethodSpec
from kvllm.config import CompressionConfig, require
from kvllm.config.policies import PolicyOptions
from kvllm.core.policies.base import Candidate, CompressionPolicy, EngineLoad
from kvllm.core.regions import Regions, WholeCache
from kvllm.core.sequence import Sequence
from kvllm.errors import RequestError
from kvllm.sampling_params import SamplingParams


class Threshold(PolicyOptions, frozen=True, kw_only=True, tag="threshold"):
    """A sequence's whole cache is compressed once it has `threshold_tokens` KV pairs, to `budget_tokens`.

    Attributes:
        threshold_tokens: KV pairs at which a cache is cut (the paper: 1280, at blocks of 256).
        budget_tokens: KV pairs to which it is cut (the paper: 1025). A request's `SamplingParams.budget_tokens` comes
            first, and moves both by the same number of KV pairs.
        protect_prompt: leave the blocks of the prompt whole; they count among `budget_tokens`.
    """

    compresses: ClassVar[Compresses] = "cache"
    threshold_tokens: int
    budget_tokens: int
    protect_prompt: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        threshold, budget = self.threshold_tokens, self.budget_tokens
        require(threshold >= 1, "threshold_tokens", threshold, "at least 1")
        require(1 <= budget <= threshold, "budget_tokens", budget, f"between 1 and threshold_tokens={threshold}")

    def check(self, config: CompressionConfig) -> None:
        spec, buffer, window = config.spec, config.buffer, config.query_window
        most = f"at most budget_tokens={self.budget_tokens}, which it is part of"
        require(buffer <= self.budget_tokens, "buffer", buffer, most)
        after = f"True with method={config.method!r}, whose scores begin after the prompt"
        require(self.protect_prompt or not spec.reselects, "protect_prompt", self.protect_prompt, after)
        gap = self.threshold_tokens - self.held_tokens(spec)
        if spec.queries == "recent" and gap:
            known = gap if spec.ragged else max(gap, buffer)
            recent = f"the last {known} KV pairs are those whose tokens are known at a compression"
            require(window <= known, "query_window", window, f"at most {known}: {recent}")
            if spec.ragged:
                require(buffer <= known, "buffer", buffer, f"at most {known}: {recent}")

    def held_tokens(self, spec: MethodSpec) -> int:
        """KV pairs for which a sequence holds memory after a compression.

        Methods that keep more in some layers or heads than in others get room for half of what is between budget and
        threshold: it must not depend on data. What they keep on average is `budget_tokens`.
        """
        return (self.budget_tokens + self.threshold_tokens) // 2 if spec.ragged else self.budget_tokens

    def regions(self, config: CompressionConfig, block_size: int, retain: int | None = None) -> Regions:
        return WholeCache(block_size, self.threshold_tokens, self.held_tokens(config.spec))


class ThresholdPolicy(CompressionPolicy[Threshold]):
    """A sequence's whole cache is cut to `budget_tokens` KV pairs when it has `threshold_tokens` (paper, Eq. 2-3)."""

    options_type = Threshold
    at_once = True

    def check(self, prompt_length: int, sampling: SamplingParams) -> None:
        if not sampling.compress:
            return
        options, buffer, block_size = self.options, self.config.buffer, self.regions.block_size
        budget = options.budget_tokens if sampling.budget_tokens is None else sampling.budget_tokens
        blocks = -(-prompt_length // block_size) if options.protect_prompt else 0
        least = blocks * block_size + buffer + 1
        if budget < least and (options.protect_prompt or sampling.budget_tokens is not None):
            protected = f"the {prompt_length} tokens of the protected prompt in whole blocks, " if blocks else ""
            raise RequestError(
                f"budget_tokens={budget} leaves no room: {protected}buffer={buffer} and one KV pair more make "
                f"{least}: raise budget_tokens, lower buffer" + (" or shorten the prompt" if blocks else "")
            )

    def regions_of(self, seq: Sequence) -> Regions:
        """A budget of the request's own moves the threshold along with what is kept."""
        options, budget = self.options, seq.sampling.budget_tokens
        if not seq.sampling.compress or (budget is None and not options.protect_prompt):
            return super().regions_of(seq)
        more = 0 if budget is None else budget - options.budget_tokens
        protected = seq.prompt_length if options.protect_prompt else 0
        threshold, held = options.threshold_tokens + more, options.held_tokens(self.config.spec) + more
        return WholeCache(self.regions.block_size, threshold, held, protected)

    def select(self, decoding: Sequences[Sequence], load: EngineLoad) -> list[Candidate]:
        return self.eligible(decoding)
