"""Continuous batching over a block pool: which sequences run next, are compressed before, or wait."""

from __future__ import annotations

from collections import OrderedDict

from kvllm.config import EngineConfig
from kvllm.core.block_manager import BlockManager
from kvllm.core.compression_planner import CompressionPlanner
from kvllm.core.compression_policy import check_fits, make_policy
from kvllm.core.protocol import (
    BlockCopy,
    Fork,
    SampledToken,
    ScheduledSequence,
    SequenceStart,
    StepPlan,
    StepResult,
)
from kvllm.core.sequence import Sequence, fork_seed
from kvllm.stats import EngineStats


class Scheduler:
    """Plans one step at a time; `schedule` and `update` alternate.

    `running` is ordered by age (sequence id). Preemption takes the youngest, and what it takes goes to the front of
    `waiting`, so the oldest sequence always advances. A step's cost follows the running batch, never the queue.
    """

    def __init__(self, config: EngineConfig, stats: EngineStats) -> None:
        self.config = config
        self.stats = stats
        self.blocks = BlockManager(config.num_blocks, config.block_size, config.shares_prefixes)
        self.policy = make_policy(config)
        self.planner = CompressionPlanner(self.policy, config, self.blocks) if self.policy else None
        self.reset([])
        self._reset_workers = False
        self._watermark = int(config.watermark * config.num_blocks)
        self._decode_steps = 0
        self._missing_blocks = 0

    # Requests

    def add(self, seq: Sequence) -> None:
        """Queue a sequence.

        Raises:
            RequestError: it could not finish even with the whole pool to itself, or its budget is too small.
        """
        check_fits(self.config, self.policy, seq)
        self.waiting[seq.seq_id] = seq

    def finish(self, seq: Sequence) -> None:
        """Drop a sequence that ended or was aborted, wherever it is, and let its blocks go."""
        if self.waiting.pop(seq.seq_id, None) is None:
            self.running.remove(seq)
            self._dropped_seq_ids.append(seq.seq_id)
        self.blocks.release(seq)

    @property
    def missing_blocks(self) -> int:
        """Blocks that the first waiting sequence lacked in the last step."""
        return self._missing_blocks

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    # Planning

    def schedule(self) -> StepPlan:
        """The next step. It may schedule nothing when a lone sequence had to be preempted; the one after will."""
        plan = StepPlan(reset=self._reset_workers)
        budget = self.config.max_num_batched_tokens
        if self.planner:
            budget = self.planner.plan(
                plan, self.running, budget, decode_steps=self._decode_steps, missing_blocks=self._missing_blocks
            )
        budget, preempted = self._schedule_running(plan, budget)
        if self.planner and self.planner.blocked:  # blocks that come free belong to the sequences that wait for them
            self._unblock(plan, self.planner)
        elif not preempted:
            self._admit(plan, budget)
        plan.dropped_seq_ids = self._dropped_seq_ids[:]
        self._decode_steps += any(not seq.is_prefilling for seq in self._scheduled)
        self._record(plan)
        return plan

    def _record(self, plan: StepPlan) -> None:
        stats = self.stats
        if plan.scheduled:
            stats.record_step(running=len(plan.scheduled), blocks=self.blocks.num_owned)
        if plan.compressions:
            stats.compression_events += 1
            stats.windows_compressed += sum(job.num_windows for job in plan.compressions)
            stats.entries_evicted += sum(job.dropped for job in plan.compressions)
            stats.blocks_released += sum(job.region_blocks - len(job.destinations) for job in plan.compressions)

    def _schedule_running(self, plan: StepPlan, budget: int) -> tuple[int, bool]:
        """Give each running sequence its decode or its next prefill chunk, oldest first."""
        held = self.planner.held if self.planner else ()
        running_before = len(self.running)
        position = 0
        while position < len(self.running) and budget > 0:
            seq = self.running[position]
            if seq.seq_id in held:
                position += 1
                continue
            num_tokens = self._chunk(seq, budget)
            new_blocks = self._make_room(plan, seq, num_tokens)
            if new_blocks is None:
                break
            self._append(plan, seq, num_tokens, new_blocks)
            budget -= num_tokens
            position += 1
        return budget, len(self.running) < running_before

    def _unblock(self, plan: StepPlan, planner: CompressionPlanner) -> None:
        """If all running sequences wait to be compressed, preempt from the youngest on until the oldest can be. Alone
        it shares no block, and is compressed in place."""
        if plan.scheduled or plan.compressions or not self.running:
            return
        while not planner.compress_complete(plan, self.running[0]) and len(self.running) > 1:
            self._preempt(plan, self.running[-1])

    def _make_room(self, plan: StepPlan, seq: Sequence, num_tokens: int) -> int | None:
        """Preempt from the youngest on until `seq` can grow: by how many blocks. None if that reached `seq` itself."""
        while (new_blocks := self.blocks.blocks_to_append(seq, num_tokens)) > self.blocks.num_available:
            if self.running == [seq] and self.planner and self.planner.compress_complete(plan, seq):
                continue
            victim = self.running[-1]
            self._preempt(plan, victim)
            if victim is seq:
                return None
        return new_blocks

    def _append(self, plan: StepPlan, seq: Sequence, num_tokens: int, num_blocks: int) -> None:
        """Put `num_tokens` of a sequence that the workers have into the plan, for which it needs `num_blocks` more."""
        if not num_blocks:
            self._plan_tokens(plan, seq, num_tokens, [])
            return
        new_blocks, replaced = self.blocks.append(seq, num_tokens)
        if replaced is not None:
            plan.copies.append(BlockCopy(seq.seq_id, replaced, seq.block_table[replaced]))
        self._plan_tokens(plan, seq, num_tokens, new_blocks)

    def _plan_tokens(self, plan: StepPlan, seq: Sequence, num_tokens: int, new_blocks: list[int]) -> None:
        samples = num_tokens == seq.num_uncomputed
        forks = self._forks(seq) if samples and seq.forks_pending else []
        new_tokens = seq.token_ids[seq.known_tokens :]
        seq.known_tokens = seq.num_tokens
        plan.scheduled.append(ScheduledSequence(seq.seq_id, num_tokens, new_blocks, new_tokens, samples, forks))
        self._scheduled.append(seq)

    def _forks(self, seq: Sequence) -> list[Fork]:
        return [Fork(seq.seq_id + i, fork_seed(seq.seed, i)) for i in range(1, seq.forks_pending + 1)]

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Start waiting sequences in order while their whole prefill fits into the pool and leaves the running ones
        the room that they are about to need."""
        self._missing_blocks = 0
        if not self.waiting or budget == 0 or len(self.running) == self.config.max_num_seqs:
            return
        growth = sum(self._growth(seq) for seq in self.running)
        slots = self.config.max_num_seqs - len(self.running) - sum(seq.forks_pending for seq in self.running)
        while self.waiting and budget > 0:
            seq = next(iter(self.waiting.values()))
            slots -= 1 + seq.forks_pending
            if slots < 0:
                return
            hits = self.blocks.match_prefix(seq, self._longest_hit(seq))
            needed = self.blocks.blocks_to_admit(self._peak_pairs(seq), hits)
            # Windows of different sequences are at different points: half of the growth to come is needed at once.
            # Each fork will copy the block that it writes first.
            spare = self._watermark + growth // 2 + seq.forks_pending if self.running else 0
            self._missing_blocks = max(0, needed + spare - self.blocks.num_available)
            if self._missing_blocks:
                return
            del self.waiting[seq.seq_id]
            self.running.append(seq)
            budget -= self._start(plan, seq, hits, budget)
            growth += self._growth(seq)

    def _start(self, plan: StepPlan, seq: Sequence, hits: list[int], budget: int) -> int:
        """Admit a sequence: own the cached prefix, allocate its prefill, plan the first chunk. Returns its tokens."""
        self.blocks.share(seq, hits)
        seq.advance(len(hits) * self.config.block_size)
        seq.hashed_blocks = len(hits)
        if not seq.refill_length:
            seq.cache_hits = seq.logical_length
        num_tokens = self._chunk(seq, budget)
        self.blocks.append(seq, num_tokens if self._refills_compressed(seq) else seq.num_uncomputed)
        plan.new_seqs.append(
            SequenceStart(seq.seq_id, seq.token_ids[:], seq.prompt_length, seq.cached_length, seq.sampling, seq.seed)
        )
        seq.known_tokens = seq.num_tokens
        self._plan_tokens(plan, seq, num_tokens, seq.block_table[:])
        return num_tokens

    def _preempt(self, plan: StepPlan, seq: Sequence) -> None:
        """Take everything from a running sequence; it will be recomputed from its tokens."""
        plan.compressions = [job for job in plan.compressions if job.seq_id != seq.seq_id]
        computed = seq.logical_length
        self._requeue(seq)
        seq.preemptions += 1
        self.stats.preemptions += 1
        self.stats.tokens_recomputed += computed

    def _requeue(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.blocks.release(seq)
        self._dropped_seq_ids.append(seq.seq_id)
        seq.refill_length = seq.num_tokens
        seq.reset()
        self.waiting[seq.seq_id] = seq
        self.waiting.move_to_end(seq.seq_id, last=False)

    def _growth(self, seq: Sequence) -> int:
        """Blocks that a sequence will add to its table before it has a window to compress.

        Without compression growth has no such end, and admission counts on preemption alone, as other engines do.
        """
        return self.planner.growth(seq) if self.planner else 0

    # Prefill arithmetic

    def _chunk(self, seq: Sequence, budget: int) -> int:
        """Tokens of the next chunk: those left, within the budget, and never past a point of compression."""
        num_tokens = min(seq.num_uncomputed, budget)
        if self.planner is None or not seq.is_prefilling:
            return num_tokens
        return self.planner.chunk(seq, num_tokens)

    def _refills_compressed(self, seq: Sequence) -> bool:
        """Whether a preempted sequence's output is compressed on its way in, window by window."""
        return self.planner is not None and self.planner.refills_compressed(seq)

    def _longest_hit(self, seq: Sequence) -> int:
        """Tokens that may come from the prefix cache: the last one is always computed, for its logits. Where output is
        compressed on the way in, the last one of the prompt is, so that a chunk ends there and the prompt is compressed
        first, if it may be."""
        return (seq.prompt_length if self._refills_compressed(seq) else seq.num_tokens) - 1

    def _peak_pairs(self, seq: Sequence) -> int:
        """Most KV pairs that the prefill of `seq` holds at once."""
        if not self._refills_compressed(seq):
            return seq.num_tokens
        return self._peak_blocks(seq, seq.num_tokens) * self.config.block_size

    def _peak_blocks(self, seq: Sequence, num_pairs: int) -> int:
        if self.planner is None:
            return self.blocks.blocks_for(num_pairs)
        return self.planner.peak_blocks(seq, num_pairs)

    # After a step

    def update(self, plan: StepPlan, result: StepResult) -> list[tuple[Sequence, SampledToken]]:
        """Account for an executed plan: KV pairs stored, tokens sampled, forks made. The caller ends what finished."""
        self._dropped_seq_ids = []
        self._reset_workers = False
        tokens = iter(result.tokens)
        sampled = []
        for seq, scheduled in zip(self._scheduled, plan.scheduled, strict=True):
            seq.advance(scheduled.num_tokens)
            self.blocks.cache_full_blocks(seq)
            if not scheduled.samples:
                continue
            for each in (seq, *self._fork(seq, scheduled.forks)) if scheduled.forks else (seq,):
                token = next(tokens)
                each.token_ids.append(token.token_id)
                sampled.append((each, token))
        self._scheduled = []
        return sampled

    def reset(self, sequences: list[Sequence]) -> None:
        """Start over with an empty pool after a failed step, of which an unknown part was executed.

        sequences: all that are unfinished, with nothing in the cache. The workers are told to drop theirs.
        """
        self.blocks.clear()
        self.waiting = OrderedDict((seq.seq_id, seq) for seq in sorted(sequences, key=lambda seq: seq.seq_id))
        self.running: list[Sequence] = []
        self._scheduled: list[Sequence] = []
        self._dropped_seq_ids: list[int] = []
        self._reset_workers = True

    def _fork(self, parent: Sequence, forks: list[Fork]) -> list[Sequence]:
        """Let the other completions of a request branch off: they share all blocks computed so far."""
        children = []
        for index, fork in enumerate(forks, start=1):
            child = parent.fork(fork.seq_id, index, fork.seed)
            self.blocks.fork(child)
            children.append(child)
        if children:
            position = self.running.index(parent) + 1
            self.running[position:position] = children
            parent.forks_pending = 0
        return children

    def check(self) -> None:
        """Raise RuntimeError if the accounting of blocks is not consistent."""
        self.blocks.check(self.running)
        if any(seq.block_table for seq in self.waiting.values()):
            raise RuntimeError("a waiting sequence owns blocks")
