"""What a request asks of a pooling model. Names follow vLLM."""

from __future__ import annotations

from typing import ClassVar

from kvllm.config import Refused, require
from kvllm.config.checks import Options, check_types
from kvllm.errors import RequestError
from kvllm.pooling_config import PoolingConfig

TASKS = {"embed": ("embed", "token_embed"), "classify": ("classify", "token_classify")}
"""By what a model does: of a prompt, and of each of its tokens."""


class PoolingParams(Options, frozen=True, kw_only=True):
    """Options of one request for embeddings, scores or classes.

    Attributes:
        dimensions: numbers of an embedding, which is cut before it is normalized, for models that say so
            (`is_matryoshka` or `matryoshka_dimensions` in config.json, or in `hf_overrides`).
        use_activation: whether embeddings are normalized, and scores of classes become probabilities. Default: what
            the model is made for.
        normalize: the same.
        truncate_prompt_tokens: keep the first tokens of a longer prompt, with the special ones at its end; -1 for as
            many as the model takes.
        task: of `LLM.encode`: "embed" or "classify", or for each token "token_embed" or "token_classify".

    Raises:
        ConfigError: an option is unknown, or has a wrong type or value.
    """

    REFUSED: ClassVar[Refused] = {
        "extra_kwargs": (({},), "there are no other options"),
        "skip_reading_prefix_cache": ((True, False), "a pass reads no cache"),
    }

    dimensions: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        check_types(self)
        tasks = [name for names in TASKS.values() for name in names]
        require(self.task in (None, *tasks), "task", self.task, f"one of {', '.join(tasks)}")
        require(self.dimensions is None or self.dimensions >= 1, "dimensions", self.dimensions, "at least 1")
        most = self.truncate_prompt_tokens
        require(most is None or most == -1 or most >= 1, "truncate_prompt_tokens", most, "at least 1, or -1")
        both = None not in (self.use_activation, self.normalize) and self.use_activation != self.normalize
        require(not both, "normalize", self.normalize, "it is another name of use_activation: give one")

    @property
    def activates(self) -> bool | None:
        return self.normalize if self.use_activation is None else self.use_activation

    def check(self, model: PoolingConfig, size: int) -> None:
        """Raise RequestError for what a model cannot do. size: numbers of its embeddings."""
        if self.task is not None and self.task not in TASKS[model.task]:
            raise RequestError(f"task={self.task!r} is not what the model does: {' or '.join(TASKS[model.task])}")
        if self.dimensions is None:
            return
        if model.task != "embed" or model.dimensions is None:
            raise RequestError(
                f"dimensions={self.dimensions} is not allowed: the model's config.json names no smaller sizes. If it "
                'was trained for them, start it with hf_overrides={"is_matryoshka": true}',
                param="dimensions",
            )
        allowed = model.dimensions or range(1, size + 1)
        if self.dimensions not in allowed:
            names = ", ".join(map(str, model.dimensions)) or f"1 to {size}"
            raise RequestError(f"dimensions={self.dimensions} is not allowed: {names}", param="dimensions")
