"""Counters of an engine."""

from __future__ import annotations

from bisect import bisect_left
from copy import copy
from itertools import zip_longest
from struct import Struct as Packing
from typing import Any, Literal

from msgspec import Struct, field

from kvllm.durations import Durations

MemoryField = Literal["method_state_bytes", "kv_residual_bytes", "recurrent_state_bytes", "draft_pool_bytes"]
"""Fields of memory beside the KV pool."""
SIZES = (
    "num_blocks",
    "block_bytes",
    "method_state_bytes",
    "kv_residual_bytes",
    "recurrent_state_bytes",
    "draft_pool_bytes",
    "num_host_blocks",
)
MOST_STEPS = 1 << 19
"""In the timeline, or an engine that serves for weeks would fill the memory with it."""
STEP = Packing("<II")
"""A step in the timeline: 8 bytes. A tuple in a list takes over 100, which is 60 MiB for MOST_STEPS."""
GAUGES = ("num_running", "num_waiting", "blocks_in_use", "host_blocks_in_use")
PEAKS = ("peak_blocks", "peak_event_bytes")


STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds of the buckets in which steps are counted by their tokens, those of vLLM."""


class StepTokens(Struct):
    """How many steps had how many tokens.

    counts: steps of each bucket; the last one has those above all bounds. total: tokens of all steps.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))
    total: int = 0

    def add(self, tokens: int) -> None:
        """Count a step."""
        self.counts[bisect_left(STEP_TOKENS, tokens)] += 1
        self.total += tokens

    def __add__(self, other: StepTokens) -> StepTokens:
        counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        return StepTokens(counts, self.total + other.total)

    def __copy__(self) -> StepTokens:
        return StepTokens(self.counts[:], self.total)


class DraftCounts(Struct):
    """What became of drafted tokens.

    drafts, tokens: how many drafts there were, and how many tokens in them.
    right: by their positions in a draft, tokens that the model chose, too, and all before them.
    """

    drafts: int = 0
    tokens: int = 0
    right: list[int] = field(default_factory=list)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a sequence gets of a pass with a draft: the right ones and the model's own. 1 without drafts."""
        return 1 + sum(self.right) / max(1, self.drafts)

    def add(self, tokens: int, right: int) -> None:
        """Count a draft of so many tokens, of which the first ones were right."""
        self.drafts += 1
        self.tokens += tokens
        self.right += [0] * (tokens - len(self.right))
        for position in range(right):
            self.right[position] += 1

    def __add__(self, other: DraftCounts) -> DraftCounts:
        right = [mine + theirs for mine, theirs in zip_longest(self.right, other.right, fillvalue=0)]
        return DraftCounts(self.drafts + other.drafts, self.tokens + other.tokens, right)

    def __copy__(self) -> DraftCounts:
        return DraftCounts(self.drafts, self.tokens, self.right[:])


