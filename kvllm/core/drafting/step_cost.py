"""What a step costs by its query tokens, and so how many drafts pay."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate, islice

from msgspec import Struct

from kvllm.config import EngineConfig
from kvllm.config.engine import MEASURED_DRAFT
from kvllm.core.executor import Executor
from kvllm.core.protocol import Decodes, DraftOrder, SequenceStart, StepPlan, Verification
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
    drafting: of a pass of the draft model with one token of each of 1, 2, 4, ... sequences; none without one.
    """

    tokens: list[int]
    seconds: list[float]
    attention: list[float]
    drafting: list[float] = []

    def least_probability(
        self, tokens: int, num_seqs: int, draft: int = 0, cached: int = 0, *, by_model: bool = False, view: int = 0
    ) -> float:
        """How probable a token has to be so that it pays to draft it: it must come at least as fast as those of steps
        without drafts, one for each of `num_seqs` sequences that have as much cached.

        tokens: query tokens of the step without it. draft: of these, the drafted ones of its sequence, which has so
        many KV pairs `cached`. by_model: the draft model has yet to run for it, and for as many others; `view` of the
        KV pairs are attended for that.
        """
        step, attention = self._line(self.seconds), self._line(self.attention)
        more = step(tokens + 1) - step(tokens) + (attention(draft + 2) - attention(draft + 1)) * cached
        if by_model:
            more += self._line(self.drafting)(num_seqs) / num_seqs + attention(1) * min(view, cached)
        return more * num_seqs / (step(num_seqs) + attention(1) * cached * num_seqs)

    def reading(self, tokens: int, num_seqs: int) -> float:
        """The time in which the draft model reads so many tokens of a text. 1 is that of a token in a step without
        drafts, one for each of `num_seqs` sequences. A token more takes as much of a token more of the model as passes
        do of its."""
        step, last = self._line(self.seconds), self.tokens[-1]
        share = max(draft / of_step for draft, of_step in zip(self.drafting, self.seconds, strict=False))
        more = (step(last + 1) - step(last)) * share
        return tokens * more * num_seqs / step(num_seqs)

    def _line(self, values: list[float]) -> Callable[[int], float]:
        """Values for the first ones of `tokens`. A single one holds for any number."""

        def at(tokens: int) -> float:
            if len(values) == 1:
                return values[0]
            index = min(max(1, bisect_left(self.tokens, tokens)), len(values) - 1)
            (left, right), (low, high) = self.tokens[index - 1 : index + 1], values[index - 1 : index + 1]
            return low + (high - low) * (tokens - left) / (right - left)

        return at


def measure_steps(executor: Executor, config: EngineConfig, vocab_size: int) -> StepCost | None:
    """Run steps of one sequence with 1, 2, 4, ... query tokens on idle workers, after little and after much; no more
    than decodes and drafts may be in a step. None if there is no room for two. The tokens differ, because equal ones
    have the same experts."""
    room = config.num_blocks // sum(len(group.parts) for group in config.kv_groups) * config.block_size
    room = min(room, config.max_model_len - 1)
    most = min(MOST_TOKENS, room, config.max_num_batched_tokens, vocab_size)
    most = min(most, config.max_num_seqs * (1 + config.most_drafts))  # for which graphs have logits
    if most < 2:
        return None
    counts, cached = [1 << i for i in range(most.bit_length())], min(LONG, room - most)
    short, long = (_measure(executor, config, counts, length) for length in (0, cached))
    attention = [max(0.0, late - early) / max(1, cached) for early, late in zip(short, long, strict=True)]
    drafts = config.speculation is not None and config.speculation.by_model
    drafting = _measure_drafts(executor, config, counts) if drafts else []
    return StepCost(counts, short, list(accumulate(attention, max)), drafting)


def _measure(executor: Executor, config: EngineConfig, counts: list[int], cached: int) -> list[float]:
    """Seconds for each count."""
    return _ascending(_fastest(executor, [_step(config, count, cached) for count in counts]))


def _measure_drafts(executor: Executor, config: EngineConfig, counts: list[int]) -> list[float]:
    """Seconds of a pass of the draft model for each number of sequences that run at once: what a longer draft of each
    takes more, by its tokens."""
    counts = [count for count in counts if count <= config.max_num_seqs]
    found = _fastest(executor, [_drafting(config, count, most) for count in counts for most in (1, MEASURED_DRAFT)])
    few, many = _ascending(found[::2]), _ascending(found[1::2])
    more = MEASURED_DRAFT - 1
    return list(accumulate((max(0.0, late - early) / more for early, late in zip(few, many, strict=True)), max))


def _ascending(seconds: list[float]) -> list[float]:
    """Of more and more tokens, which never take less time: what a busy machine takes longer for is corrected."""
    return [*accumulate(reversed(seconds), min)][::-1]


def _fastest(executor: Executor, plans: list[StepPlan]) -> list[float]:
    """Seconds of each plan: the fastest of several steps, in turn."""
    start = time.perf_counter()
    found: list[list[float]] = [[] for _ in plans]
    for repeat in range(1 + REPEATS):  # the first time is a warm-up
        if repeat > 1 and time.perf_counter() - start > SECONDS:
            break
        for plan, seconds in zip(plans, found, strict=True):
            begin = time.perf_counter()
            executor.execute(plan)
            if repeat:
                seconds.append(time.perf_counter() - begin)
    executor.execute(StepPlan(reset=True))
    return [min(seconds) for seconds in found]


SEQ_ID = 0


def _step(config: EngineConfig, count: int, cached: int) -> StepPlan:
    """A new sequence, of which so much is cached, computes `count` tokens."""
    start = _start(config, iter(range(config.num_blocks)), SEQ_ID, count, cached)
    if count == 1:  # no draft: a graph may hold this, and no state is kept to go back to
        return StepPlan(new_seqs=[start], decodes=Decodes([SEQ_ID], [0]), reset=True)
    return StepPlan(new_seqs=[start], verifications=[Verification(SEQ_ID, list(range(count)), [])], reset=True)


def _drafting(config: EngineConfig, count: int, num_tokens: int) -> StepPlan:
    """So many new sequences compute a token each, and as many tokens of each are drafted."""
    blocks, seq_ids = iter(range(config.num_blocks)), list(range(count))
    starts = [_start(config, blocks, seq_id, 1, 1) for seq_id in seq_ids]
    orders = [DraftOrder(seq_id, num_tokens) for seq_id in seq_ids]
    return StepPlan(new_seqs=starts, decodes=Decodes(seq_ids, seq_ids), drafts=orders, reset=True)


def _start(config: EngineConfig, blocks: Iterator[int], seq_id: int, count: int, cached: int) -> SequenceStart:
    """A sequence of which so much is cached, with blocks for `count` tokens more."""
    size, tables = config.block_size, []
    for group in config.kv_groups:
        first = group.first_block(cached, size)
        needed = -(-(cached + count) // size) - first
        tables += [TableStart(first * size, list(islice(blocks, needed))) for _ in group.parts]
    return SequenceStart(seq_id, [0] * max(1, cached), 1, cached, SamplingParams(temperature=0.0), 0, tables=tables)
