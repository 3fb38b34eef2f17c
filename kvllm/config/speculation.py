"""Options of speculative decoding, with vLLM's names."""

from __future__ import annotations

from typing import ClassVar

from kvllm.config.checks import Options, Refused, check_types, require

SPECULATIVE_METHODS = ("ngram", "suffix", "draft_model", "mtp", "self")
MOST_DRAFTS = 64
VIEW_FIRST, VIEW_LAST = 16, 512
"""KV pairs that a model attends which drafts for itself, in whole blocks: the first ones of a text, and the last."""
ONE_RANK = "the first rank computes all of the draft model: leave it out"


class SpeculativeConfig(Options, frozen=True, kw_only=True):
    """Speculative decoding: several tokens of a sequence are drafted, and one pass of the model finds those that are
    right. Tokens stay those of the model, whatever is drafted.

    Attributes:
        method: where drafts come from. "ngram": what came after the last tokens of a text when they stood in it before.
            "suffix": after as many of the last tokens as ever stood in this text, or in the output of earlier requests
            with the same cache salt. "draft_model": what a smaller model with the same vocabulary says. "mtp": what
            the layer says that the checkpoint has for this. "self": what the model says by a few of the KV pairs.
        num_speculative_tokens: most tokens that are drafted for a sequence in a step.
        prompt_lookup_min, prompt_lookup_max: how many last tokens "ngram" looks for: as many as are found, at least and
            at most these. Both are 5 if neither is given.
        model: that of "draft_model": the directory of a checkpoint, or its id on a hub.
        quantization: of its weights, as that of an engine; the model's own does not matter.

    Raises ConfigError for what is not allowed.
    """

    REFUSED: ClassVar[Refused] = {"draft_tensor_parallel_size": ((1,), ONE_RANK)}

    method: str
    num_speculative_tokens: int = 8
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    model: str | None = None
    quantization: str | None = None

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
        drafts_by_model = self.method == "draft_model"
        for field in ("model", "quantization"):
            value, allowed = getattr(self, field), 'it is an option of method="draft_model": leave it out'
            require(drafts_by_model or value is None, field, value, allowed)
        allowed = 'method="draft_model" needs the directory of a checkpoint with the same vocabulary, or its id'
        require(not drafts_by_model or bool(self.model), "model", self.model, allowed)
        require(1 <= least <= most, "prompt_lookup_min", least, f"between 1 and prompt_lookup_max={most}")

    @property
    def by_model(self) -> bool:
        """Whether workers draft, by what they compute."""
        return self.has_model or self.method == "self"

    @property
    def has_model(self) -> bool:
        """Whether another model than that of the engine drafts, or a layer more."""
        return self.method in ("draft_model", "mtp")

    @property
    def lookup(self) -> tuple[int, int]:
        """Fewest and most last tokens that "ngram" looks for."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        return least or most or 5, most or least or 5
