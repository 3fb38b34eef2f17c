"""How the KV cache is compressed: the options, validated where they enter."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from kvllm.compression.specs import (
    AUTO,
    BY_WINDOW,
    CHUNK_BUDGET,
    FROM_ALL,
    LARGEST,
    MAX_CHUNK,
    SPECS,
    TOKEN2CHUNK,
    MethodSpec,
    known_methods,
)
from kvllm.config.checks import Options, check_types, require
from kvllm.errors import ConfigError
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.kvcache.groups import KVGroup, make_groups

WINDOW_OPTIONS = ("window_blocks", "retain_blocks", "retain_tokens", "compress_prompt")
POLICY_OPTIONS = {
    "periodic": ("period", *WINDOW_OPTIONS),
    "pressure": ("period", *WINDOW_OPTIONS),
    "standalone": WINDOW_OPTIONS,
    "threshold": ("threshold_tokens", "budget_tokens", "protect_prompt"),
}
"""The options that not all policies read."""
POLICIES = tuple(POLICY_OPTIONS)
SCORE_SOURCES = ("observed", "recomputed")
PAPER_SEQUENCES = 30
RECALL_DTYPES = ("auto", *KV_FORMATS)


class LayerGroup(Struct, frozen=True):
    """Layers of a model that keep `retain_blocks` blocks of each window. layers: their indices, from 0."""

    layers: tuple[int, ...]
    retain_blocks: int


class CompressionConfig(Options, frozen=True, kw_only=True):
    """How the KV cache is compressed while decoding.

    Attributes:
        method: which KV pairs survive (`kvllm.compression.specs.SPECS`). "auto", for windows, is "mean_attention", or
            "kara_sharp" beside options that do not go with that: `compress_prompt`, recall and recomputed scores.
        policy: which sequences compress and when: "periodic" (every `period` decode steps of the engine, at most
            `max_sequences` sequences), "pressure" (only while blocks are short, and only what is needed to make them
            last `period` steps more), "standalone" (each sequence whenever its tail fills a window; block_size 1) or
            "threshold" (a sequence's whole cache, once it has `threshold_tokens` KV pairs, to `budget_tokens`).
        max_sequences: most sequences that an event compresses, together as far as the tokens of a step allow. None: 30,
            as in the paper, where queries are recomputed, and without that all; spread over as many steps as it takes,
            so that none of them is half as long again as a step without an event, or compresses more than one window.
        window_blocks: blocks of one window, the trailing full blocks that were never compressed.
        retain_blocks: whole blocks kept of a window. A whole number of blocks leaves the partial last block in place.
        retain_tokens: KV pairs kept of a window, buffer included; overrides `retain_blocks` (the paper: 257 of 768).
        buffer: the last KV pairs of a window, always kept.
        chunk_budget: of the KV pairs kept, how many go to completing chunks (alpha of Token2Chunk).
        max_chunk: longest chunk, both ends counted (gamma of Token2Chunk).
        compress_prompt: compress the prompt too, right after it is computed. By default windows leave it whole; a
            threshold means the whole cache, unless `protect_prompt` is set.
        query_window: the most recent queries that score, for methods which do not use all (SnapKV and its kin).
        score_source: "observed" adds scores up while sequences decode, so that an event needs no pass of the model;
            "recomputed" computes the window's queries again. None: observed, where the method only looks back
            (`MethodSpec.observable`) and prompts stay whole.
        threshold_tokens: KV pairs at which "threshold" cuts a cache (the paper: 1280, at blocks of 256).
        budget_tokens: KV pairs to which "threshold" cuts a cache (the paper: 1025). A request's
            `SamplingParams.budget_tokens` comes first, and moves both by the same number of KV pairs.
        protect_prompt: "threshold" leaves the blocks of the prompt whole, too; they count among `budget_tokens`.
        method_options: further options of the method, by name, as its spec lists them: `{"sinks": 8}` for "streaming".
        layer_groups: what groups of layers keep of each window, where it shall differ, instead of `retain_blocks`:
            `[{"layers": [0, 1, 2], "retain_blocks": 1}, {"layers": [3], "retain_blocks": 2}]`. Each layer that attends
            all tokens is in one of them. A layer that keeps less gives its blocks back to the pool. "auto" shares out
            `retain_blocks` of each layer so that the layers lose least, as the checkpoint's `kv_layer_losses.json` has
            it (`kvllm calibrate --layer-losses`). "pyramid" lets the shares fall from layer
            to layer, as PyramidKV does.
        recall_period: hold what is dropped in host memory (`kv_offloading_size`), and let what queries attend come
            back: at every token whose number in the text is a multiple, dropped KV pairs change places with residents
            of compressed windows that are attended less. 1: at every token. None: by `recall_bound`, or not at all.
        recall_bound: instead of a period, in every layer and head where more than this share of a query's attention may
            lie in dropped KV pairs.
        recall_chunks: most chunks of 16 KV pairs that come back at once, in every layer and KV head.
        recall_dtype: of the pairs in host memory: "auto" is the pool's, others as `kv_cache_dtype`.

    Raises ConfigError for what is not allowed.
    """

    method: str = AUTO
    policy: str = "pressure"
    period: int = 128
    max_sequences: int | None = None
    window_blocks: int = 4
    retain_blocks: int = 1
    retain_tokens: int | None = None
    buffer: int = 8
    chunk_budget: int = CHUNK_BUDGET.default
    max_chunk: int = MAX_CHUNK.default
    compress_prompt: bool = False
    query_window: int = 32
    score_source: str | None = None
    threshold_tokens: int | None = None
    budget_tokens: int | None = None
    protect_prompt: bool = False
    method_options: dict[str, int | float] = msgspec.field(default_factory=dict)
    layer_groups: tuple[LayerGroup, ...] | Literal["auto", "pyramid"] = ()
    recall_period: int | None = None
    recall_bound: float | None = None
    recall_chunks: int = 4
    recall_dtype: str = "auto"

    def __post_init__(self) -> None:
        check_types(self)
        known = (AUTO, *known_methods(self.method))
        require(self.method in known, "method", self.method, f"choose one of {', '.join(known)}")
        require(self.policy in POLICIES, "policy", self.policy, f"choose one of {', '.join(POLICIES)}")
        for field in self.__struct_fields__:
            value = getattr(self, field)
            require(not isinstance(value, int) or value <= LARGEST, field, value, f"at most {LARGEST}")
        for field in ("period", "window_blocks", "retain_blocks", "query_window"):
            require(getattr(self, field) >= 1, field, getattr(self, field), "at least 1")
        most = self.max_sequences
        require(most is None or most >= 1, "max_sequences", most, "at least 1, or None")
        require(self.buffer >= 0, "buffer", self.buffer, "at least 0")
        self._check_options()
        require(
            self.retain_blocks <= self.window_blocks,
            "retain_blocks",
            self.retain_blocks,
            f"at most window_blocks={self.window_blocks} (retention 100%)",
        )
        if self.method == AUTO and self.policy == "threshold":
            allowed = 'only with windows: policy="threshold" needs the name of a method, such as "keydiff"'
            require(False, "method", self.method, allowed)
        refusal = self.spec.refusal(self.policy)
        require(refusal is None, "method", self.method, refusal or "")
        if self.spec.queries == "buffer":
            needed = f"at least 1: method={self.method!r} scores with its queries"
            require(self.buffer >= 1, "buffer", self.buffer, needed)
        self._check_score_source()
        if self.layer_groups:
            self._check_layer_groups()
        self._check_recall()
        self._check_unused()
        if self.policy == "threshold":
            self._check_threshold()

    def _check_unused(self) -> None:
        """Refuse options that say nothing under the policy, or without recall."""
        options = [name for policy, names in POLICY_OPTIONS.items() if policy != self.policy for name in names]
        own = POLICY_OPTIONS[self.policy]
        allowed = f"policy={self.policy!r} has {', '.join(own)} of the options that not all policies have"
        self._refuse_set((name for name in options if name not in own), allowed)
        if not self.recalls:
            self._refuse_set(("recall_chunks", "recall_dtype"), "only with recall_period or recall_bound")

    def _refuse_set(self, names: Iterable[str], allowed: str) -> None:
        defaults = {field.name: field.default for field in msgspec.structs.fields(self)}
        for name in names:
            require(getattr(self, name) == defaults[name], name, getattr(self, name), allowed)

    def _check_options(self) -> None:
        for option in TOKEN2CHUNK:
            value = getattr(self, option.name)
            require(option.accepts(value), option.name, value, option.allowed)
        own = {option.name: option for option in self.spec.options if option not in TOKEN2CHUNK}
        for name, value in self.method_options.items():
            known = f"method={self.method!r} has {', '.join(own) if own else 'no such options'}"
            require(name in own, "method_options", self.method_options, known)
            require(own[name].accepts(value), f"method_options: {name}", value, own[name].allowed)

    def _check_score_source(self) -> None:
        source = self.score_source
        require(source in (None, *SCORE_SOURCES), "score_source", source, f"choose one of {', '.join(SCORE_SOURCES)}")
        if self.spec.reselects:
            observed = f"only without it: method={self.method!r} adds its scores up while sequences decode"
            require(source != "recomputed", "score_source", source, observed)
            require(not self.compress_prompt, "compress_prompt", True, observed)
        if source == "observed":
            able = ", ".join(name for name, spec in SPECS.items() if spec.observable)
            require(self.spec.observable is not None, "score_source", source, f"only with method one of {able}")
            allowed = "only without compress_prompt: a cached prefix is shared, and its queries do not pass by"
            require(not self.compress_prompt, "score_source", source, allowed)

    def _check_layer_groups(self) -> None:
        """Lengths of all groups differ by whole blocks, so that they come to windows and to new blocks together."""
        seen = set[int]()
        for group in self.named_groups:
            blocks = group.retain_blocks
            most = f"between 1 and window_blocks={self.window_blocks}"
            require(1 <= blocks <= self.window_blocks, "layer_groups: retain_blocks", blocks, most)
            require(bool(group.layers), "layer_groups: layers", [], "at least one layer")
            for layer in group.layers:
                require(layer >= 0, "layer_groups: layers", layer, "indices of layers, from 0")
                require(layer not in seen, "layer_groups: layers", layer, "each layer once, and this one stands twice")
                seen.add(layer)
        for field, reason in self._not_beside_layer_groups().items():
            require(False, field, getattr(self, field), f"not beside layer_groups, {reason}")

    def _not_beside_layer_groups(self) -> dict[str, str]:
        """Options that are set and do not go with shares by layer, and why."""
        options = {
            "policy": (self.policy == "threshold", "which are for windows: a threshold cuts a cache to budget_tokens"),
            "retain_tokens": (self.retain_tokens is not None, "where retain_blocks of each group says what it keeps"),
            "method": (self.spec.observes, "because it needs KV pairs to be in the same place in all layers"),
        }
        return {field: reason for field, (is_refused, reason) in options.items() if is_refused}

    @property
    def named_groups(self) -> tuple[LayerGroup, ...]:
        """`layer_groups`; none while these are to be found."""
        return () if isinstance(self.layer_groups, str) else self.layer_groups

    def retained_by_layer(self, windows: Sequence[int | None]) -> list[int | None] | None:
        """Blocks of a window that each layer of a model keeps; None if `layer_groups` does not say.

        windows: of each layer, None for those that attend all tokens and are compressed.

        Raises ConfigError unless `layer_groups` names these layers, and no others.
        """
        if not self.named_groups:
            return None
        found: list[int | None] = [None] * len(windows)
        for group in self.named_groups:
            for layer in group.layers:
                known = f"the model has layers 0 to {len(windows) - 1}"
                require(layer < len(windows), "layer_groups: layers", layer, known)
                window = windows[layer]
                sliding = f"this layer attends the last {window} tokens alone, and is not compressed: leave it out"
                require(window is None, "layer_groups: layers", layer, sliding)
                found[layer] = group.retain_blocks
        missing = [layer for layer, window in enumerate(windows) if window is None and found[layer] is None]
        require(not missing, "layer_groups", self.layer_groups, f"layers {missing} are in no group: add them")
        return found

    def _check_recall(self) -> None:
        period, bound = self.recall_period, self.recall_bound
        require(period is None or period >= 1, "recall_period", period, "at least 1, or None")
        require(bound is None or 0 <= bound < 1, "recall_bound", bound, "a share, at least 0 and less than 1, or None")
        require(period is None or bound is None, "recall_bound", bound, f"None with recall_period={period}: give one")
        require(self.recall_chunks >= 1, "recall_chunks", self.recall_chunks, "at least 1")
        dtypes = f"choose one of {', '.join(RECALL_DTYPES)}"
        require(self.recall_dtype in RECALL_DTYPES, "recall_dtype", self.recall_dtype, dtypes)
        spec = self.spec
        if self.recalls:
            moves = spec.ragged or spec.observes or spec.keeps_end or spec.reselects
            allowed = "with recall_period or recall_bound, a method that keeps equally many KV pairs in all heads, and "
            allowed += "no numbers beside them between compressions"
            require(not moves, "method", self.method, allowed)

    def _check_threshold(self) -> None:
        threshold, budget = self.threshold_tokens, self.budget_tokens
        if threshold is None or budget is None:
            missing = "threshold_tokens" if threshold is None else "budget_tokens"
            raise ConfigError(f'policy="threshold" needs {missing}: the KV pairs at which, or to which, it compresses')
        require(threshold >= 1, "threshold_tokens", threshold, "at least 1")
        require(1 <= budget <= threshold, "budget_tokens", budget, f"between 1 and threshold_tokens={threshold}")
        require(self.buffer <= budget, "buffer", self.buffer, f"at most budget_tokens={budget}, which it is part of")
        behind = f"True with method={self.method!r}, whose scores begin after the prompt"
        require(self.protect_prompt or not self.spec.reselects, "protect_prompt", self.protect_prompt, behind)
        gap = threshold - self.held_tokens
        if self.spec.queries == "recent" and gap:
            known = gap if self.spec.ragged else max(gap, self.buffer)
            recent = f"the last {known} KV pairs are those whose tokens are known at a compression"
            require(self.query_window <= known, "query_window", self.query_window, f"at most {known}: {recent}")
            if self.spec.ragged:
                require(self.buffer <= known, "buffer", self.buffer, f"at most {known}: {recent}")

    @property
    def spec(self) -> MethodSpec:
        """Facts about the method that the engine reads."""
        return SPECS[self._chosen]

    @property
    def _chosen(self) -> str:
        """The method, also where "auto" is given."""
        if self.method != AUTO:
            return self.method
        again = self.policy in ("periodic", "pressure") and not (self.compress_prompt or self.recalls)
        return FROM_ALL if again and self.score_source != "recomputed" else BY_WINDOW

    def with_method(self) -> CompressionConfig:
        """The same with a method instead of "auto"."""
        return msgspec.structs.replace(self, method=self._chosen)

    @property
    def observes_scores(self) -> bool:
        """Whether scores are added up while sequences decode, so that no query is computed again."""
        if self.score_source is not None or self.spec.reselects:
            return self.score_source != "recomputed"
        return self.spec.observable is not None and not self.compress_prompt

    @property
    def recalls(self) -> bool:
        """Whether dropped KV pairs may come back."""
        return self.recall_period is not None or self.recall_bound is not None

    def recalls_in(self, logical_length: int, num_tokens: int) -> bool:
        """Whether a step that computes `num_tokens` after `logical_length` tokens of a text may recall something: it
        computes a multiple of the period. Counted in the text, so that batch mates change nothing."""
        period = self.recall_period or 1
        return (logical_length + num_tokens) // period > logical_length // period

    @property
    def event_sequences(self) -> int:
        """Most sequences that an event compresses."""
        if self.max_sequences is not None:
            return self.max_sequences
        needs_queries = self.spec.queries != "none" and not (self.observes_scores or self.spec.learns)
        return PAPER_SEQUENCES if needs_queries or self.spec.repeats else sys.maxsize

    @property
    def options(self) -> dict[str, int | float]:
        """The options of the method's function, by name."""
        fields = {option.name: getattr(self, option.name) for option in TOKEN2CHUNK}
        given = fields | self.method_options
        return {option.name: given.get(option.name, option.default) for option in self.spec.options}

    @property
    def held_tokens(self) -> int:
        """KV pairs for which a sequence holds memory after a compression by threshold.

        Methods that keep more in some layers or heads than in others get room for half of what is between budget and
        threshold: it must not depend on data. What they keep on average is `budget_tokens`.
        """
        assert self.threshold_tokens is not None and self.budget_tokens is not None
        if self.spec.ragged:
            return (self.budget_tokens + self.threshold_tokens) // 2
        return self.budget_tokens

    def keeps_all(self, block_size: int) -> bool:
        """Whether nothing would ever be dropped (retention 100%)."""
        if self.threshold_tokens is not None:
            return self.held_tokens >= self.threshold_tokens
        return self.retained(block_size) == self.window_blocks * block_size

    def retained(self, block_size: int) -> int:
        """KV pairs kept of a window, buffer included; of the whole cache with policy="threshold". With `layer_groups`,
        those of the layers that keep least.

        Raises:
            ConfigError: the window, what is kept of it and the buffer do not fit into each other at this block size.
        """
        if self.policy == "threshold":
            return self.held_tokens
        window = self.window_blocks * block_size
        size = f"a window of {self.window_blocks} blocks of {block_size} has {window} KV pairs"
        if self.named_groups:
            least = min(group.retain_blocks for group in self.named_groups)
            retained, field, value = least * block_size, "layer_groups: retain_blocks", least
        elif self.retain_tokens is None:
            retained, field, value = self.retain_blocks * block_size, "retain_blocks", self.retain_blocks
        else:
            retained, field, value = self.retain_tokens, "retain_tokens", self.retain_tokens
        require(1 <= retained <= window, field, value, f"between 1 and {window}: {size}")
        require(self.buffer < window, "buffer", self.buffer, f"less than the window: {size}")
        require(
            self.buffer <= retained,
            "buffer",
            self.buffer,
            f"at most what a window keeps, {retained} KV pairs ({field}={value}, block_size={block_size}): "
            f"lower buffer, or raise {field}, window_blocks or block_size",
        )
        if self.policy == "standalone":
            require(block_size == 1, "block_size", block_size, 'policy="standalone" moves by single KV pairs: use 1')
        return retained


def bounding(windows: Sequence[int | None], max_model_len: int) -> list[int | None]:
    """The windows of layers; one that holds the longest text is none."""
    return [window if window is not None and window < max_model_len else None for window in windows]


def make_kv_groups(windows: Sequence[int | None], compression: CompressionConfig | None) -> tuple[KVGroup, ...]:
    """The KV groups of a model with these windows, by layer, under a compression.

    Raises ConfigError as `CompressionConfig.retained_by_layer`.
    """
    return make_groups(windows, compression.retained_by_layer(windows) if compression else None)
