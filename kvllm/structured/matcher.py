"""The state of one sequence in its grammar: which tokens may come next."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvllm.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Seconds of computing time that a sequence's masks may take: these at once, and more with every token. All of a batch
# wait for the slowest mask. Usual ones take 0.0001 s.
FIRST_SECONDS, SECONDS_PER_TOKEN = 0.25, 0.005


class Matcher:
    """Follows a sequence through a grammar.

    The tokens of the output are the truth: what is new in them since the last call is consumed, and after a preemption
    all of them are.
    """

    def __init__(self, start: Callable[[], LLMatcher], eos_token_ids: Sequence[int]) -> None:
        """start: returns the grammar's first state. It is called when the first mask is needed."""
        self._start = start
        self._eos_token_ids = eos_token_ids
        self._state: LLMatcher | None = None
        self._num_consumed = 0
        self._seconds = FIRST_SECONDS

    def branch(self) -> Matcher:
        """One that goes on from here, and leaves this one as it is."""
        branch = Matcher(self._start, self._eos_token_ids)
        branch._state, branch._num_consumed = self._state and self._state.deep_copy(), self._num_consumed
        return branch

    def allowed(self, output_token_ids: list[int]) -> np.ndarray:
        """The set of tokens that may come after the output, as `kvllm.structured.token_sets` has it: uint32 [at least
        ceil(V / 32)].

        Raises RequestError if none may, or if finding out takes too long.
        """
        if self._state is None:
            self._state = self._start()
        begin = time.thread_time()
        for token_id in output_token_ids[self._num_consumed :]:
            self._consume(self._state, token_id)
        words = np.frombuffer(self._state.compute_bitmask(), np.uint32)
        self._check(self._state)
        self._seconds -= time.thread_time() - begin
        if self._seconds < 0:
            raise RequestError("structured_outputs takes too long to find the tokens that are allowed: simplify it")
        if not words.any():
            raise RequestError("structured_outputs allows no text that the vocabulary's tokens can continue")
        return words

    def _consume(self, state: LLMatcher, token_id: int) -> None:
        self._num_consumed += 1
        self._seconds += SECONDS_PER_TOKEN
        if state.is_stopped() and token_id in self._eos_token_ids and not state.is_error():
            return  # the text has ended, and the request ignores that
        state.consume_token(token_id)
        self._check(state)

    def _check(self, state: LLMatcher) -> None:
        if state.is_error():
            raise RequestError(f"structured_outputs cannot be followed: {first_line(state.get_error())}")


def first_line(error: str) -> str:
    """The part of llguidance's error that names the cause; after it come states of its parser."""
    lines = error.strip().split("\n")
    # Of the forced bytes, no token has the first one: the parser then tries any token.
    if lines[0] == "NoExtensionBias" or "forced bytes: got" in lines[0]:
        return "no token of the vocabulary can come next"
    causes = [line for line in lines if line.startswith("error: ")]  # of a regular expression, which is drawn above
    return " ".join([lines[0], *causes[:1]])