class EngineStats(Struct):
    """Counters since the engine started, and what is in it now.

    Attributes:
        num_blocks: size of the pool.
        block_bytes: bytes of a block on one rank, in all layers: keys, values, their scales and scores.
        method_state_bytes: memory that the compression method keeps beside the pool.
        kv_residual_bytes: memory for the last KV pairs of sequences as they were before they were rounded.
        recurrent_state_bytes: memory for the states of recurrent layers.
        draft_pool_bytes: the KV pool of the draft model.
        steps: forward passes.
        step_tokens: how many tokens of prompts and outputs these computed.
        num_running, num_waiting: sequences now.
        blocks_in_use: blocks that sequences own now.
        prompt_tokens: prompt tokens of sequences that were admitted.
        prefix_cache_queries: of these, tokens looked up in the prefix cache.
        prefix_cache_hits: of these, tokens found there.
        output_tokens: tokens sampled.
        drafts: what became of the tokens that speculative decoding drafted.
        preemptions: sequences that lost their cache and were queued again.
        tokens_recomputed: tokens that these had computed.
        num_host_blocks, host_blocks_in_use: blocks in host memory, and those that hold something now.
        swapped_out, swapped_in: preempted sequences whose blocks went to the host, and those that came back so.
        blocks_stored, blocks_loaded: blocks that went to the host, and that came back.
        prefix_host_hits: of prefix_cache_hits, tokens whose KV pairs came back from the host.
        compression_events: steps that compressed.
        windows_compressed: summed over sequences; a cache cut by threshold counts as a window.
        entries_evicted: KV pairs dropped, summed over sequences. A KV pair is one token's keys and
            values over all layers; where layers keep different shares, this is their mean.
        blocks_released: blocks by which block tables shrank, those of all KV groups.
        recalled_bytes: bytes of KV pairs that came back and of those that made way, each counted once, on all ranks.
        peak_blocks: most blocks owned by sequences at once.
        step_seconds: time of all steps, from their planning to their outputs.
        decode_seconds: the model's time in steps without prompt tokens.
        prefill_seconds: the model's time in steps with prompt tokens; decodes ride along.
        recompute_seconds: time of compression events for the queries.
        score_seconds: time of compression events for scores and selection.
        compact_seconds: time of compression events for the movement of KV pairs.
        stalls: how long running sequences waited for their next tokens while the engine was at work: the step that
            computed one, and others that had no room for it.
        event_stalls: those of them that ended with a step that compressed.
        peak_event_bytes: the most memory that an event took beside the activations of its pass.
        packed_timeline: `timeline` as bytes, a STEP for each step.
    """

    num_blocks: int
    block_bytes: int = 0
    method_state_bytes: int = 0
    kv_residual_bytes: int = 0
    recurrent_state_bytes: int = 0
    draft_pool_bytes: int = 0
    num_running: int = 0
    num_waiting: int = 0
    blocks_in_use: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    tokens_recomputed: int = 0
    num_host_blocks: int = 0
    host_blocks_in_use: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    blocks_stored: int = 0
    blocks_loaded: int = 0
    prefix_host_hits: int = 0
    compression_events: int = 0
    windows_compressed: int = 0
    entries_evicted: int = 0
    blocks_released: int = 0
    recalled_bytes: int = 0
    peak_blocks: int = 0
    step_seconds: float = 0.0
    decode_seconds: float = 0.0
    prefill_seconds: float = 0.0
    recompute_seconds: float = 0.0
    score_seconds: float = 0.0
    compact_seconds: float = 0.0
    stalls: Durations = field(default_factory=Durations)
    event_stalls: Durations = field(default_factory=Durations)
    peak_event_bytes: int = 0
    step_tokens: StepTokens = field(default_factory=StepTokens)
    drafts: DraftCounts = field(default_factory=DraftCounts)
    packed_timeline: bytearray = bytearray()

    @property
    def timeline(self) -> list[tuple[int, int]]:
        """For each step (running sequences, blocks in use); of old steps no more than MOST_STEPS. A new list."""
        return list(STEP.iter_unpack(bytes(self.packed_timeline)))  # a copy: no thread may resize what is iterated over

    @property
    def longest_stall_seconds(self) -> float:
        """The longest of `stalls`."""
        return self.stalls.longest

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __repr__(self) -> str:
        """Without the timeline, which has 8 bytes for each step."""
        shown = (f"{name}={self[name]!r}" for name in self.__struct_fields__ if name != "packed_timeline")
        return f"EngineStats({', '.join(shown)})"

    def add(self, other: EngineStats) -> None:
        """Count what was counted elsewhere, too, and take over what is in that engine now. The sizes stay."""
        for name in PEAKS:
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        for name in GAUGES:
            setattr(self, name, getattr(other, name))
        for name in COUNTS:
            if theirs := getattr(other, name):  # most of one step's are 0
                setattr(self, name, getattr(self, name) + theirs)

    def take(self) -> EngineStats:
        """The counts since the last call."""
        taken, empty = copy(self), EngineStats(self.num_blocks)
        for name in (*PEAKS, *COUNTS):
            setattr(self, name, getattr(empty, name))
        return taken

    def record_step(self, *, running: int, blocks: int) -> None:
        self.steps += 1
        self.peak_blocks = max(self.peak_blocks, blocks)
        self.packed_timeline += STEP.pack(running, blocks)
        if len(self.packed_timeline) > MOST_STEPS * STEP.size:
            del self.packed_timeline[: MOST_STEPS // 2 * STEP.size]

    def timeline_since(self, steps: int) -> list[tuple[int, int]]:
        """The timeline without the first `steps` of all steps."""
        left_out = max(0, len(self.packed_timeline) // STEP.size - self.steps + steps)
        return list(STEP.iter_unpack(self.packed_timeline[left_out * STEP.size :]))


COUNTS = tuple(sorted({*EngineStats.__struct_fields__}.difference(SIZES, GAUGES, PEAKS)))
"""What `EngineStats.add` adds up."""
