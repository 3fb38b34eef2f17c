"""What a step costs by its query tokens, and so how many drafts pay."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate, islice

from msgspec import Struct

from kvllm.config import EngineConfig
from kvllm.core.executor import Executor
from kvllm.core.protocol import SequenceStart, StepPlan, Verification
from kvllm.core.tables import TableStart
from kvllm.sampling_params import SamplingParams

REPEATS, SECONDS = 5, 0.5
"""Measurements of a step: as many, but no other one after so long."""
MOST_TOKENS = 32
"""In a measured step. Beyond, costs go on as between the last two."""
LONG = 2048
"""KV pairs in the cache of the sequence whose attention is measured."""


class StepCost(Struct, frozen=True):
    """Seconds of a step by its query tokens, of which each has logits; linear between what was measured.

    seconds: of a step of so many `tokens`, with next to nothing in the cache.
    attention: of as many query tokens of one sequence to each KV pair that it has cached.
    """

    tokens: list[int]
    seconds: list[float]
    attention: list[float]

    def least_probability(self, tokens: int, num_seqs: int, draft: int = 0, cached: int = 0) -> float:
        """How probable a token has to be so that it pays to draft it: it must come at least as fast as those of steps
        without drafts, one for each of `num_seqs` sequences that have as much cached.

        tokens: query tokens of the step without it. draft: of these, the drafted ones of its sequence, which has so
        many KV pairs `cached`.
        """
        step, attention = self._line(self.seconds), self._line(self.attention)
        more = step(tokens + 1) - step(tokens) + (attention(draft + 2) - attention(draft + 1)) * cached
        return more * num_seqs / (step(num_seqs) + attention(1) * cached * num_seqs)

    def _line(self, values: list[float]) -> Callable[[int], float]:
        def at(tokens: int) -> float:
            index = min(max(1, bisect_left(self.tokens, tokens)), len(self.tokens) - 1)
            (left, right), (low, high) = self.tokens[index - 1 : index + 1], values[index - 1 : index + 1]
            return low + (high - low) * (tokens - left) / (right - left)

        return at


def measure_steps(executor: Executor, config: EngineConfig) -> StepCost | None:
    """Run steps of one sequence with 1, 2, 4, ... query tokens on idle workers, after little and after much. None if
    there is no room for two tokens."""
    room = config.num_blocks // sum(len(group.parts) for group in config.kv_groups) * config.block_size
    room = min(room, config.max_model_len - 1)
    most = min(MOST_TOKENS, room, config.max_num_batched_tokens)
    if most < 2:
        return None
    counts, cached = [1 << i for i in range(most.bit_length())], min(LONG, room - most)
    short, long = (_measure(executor, config, counts, length) for length in (0, cached))
    attention = [max(0.0, late - early) / max(1, cached) for early, late in zip(short, long, strict=True)]
    return StepCost(counts, short, list(accumulate(attention, max)))


def _measure(executor: Executor, config: EngineConfig, counts: list[int], cached: int) -> list[float]:
    """Seconds for each count: the fastest of several steps, in turn."""
    start = time.perf_counter()
    found: list[list[float]] = [[] for _ in counts]
    for repeat in range(1 + REPEATS):  # the first time is a warm-up
        if repeat > 1 and time.perf_counter() - start > SECONDS:
            break
        for count, seconds in zip(counts, found, strict=True):
            begin = time.perf_counter()
            executor.execute(_step(config, count, cached))
            if repeat:
                seconds.append(time.perf_counter() - begin)
    executor.execute(StepPlan(dropped_seq_ids=[SEQ_ID]))
    # More tokens never take less time, whatever the clock says.
    return list(accumulate(map(min, found), max))


SEQ_ID = 0


def _step(config: EngineConfig, count: int, cached: int) -> StepPlan:
    """A new sequence, of which so much is cached, computes `count` tokens."""
    blocks, size = iter(range(config.num_blocks)), config.block_size
    tables = []
    for group in config.kv_groups:
        first = group.first_block(cached, size)
        needed = -(-(cached + count) // size) - first
        tables += [TableStart(first * size, list(islice(blocks, needed))) for _ in group.parts]
    start = SequenceStart(SEQ_ID, [0] * (cached + 1), 1, cached, SamplingParams(temperature=0.0), 0, tables=tables)
    return StepPlan(new_seqs=[start], verifications=[Verification(SEQ_ID, [0] * count, [])], reset=True)
