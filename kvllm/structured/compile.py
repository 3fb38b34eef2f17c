"""Compiled grammars, with limits on what each may cost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING

import msgspec

from kvllm.errors import CheckpointError, RequestError
from kvllm.structured.grammar import to_grammar
from kvllm.structured.matcher import Matcher, first_line
from kvllm.structured.vocabulary import Vocabulary
from kvllm.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class Grammars:
    """Matchers of grammars over one vocabulary. Threads may share it.

    read: returns the vocabulary. It is called for the first grammar, or by `prepare`.
    max_kept: grammars that stay compiled. Each has up to 50 MB of states, most have some KB.
    """

    def __init__(self, read: Callable[[], Vocabulary], eos_token_ids: Sequence[int], max_kept: int = 64) -> None:
        self._read = read
        self._eos_token_ids = eos_token_ids
        self._max_kept = max_kept
        self._lock = threading.RLock()
        self._compiled: dict[bytes, LLMatcher] = {}

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Raises RequestError as `read_vocabulary` does."""
        with self._lock:
            return self._read()

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        with self._lock:
            return self.vocabulary.build()

    def prepare(self) -> None:
        """Build the tokenizer's tree now, which takes a second or two for a large vocabulary. Where rules come with a
        step, the first one would hold that step up."""
        if find_spec("llguidance") is not None:
            with suppress(CheckpointError, RequestError):  # the checker refuses all rules then, with the reason
                _ = self.tokenizer

    def matcher(self, rule: StructuredOutputsParams) -> Matcher:
        """A matcher at the beginning of a text. What is wrong with the rule shows when it is used."""
        return Matcher(lambda: self.compile(rule).deep_copy(), self._eos_token_ids)

    def compile(self, rule: StructuredOutputsParams) -> LLMatcher:
        """The grammar's first state; to be copied, not used. Raises RequestError if it does not compile."""
        key = msgspec.msgpack.encode(rule)
        if state := self._compiled.get(key):  # without the lock: a step must not wait for what another thread compiles
            return state
        with self._lock:
            state = self._compiled[key] = self._compiled.get(key) or self._compile(rule)
            if len(self._compiled) > self._max_kept:
                del self._compiled[next(iter(self._compiled))]
        return state

    def _compile(self, rule: StructuredOutputsParams) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            step_max_items=5000, step_lexer_fuel=50_000, max_lexer_states=50_000, verbose_errors=False
        )
        grammar = to_grammar(rule, self.vocabulary.added_tokens.get)
        state = LLMatcher(self.tokenizer, grammar.text, log_level=0, limits=limits)
        if state.is_error():
            raise RequestError(f"structured_outputs cannot be compiled: {first_line(state.get_error())}")
        return state
