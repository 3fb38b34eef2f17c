"""Measuring one variant: an engine that is given the texts token by token, and asked for needles."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from kvllm.comparison.equal_memory import Fit
from kvllm.comparison.needles import Needle
from kvllm.comparison.predictions import FullPredictions, Predictions, Reference, last_part
from kvllm.comparison.teacher_forcing import TeacherForcing
from kvllm.comparison.texts import Text
from kvllm.comparison.variants import Plan, Setting
from kvllm.config import CompressionConfig, bounding
from kvllm.kvcache.cache import CacheShape
from kvllm.llm import LLM
from kvllm.sampling_params import SamplingParams
from kvllm.worker.features import bytes_beside_pool

Advance = Callable[[int], object]
"""Is told how many tokens were predicted."""


class Piece(Struct, kw_only=True):
    """The figures of one text.

    kl_last_quarter, kl: KL(full || variant) in nats, of the last quarter and of all positions. nll: minus the log
    probability of the text's tokens, in nats. same_top: the share of positions whose most likely token is the full
    cache's. pairs, all_pairs: KV pairs held at the end, and computed.
    """

    kind: str
    kl_last_quarter: float
    kl: float
    nll: float
    same_top: float
    pairs: int
    all_pairs: int


class Needles(Struct, kw_only=True):
    """Needles that were found: in outputs after a prompt that is kept, and in prompts that were compressed."""

    number: int
    found_in_output: int
    found_in_prompt: int | None
    found: list[list[bool]]


class Result(Struct, kw_only=True):
    """The figures of one variant.

    refused: why there are none. pairs_share, bytes_share: held at the end, of all pairs, and of the full
    cache's bytes; with scales, and what the engine holds beside the pairs.
    """

    name: str
    method: str | None
    memory: float
    share: float
    kv_cache_dtype: str
    compression: CompressionConfig | None = None
    refused: str | None = None
    prompts_refused: str | None = None
    pieces: list[Piece] = []
    pairs_share: float = 0.0
    bytes_share: float = 0.0
    tokens_per_second: float = 0.0
    preemptions: int = 0
    needles: Needles | None = None


class Bench:
    """Measures variants of one model on the same texts and needles."""

    def __init__(
        self, setting: Setting, texts: Sequence[Text], needles: Sequence[Needle], reference: Reference
    ) -> None:
        self.setting, self.texts, self.needles, self.reference = setting, texts, needles, reference

    def measure(self, plan: Plan, advance: Advance, *, full: bool = False) -> Result:
        """full: this is the reference."""
        result = self.empty(plan)
        if plan.refused:
            return result
        llm = LLM.from_engine_args(self.setting.engine_args(plan.variant.kv_cache_dtype, plan.fitted))
        predictions = (FullPredictions if full else Predictions)(self.texts, self.reference, advance)
        given = [Given(text.prompt, text.output) for text in self.texts]
        hidden = [Given.split(needle, needle.prompt) for needle in self.needles]
        outcome = _feed(llm, [*given, *hidden], plan.fitted, predictions)
        result.pieces = [
            self._piece(i, predictions, each.stored - missing)
            for i, (each, missing) in enumerate(zip(given, outcome.missing, strict=False))
        ]
        result.tokens_per_second = sum(each.tokens for each in (*given, *hidden)) / outcome.seconds
        result.preemptions = llm.stats().preemptions
        result.pairs_share, result.bytes_share = _shares(llm, result.pieces)
        if self.needles:
            in_output = self._found(llm, outcome.tokens[len(given) :])
            del llm  # before the memory of the next one is needed
            result.needles = self._with_prompts(plan, in_output, advance)
        gc.collect()
        return result

    def empty(self, plan: Plan) -> Result:
        variant = plan.variant
        return Result(
            name=variant.name,
            method=variant.method,
            memory=variant.memory,
            share=variant.share,
            kv_cache_dtype=variant.kv_cache_dtype,
            compression=plan.fitted and plan.fitted.compression,
            refused=plan.refused,
            prompts_refused=plan.prompts_refused,
        )

    def tokens(self, plan: Plan) -> int:
        """That are predicted for a variant."""
        if plan.refused:
            return 0
        asked = sum(needle.length - needle.prompt for needle in self.needles)
        if plan.prompt_fitted and not plan.prompts_refused:
            asked += sum(len(needle.question) + needle.tokens for needle in self.needles)
        return sum(len(text.output) for text in self.texts) + asked

    def _piece(self, i: int, predictions: Predictions, held: int) -> Piece:
        divergences, nlls = predictions.divergences[i], predictions.nlls[i]
        begin = last_part(len(nlls))
        last, rest = np.nanmean(divergences[begin:]), divergences[:begin]
        before = np.nanmean(rest) if len(rest) else 0.0
        return Piece(
            kind=self.texts[i].kind,
            kl_last_quarter=float(last),
            kl=float((before * begin + last * (len(nlls) - begin)) / len(nlls)),
            nll=float(nlls.mean()),
            same_top=float(predictions.top[i].mean()),
            pairs=held,
            all_pairs=self.texts[i].stored,
        )

    def _with_prompts(self, plan: Plan, in_output: list[bool], advance: Advance) -> Needles:
        """The needles in prompts, too. Where all pairs are kept it makes no difference which part the prompt is."""
        in_prompt: list[bool] | None = in_output
        if plan.prompts_refused:
            in_prompt = None
        elif plan.prompt_fitted:
            llm = LLM.from_engine_args(self.setting.engine_args(plan.variant.kv_cache_dtype, plan.prompt_fitted))
            given = [Given.split(needle, len(needle.haystack)) for needle in self.needles]
            outcome = _feed(llm, given, plan.prompt_fitted, lambda logits, *_: advance(len(logits)))
            in_prompt = self._found(llm, outcome.tokens)
        return Needles(
            number=len(in_output),
            found_in_output=sum(in_output),
            found_in_prompt=None if in_prompt is None else sum(in_prompt),
            found=[in_output] if in_prompt is None else [in_output, in_prompt],
        )

    def _found(self, llm: LLM, outputs: Sequence[list[int]]) -> list[bool]:
        """Whether the answers, at the end of outputs, are right."""
        assert llm.tokenizer is not None
        decode = llm.tokenizer.decode
        texts = (
            decode(tokens[-needle.tokens :], skip_special_tokens=True)
            for tokens, needle in zip(outputs, self.needles, strict=True)
        )
        return [needle.is_found_in(text) for text, needle in zip(texts, self.needles, strict=True)]


class Given(NamedTuple):
    """A prompt, the output that is given, and tokens that are sampled after it."""

    prompt: list[int]
    output: list[int]
    sampled: int = 0

    @staticmethod
    def split(needle: Needle, end: int) -> Given:
        """A needle, of whose text so many tokens are the prompt."""
        return Given(needle.haystack[:end], [*needle.haystack[end:], *needle.question], needle.tokens)

    @property
    def tokens(self) -> int:
        """Of the output."""
        return len(self.output) + self.sampled

    @property
    def stored(self) -> int:
        """KV pairs that are computed: the last token is never stored."""
        return len(self.prompt) + self.tokens - 1


class Outcome(NamedTuple):
    """missing: KV pairs that each text has lost at its end. tokens: of each output."""

    missing: list[int]
    tokens: list[list[int]]
    seconds: float


def _feed(llm: LLM, given: Sequence[Given], fitted: Fit | None, observe: Callable[..., object]) -> Outcome:
    """Let an engine predict outputs. The observer's time does not count."""
    params = [
        SamplingParams(temperature=0, max_tokens=each.tokens, ignore_eos=True, budget_tokens=_budget(each, fitted))
        for each in given
    ]
    forcing = TeacherForcing(llm)
    begin = time.perf_counter()
    outputs = forcing.feed([each.prompt for each in given], [each.output for each in given], params, observe)
    return Outcome(
        [output.metrics.missing_entries for output in outputs],
        [list(output.outputs[0].token_ids) for output in outputs],
        time.perf_counter() - begin - forcing.observing_seconds,
    )


