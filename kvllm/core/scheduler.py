"""Continuous batching over a block pool: which sequences run next, are compressed before, or wait."""

from __future__ import annotations

import time
from bisect import insort

from kvllm.config import EngineConfig
from kvllm.core.admission import Admission
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
from kvllm.core.queue import FairQueue, Tenant
from kvllm.core.sequence import Sequence, fork_seed
from kvllm.core.shares import Shares
from kvllm.stats import EngineStats

LOOKAHEAD = 8
"""Tenants that are looked at in a step when the first of them has to wait."""


def most_idle(config: EngineConfig) -> dict[str, int]:
    """Most idle prefix blocks of each tenant that has a limit."""
    shares = {name: tenant.cached_share for name, tenant in config.tenants.items()}
    return {name: int(share * config.num_blocks) for name, share in shares.items() if share < 1}


class Scheduler:
    """Plans one step at a time; `schedule` and `update` alternate.

    `running` is ordered by age (sequence id). Where blocks run out, the youngest sequence is preempted, of the tenant
    that is most above what it is entitled to; the oldest always advances. A step's cost follows the running batch,
    never the queue.
    """

    def __init__(self, config: EngineConfig, stats: EngineStats) -> None:
        self.config = config
        self.stats = stats
        self.blocks = BlockManager(config.num_blocks, config.block_size, config.shares_prefixes, most_idle(config))
        self.policy = make_policy(config)
        self.planner = CompressionPlanner(self.policy, config, self.blocks) if self.policy else None
        self.admission = Admission(config, self.blocks, self.planner)
        self.reset([])
        self._reset_workers = False
        self._decode_steps = 0
        self._missing_blocks = 0

    # Requests

    def add(self, seq: Sequence) -> None:
        """Queue a sequence.

        Raises:
            RequestError: it could not finish even with the whole pool to itself, or its budget is too small.
        """
        check_fits(self.config, self.policy, seq)
        self.waiting.add(seq)

    def finish(self, seq: Sequence) -> None:
        """Drop a sequence that ended or was aborted, wherever it is, and let its blocks go."""
        if not self.waiting.finish(seq):
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
        self._preempted = False
        budget = self.config.max_num_batched_tokens
        if self.planner:
            budget = self.planner.plan(
                plan, self.running, budget, decode_steps=self._decode_steps, missing_blocks=self._missing_blocks
            )
        self._shares = None
        if not self.waiting.is_uniform:
            self._shares = Shares(self.config, self.waiting, self.blocks, self.running)
            if not (self.planner and self.planner.blocked):
                budget = self._admit_entitled(plan, self._shares, budget)
        budget = self._schedule_running(plan, budget)
        if self.planner and self.planner.blocked:  # blocks that come free belong to the sequences that wait for them
            self._unblock(plan, self.planner)
        elif not self._preempted:
            self._admit(plan, budget)
        plan.dropped_seq_ids = self._dropped_seq_ids[:]
        self._decode_steps += any(not seq.is_prefilling for seq in self._scheduled)
        self._charge(plan)
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

    def _charge(self, plan: StepPlan) -> None:
        """Account for the step's tokens, unless that is done, and for blocks: the whole pool held for a step costs as
        much as a token of each sequence of a full batch."""
        block_cost = self.config.max_num_seqs / self.config.num_blocks
        if self._shares:
            self._shares.charge(block_cost)
            self.waiting.advance({seq.tenant: self.waiting.tenant(seq) for seq in self.running}.values())
        elif self.running:
            tenant = self.waiting.tenant(self.running[0])
            tokens = sum(item.num_tokens for item in plan.scheduled)
            self.waiting.charge(tenant, tokens + block_cost * self.blocks.num_owned)
            self.waiting.advance([tenant])

    # Running sequences

    def _schedule_running(self, plan: StepPlan, budget: int) -> int:
        """Give each running sequence its decode or its next prefill chunk, oldest first."""
        held = self.planner.held if self.planner else set[int]()
        order = self.running
        if self._shares:
            order, yielding = self._order(self._shares)
            held = held | yielding
        position = 0
        while position < len(order) and budget > 0:
            seq = order[position]
            if seq.seq_id in held:
                position += 1
                continue
            num_tokens = 1 if seq.num_uncomputed == 1 else self.admission.chunk(seq, budget)
            new_blocks = self.blocks.blocks_to_append(seq, num_tokens)
            if new_blocks > self.blocks.num_available:
                new_blocks = self._make_room(plan, seq, num_tokens, order, position)
                if new_blocks is None:
                    continue
            self._append(plan, seq, num_tokens, new_blocks)
            budget -= num_tokens
            position += 1
        return budget

    def _order(self, shares: Shares) -> tuple[list[Sequence], set[int]]:
        """The running sequences that are not in the plan yet, in the order in which several tenants are served; and the
        ids of those that compute nothing in this step."""
        admitted = {seq.seq_id for seq in self._scheduled}
        running = [seq for seq in self.running if seq.seq_id not in admitted]
        yielding = shares.yielding([seq for seq in self.running if seq.is_prefilling])
        waits = {seq.seq_id for seq in running if seq.tenant in yielding} if yielding else set[int]()
        return shares.order(running, yielding), waits

    def _unblock(self, plan: StepPlan, planner: CompressionPlanner) -> None:
        """If all running sequences wait to be compressed, preempt from the youngest on until the oldest can be. Alone
        it shares no block, and is compressed in place."""
        if plan.scheduled or plan.compressions or not self.running:
            return
        while not planner.compress_complete(plan, self.running[0]) and len(self.running) > 1:
            self._preempt(plan, self.running[-1])

    def _make_room(
        self, plan: StepPlan, seq: Sequence, num_tokens: int, order: list[Sequence], position: int
    ) -> int | None:
        """Preempt until `seq` can grow: by how many blocks. None if it was preempted itself.

        order: of the step, with `seq` at `position`. Those before it are in the plan.
        """
        while (new_blocks := self.blocks.blocks_to_append(seq, num_tokens)) > self.blocks.num_available:
            if self.running == [seq] and self.planner and self.planner.compress_complete(plan, seq):
                continue
            victim = self._victim(order, position)
            self._preempt(plan, victim)
            self.admission.close()
            if order is not self.running:
                order.remove(victim)
            if victim is seq:
                return None
        return new_blocks

    def _victim(self, order: list[Sequence], position: int) -> Sequence:
        """The one to be preempted of those that are not in the plan: never the oldest while there are others."""
        if not self._shares:
            return self.running[-1]
        others = [seq for seq in order[position:] if seq is not self.running[0]]
        return max(others or order[position:], key=self._shares.rank)

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
        if self._shares:
            self._shares.count(seq, num_tokens)
        samples = num_tokens == seq.num_uncomputed
        forks = self._forks(seq) if samples and seq.forks_pending else []
        new_tokens = seq.token_ids[seq.known_tokens :]
        seq.known_tokens = seq.num_tokens
        plan.scheduled.append(ScheduledSequence(seq.seq_id, num_tokens, new_blocks, new_tokens, samples, forks))
        self._scheduled.append(seq)

    def _forks(self, seq: Sequence) -> list[Fork]:
        return [Fork(seq.seq_id + i, fork_seed(seq.seed, i)) for i in range(1, seq.forks_pending + 1)]

    # Waiting sequences

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Start waiting sequences in order while their whole prefill fits into the pool and leaves the running ones
        the room that they are about to need."""
        self._missing_blocks = 0
        if not self.waiting or budget == 0 or len(self.running) == self.config.max_num_seqs:
            return
        growth = self.admission.growth(self.running)
        while budget > 0 and (found := self._next(growth)):
            tenant, hits = found
            self.admission.is_closed = False
            seq = self.waiting.take(tenant)
            budget -= self._start(plan, seq, hits, budget)
            growth += self.admission.growth([seq])

    def _next(self, growth: int) -> tuple[Tenant, list[int]] | None:
        """The tenant whose first sequence starts next, and the cached blocks that are found for it.

        Where that of the first tenant has to wait, the next tenants may start what they are entitled to, unless they
        are far ahead: so a large sequence does not hold up everyone, and comes to its turn all the same.
        """
        self._missing_blocks = 0
        waits: Tenant | None = None
        for tenant in self.waiting.first(LOOKAHEAD if self._shares else 1):
            seq = self.waiting.head(tenant)
            hits = self.admission.match_prefix(seq)
            needed = self.admission.needed_blocks(seq, hits)
            if waits and not (self._shares and self._passes(self._shares, tenant, waits, needed)):
                continue
            spare = self.admission.spare_blocks(seq, growth) if self.running else 0
            missing = max(0, needed + spare - self.blocks.num_available)
            has_slots = 1 + seq.forks_pending <= self._free_slots()
            if has_slots and not missing:
                return tenant, hits
            if not waits:
                self._missing_blocks = missing if has_slots else 0
                waits = tenant
        return None

    def _passes(self, shares: Shares, tenant: Tenant, waits: Tenant, needed: int) -> bool:
        return shares.may_pass(tenant, waits) and shares.is_entitled(self.waiting.head(tenant), needed)

    def _free_slots(self) -> int:
        return self.config.max_num_seqs - len(self.running) - sum(seq.forks_pending for seq in self.running)

    def _start(self, plan: StepPlan, seq: Sequence, hits: list[int], budget: int) -> int:
        """Admit a sequence: own the cached prefix, allocate its prefill, plan the first chunk. Returns its tokens."""
        insort(self.running, seq, key=lambda each: each.seq_id)
        self.blocks.share(seq, hits)
        seq.advance(len(hits) * self.config.block_size)
        seq.hashed_blocks = len(hits)
        if not seq.refill_length:
            self._count_admission(seq)
        num_tokens = self.admission.chunk(seq, budget)
        compressed = self.admission.refills_compressed(seq)
        self.blocks.append(seq, num_tokens if compressed else seq.num_uncomputed)
        plan.new_seqs.append(
            SequenceStart(seq.seq_id, seq.token_ids[:], seq.prompt_length, seq.cached_length, seq.sampling, seq.seed)
        )
        seq.known_tokens = seq.num_tokens
        self._plan_tokens(plan, seq, num_tokens, seq.block_table[:])
        if self._shares:
            self._shares.holding(seq).add(seq)
            self._shares.charge_tokens(self.waiting.tenant(seq))
        return num_tokens

    def _count_admission(self, seq: Sequence) -> None:
        seq.admitted(time.monotonic(), seq.logical_length)
        self.stats.prompt_tokens += seq.prompt_length
        if self.config.shares_prefixes:
            self.stats.prefix_cache_queries += seq.num_tokens
            self.stats.prefix_cache_hits += seq.logical_length

    def _preempt(self, plan: StepPlan, seq: Sequence) -> None:
        """Take everything from a running sequence; it will be recomputed from its tokens."""
        plan.compressions = [job for job in plan.compressions if job.seq_id != seq.seq_id]
        if self._shares:
            self._shares.holding(seq).remove(seq)
        computed = seq.logical_length
        self._preempted = True
        self.running.remove(seq)
        self.blocks.release(seq)
        self._dropped_seq_ids.append(seq.seq_id)
        seq.preempted()
        self.waiting.requeue(seq)
        self.stats.preemptions += 1
        self.stats.tokens_recomputed += computed

    # Tenants below what they are entitled to

    def _admit_entitled(self, plan: StepPlan, shares: Shares, budget: int) -> int:
        """Start sequences of tenants that have less than they are entitled to, at the cost of those that have more.

        They go before the prefills of tenants that were served more, and leave a token for each decode. A tenant that
        is far ahead starts nothing while one that has nothing running waits: it may need more than is left to it by
        what all others are entitled to. Returns the budget that is left.
        """
        prefilling = [self.waiting.tenant(seq) for seq in self.running if seq.is_prefilling]
        waits: Tenant | None = None
        for tenant in self.waiting.first(LOOKAHEAD):
            if waits and not shares.may_pass(tenant, waits):
                break
            while tenant.num_waiting:
                if any(other is not tenant and other.service < tenant.service for other in prefilling):
                    break
                tokens = self.planner.tokens_left if self.planner else 0
                has_room = self._make_way(plan, shares, tenant)
                budget -= tokens - self.planner.tokens_left if self.planner else 0
                spare = budget - shares.slots_ahead(tenant)
                if not has_room or spare <= 0:
                    break
                seq = self.waiting.take(tenant)
                budget -= self._start(plan, seq, self.admission.match_prefix(seq), spare)
            if tenant.num_waiting and not waits and not shares.holding(self.waiting.head(tenant)).slots:
                waits = tenant
        return budget

    def _make_way(self, plan: StepPlan, shares: Shares, tenant: Tenant) -> bool:
        """Compress, then preempt, sequences of tenants above what they are entitled to, until the first sequence of a
        tenant below has slots and blocks. Returns whether it has."""
        seq = self.waiting.head(tenant)
        candidates = [each for each in self.running if each not in self._scheduled]
        blocks = self._entitled_blocks(shares, seq, candidates)
        if blocks is None:
            return False
        slots = 1 + seq.forks_pending - self._free_slots()
        if slots <= 0 and blocks <= self.blocks.num_available:
            return True
        if self.planner and blocks > self.blocks.num_available:
            debtors = shares.debtors(tenant, candidates)
            spare = self.admission.spare_blocks(seq, self.admission.growth(candidates))  # or growth would preempt
            goes_on = self._compress_debtors(plan, self.planner, shares, debtors, blocks + spare)
            if goes_on and blocks > self.blocks.num_available:
                return False
        victims = shares.victims(tenant, candidates, slots=slots, blocks=blocks - self.blocks.num_available)
        if victims is None:
            return False
        for victim in victims:
            self._preempt(plan, victim)
        # What made way may have been a part of the cached prefix.
        blocks = self._entitled_blocks(shares, seq, [each for each in candidates if each not in victims])
        return blocks is not None and blocks <= self.blocks.num_available

    def _entitled_blocks(self, shares: Shares, seq: Sequence, candidates: list[Sequence]) -> int | None:
        """Blocks that must be available for a waiting sequence, or None if its tenant is not entitled to it."""
        needed = self.admission.needed_blocks(seq, self.admission.match_prefix(seq))
        if not shares.is_entitled(seq, needed):
            return None
        held = self.planner.held if self.planner else ()
        if candidates and candidates[0].seq_id not in held:  # the oldest goes on growing, or it would lose everything
            num_tokens = self.admission.chunk(candidates[0], len(self.running))
            needed += self.blocks.blocks_to_append(candidates[0], num_tokens)
        return needed + seq.forks_pending

    def _compress_debtors(
        self, plan: StepPlan, planner: CompressionPlanner, shares: Shares, debtors: list[Sequence], blocks: int
    ) -> bool:
        """Compress sequences until so many blocks are available. Returns whether that goes on in the next step, because
        there are no tokens left for more."""
        compressed = {job.seq_id for job in plan.compressions}
        for seq in debtors:
            if blocks <= self.blocks.num_available:
                return False
            if seq.seq_id in compressed or not planner.can_compress(seq):
                continue
            if compressed and not planner.tokens_left:
                return True
            before = len(seq.block_table)
            planner.compress_complete(plan, seq)
            shares.holding(seq).blocks -= before - len(seq.block_table)
            compressed.add(seq.seq_id)
        return False

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
        self.waiting = FairQueue(self.config.tenants)
        for seq in sorted(sequences, key=lambda seq: seq.seq_id):
            self.waiting.add(seq)
        self.running: list[Sequence] = []
        self._scheduled: list[Sequence] = []
        self._dropped_seq_ids: list[int] = []
        self._shares: Shares | None = None  # of the step that is planned, unless all sequences are alike
        self._preempted = False  # in this step: nothing else is admitted
        self._reset_workers = True

    def _fork(self, parent: Sequence, forks: list[Fork]) -> list[Sequence]:
        """Let the other completions of a request branch off: they share all blocks computed so far."""
        children = []
        for index, fork in enumerate(forks, start=1):
            child = parent.fork(fork.seq_id, index, fork.seed)
            self.blocks.fork(child)
            self.waiting.fork(child)
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
