"""The variants of a comparison: methods and dtypes in equal bytes, and what a model refuses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from msgspec import Struct

from kvllm.comparison.equal_memory import BLOCK_SIZE, BY_WINDOWS, Fit, Length, fit
from kvllm.comparison.kv_caches import kv_cache_options
from kvllm.compression.specs import AUTO, FROM_ALL, SPECS, known_methods
from kvllm.config import require
from kvllm.engine_args import EngineArgs
from kvllm.engine_builder import cache_shape, check_engine
from kvllm.errors import CheckpointError, ConfigError
from kvllm.spelling import did_you_mean

BASELINES = ("random", "streaming")
ALL_PAIRS = "all pairs"
SHORT = 20
"""Characters of a reason that tells too little alone."""


class Variant(Struct, frozen=True, kw_only=True):
    """One way to hold a text. method: None keeps all KV pairs. memory: the share of the full cache's bytes that a text
    may take at its end. share: of its KV pairs, those that fit there."""

    method: str | None = None
    memory: float = 1.0
    share: float = 1.0
    kv_cache_dtype: str = "auto"

    @property
    def name(self) -> str:
        kept = ALL_PAIRS if self.method is None else f"{self.method} {100 * self.share:.3g}%"
        return kept if self.kv_cache_dtype == "auto" else f"{kept} {self.kv_cache_dtype}"


FULL = Variant()


def make_variants(
    setting: Setting, methods: Iterable[str], memory: Sequence[float], dtypes: Sequence[str], stored: float
) -> list[Variant]:
    """All pairs first, then bits alone, choice by lot, sinks and recent pairs, and the other methods.

    stored: KV pairs of a text, in the mean. What is held beside them, recent pairs as they were or sums of attention,
    leaves room for fewer. Where all pairs of a dtype fit, nothing has to be dropped, and no method is tried.
    """
    names = dict.fromkeys((*BASELINES, *methods))
    full = pair_bytes(setting, "auto")
    sums = pair_bytes(setting, "auto", scored=True) - full
    recent = {dtype: kv_cache_options(dtype).kv_residual_tokens * full / stored for dtype in ("auto", *dtypes)}
    alone = [
        Variant(memory=(pair_bytes(setting, dtype) + beside) / full, kv_cache_dtype=dtype)
        for dtype, beside in recent.items()
    ]
    dropping = []
    for name, share, dtype in product(names, memory, dtypes):
        spec = SPECS[name.removesuffix(BY_WINDOWS)]
        room = share * full - recent[dtype] - (sums if spec.reads_mass else 0)
        kept = room / pair_bytes(setting, dtype, scored=spec.reselects)
        dropping.append(Variant(method=name, memory=share, share=kept, kv_cache_dtype=dtype))
    return alone + [variant for variant in dropping if 0 < variant.share <= 1]


def pair_bytes(setting: Setting, kv_cache: str, *, scored: bool = False) -> float:
    """Bytes of a KV pair in all layers, with scales, and with a score if it is `scored`. A dtype that the model
    refuses, for which there will be a row with the reason, counts as none."""
    try:
        shape = cache_shape(setting.engine_args(kv_cache))
    except ConfigError:
        shape = cache_shape(setting.engine_args())
    return replace(shape, scored=scored).bytes_per_block / shape.block_size


def resolved(method: str) -> str:
    """The name of a method, also of what "auto" stands for. Raises ConfigError for one that there is not."""
    name = method.removesuffix(BY_WINDOWS)
    known = (AUTO, *known_methods(name))
    near = did_you_mean(name, known)
    require(name in known, "--methods", method, f"choose of {', '.join(known)}{near}")
    return (FROM_ALL if name == AUTO else name) + method[len(name) :]


class Setting(Struct, frozen=True, kw_only=True):
    """What the engines of all variants have in common."""

    model: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    seed: int

    def engine_args(self, kv_cache_dtype: str = "auto", fitted: Fit | None = None) -> EngineArgs:
        return EngineArgs(
            self.model,
            dtype=self.dtype,
            seed=self.seed,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            enable_prefix_caching=False,
            **engine_options(kv_cache_dtype, fitted),
        )


def engine_options(kv_cache_dtype: str, fitted: Fit | None) -> dict[str, Any]:
    """The options of a variant's engine."""
    cache = {name: value for name, value in kv_cache_options(kv_cache_dtype)._asdict().items() if value}
    block_size = fitted.block_size if fitted else BLOCK_SIZE
    return {"block_size": block_size, **cache, **({"compression": fitted.compression} if fitted else {})}


class Plan(Struct, kw_only=True):
    """A variant's options, found before any work. refused: why it cannot be; prompts_refused: why prompts cannot be
    compressed."""

    variant: Variant
    fitted: Fit | None = None
    prompt_fitted: Fit | None = None
    refused: str | None = None
    prompts_refused: str | None = None


def plan_variant(variant: Variant, setting: Setting, lengths: Sequence[Length], haystacks: Sequence[int]) -> Plan:
    """lengths: of the texts and of the needles in their outputs. haystacks: of the needles in prompts."""
    plan = Plan(variant=variant)
    try:
        if variant.method is not None:
            plan.fitted = fit(variant.method, variant.share, lengths)
        check_engine(setting.engine_args(variant.kv_cache_dtype, plan.fitted))
    except (ConfigError, CheckpointError) as error:
        plan.refused = str(error)
        return plan
    try:
        if variant.method is not None and haystacks:
            plan.prompt_fitted = fit(
                variant.method, variant.share, [(tokens, tokens) for tokens in haystacks], compress_prompt=True
            )
        check_engine(setting.engine_args(variant.kv_cache_dtype, plan.prompt_fitted))
    except (ConfigError, CheckpointError) as error:
        plan.prompts_refused = str(error)
    return plan


def in_few_words(refusal: str) -> str:
    """The reason alone, without what to do."""
    reason = refusal.partition(" is not allowed: ")[2] or refusal
    first, *others = re.split(r": | \(", reason)
    return f"{first}: {others[0]}" if others and len(first) < SHORT else first