def _budget(given: Given, fitted: Fit | None) -> int | None:
    """Of a prompt that is compressed, a share of that alone: it is cut before anything else comes."""
    if fitted is None:
        return None
    prompt = len(given.prompt)
    return fitted.budget((prompt, prompt if fitted.compresses_prompt else given.stored))


# Bytes


def _shares(llm: LLM, pieces: Sequence[Piece]) -> tuple[float, float]:
    """KV pairs held at the end, of all; and bytes held, of those of the full cache.

    Layers with a sliding window hold it in either case. What an engine holds for each sequence beside the pool counts.
    """
    model, shape, config = llm.model_config, llm.cache_shape, llm.config
    windows = bounding(model.windows, config.max_model_len)
    held = sum(_layer_pairs(windows, piece.pairs, piece.all_pairs) for piece in pieces)
    all_pairs = sum(_layer_pairs(windows, piece.all_pairs, piece.all_pairs) for piece in pieces)
    beside = sum(bytes_beside_pool(config, shape).values()) / config.max_num_seqs * len(pieces)
    pair_bytes = replace(shape, kv_format=None).pair_bytes * shape.num_kv_heads
    return held / all_pairs, (held * _held_bytes(shape) + beside) / (all_pairs * pair_bytes)


def _layer_pairs(windows: Sequence[int | None], pairs: int, stored: int) -> int:
    """KV pairs in all layers of a text of which those that attend everything hold `pairs`."""
    return sum(pairs if window is None else min(window, stored) for window in windows)


def _held_bytes(shape: CacheShape) -> float:
    """Bytes of a KV pair of all heads in one layer, with scales and scores."""
    return shape.bytes_per_block / (shape.num_places * shape.block_size)
