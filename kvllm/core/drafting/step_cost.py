"""What a step costs by its query tokens, and so how many drafts pay."""

from __future__ import annotations

import time
from bisect import bisect_left
from itertools import accumulate

from msgspec import Struct

from kvllm.config import EngineConfig
from kvllm.core.executor import Executor
from kvllm.core.protocol import SequenceStart, StepPlan, Verification
from kvllm.core.tables import TableStart
from kvllm.sampling_params import SamplingParams

REPEATS = 5
MOST_TOKENS = 64
"""In a measured step. Beyond, costs go on as between the last two."""


class StepCost(Struct, frozen=True):
    """Seconds of a step by its query tokens, of which each has logits; linear between what was measured."""

    tokens: list[int]
    seconds: list[float]

    def of(self, tokens: int) -> float:
        index = min(max(1, bisect_left(self.tokens, tokens)), len(self.tokens) - 1)
        (left, right), (low, high) = self.tokens[index - 1 : index + 1], self.seconds[index - 1 : index + 1]
        return low + (high - low) * (tokens - left) / (right - left)

    def least_probability(self, tokens: int, num_seqs: int) -> float:
        """How probable a draft has to be so that it pays to add it to a step of `tokens` query tokens: a token more
        must come at least as fast as those of steps without drafts, one for each of `num_seqs` sequences."""
        return (self.of(tokens + 1) - self.of(tokens)) * num_seqs / self.of(num_seqs)


def measure_steps(executor: Executor, config: EngineConfig) -> StepCost | None:
    """Run steps of one sequence with 1, 2, 4, ... query tokens on idle workers: the fastest of REPEATS of each. None if
    there is no room for two tokens."""
    room = config.num_blocks // sum(len(group.parts) for group in config.kv_groups) * config.block_size
    most = min(MOST_TOKENS, config.max_model_len - 1, room, config.max_num_batched_tokens)
    if most < 2:
        return None
    counts = [1 << i for i in range(most.bit_length())]
    seconds: list[list[float]] = [[] for _ in counts]
    for repeat in range(1 + REPEATS):  # the first time is a warm-up
        for count, found in zip(counts, seconds, strict=True):
            begin = time.perf_counter()
            executor.execute(_step(config, count))
            if repeat:
                found.append(time.perf_counter() - begin)
    executor.execute(StepPlan(dropped_seq_ids=[SEQ_ID]))
    # More tokens never take less time, whatever the clock says.
    return StepCost(counts, list(accumulate(map(min, seconds), max)))


SEQ_ID = 0


def _step(config: EngineConfig, count: int) -> StepPlan:
    """A new sequence computes `count` tokens."""
    blocks = iter(range(config.num_blocks))
    needed = -(-count // config.block_size)
    tables = [TableStart(0, [next(blocks) for _ in range(needed)]) for group in config.kv_groups for _ in group.parts]
    start = SequenceStart(SEQ_ID, [0], 1, 0, SamplingParams(temperature=0.0), 0, tables=tables)
    return StepPlan(new_seqs=[start], verifications=[Verification(SEQ_ID, [0] * count, [])], reset=True)
