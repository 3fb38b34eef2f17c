"""Options of speculative decoding, with vLLM's names."""

from __future__ import annotations

from typing import ClassVar

from kvllm.config.checks import Options, Refused, check_types, require

SPECULATIVE_METHODS = ("ngram", "suffix")
MOST_DRAFTS = 64
NO_MODEL = "drafts come from texts alone: leave it out"


class SpeculativeConfig(Options, frozen=True, kw_only=True):
    """Speculative decoding: several tokens of a sequence are drafted, and one pass of the model finds those that are
    right. Tokens stay those of the model, whatever is drafted.

    Attributes:
        method: where drafts come from. "ngram": what came after the last tokens of a text when they stood in it before.
            "suffix": after as many of the last tokens as ever stood in this text, or in the output of earlier requests
            with the same cache salt.
        num_speculative_tokens: most tokens that are drafted for a sequence in a step.
        prompt_lookup_min, prompt_lookup_max: how many last tokens "ngram" looks for: as many as are found, at least and
            at most these. Both are 5 if neither is given.

    Raises ConfigError for what is not allowed.
    """

    REFUSED: ClassVar[Refused] = {"model": ((), NO_MODEL), "draft_tensor_parallel_size": ((), NO_MODEL)}

    method: str
    num_speculative_tokens: int = 8
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        allowed = f"choose one of {', '.join(SPECULATIVE_METHODS)}"
        require(self.method in SPECULATIVE_METHODS, "method", self.method, allowed)
        count = self.num_speculative_tokens
        require(1 <= count <= MOST_DRAFTS, "num_speculative_tokens", count, f"between 1 and {MOST_DRAFTS}")
        least, most = self.lookup
        for field in ("prompt_lookup_min", "prompt_lookup_max"):
            value = getattr(self, field)
            require(self.method == "ngram" or value is None, field, value, 'it is an option of method="ngram"')
        require(1 <= least <= most, "prompt_lookup_min", least, f"between 1 and prompt_lookup_max={most}")

    @property
    def lookup(self) -> tuple[int, int]:
        """Fewest and most last tokens that "ngram" looks for."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        return least or most or 5, most or least or 5
