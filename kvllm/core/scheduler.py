"""Continuous batching over a block pool: which sequences run next, are compressed before, or wait."""

from __future__ import annotations

from collections.abc import Iterator

from kvllm.config import EngineConfig
from kvllm.core.admission import Admission
from kvllm.core.batch import Batch
from kvllm.core.block_manager import BlockManager, PrefixHit
from kvllm.core.capacity import longest_alone
from kvllm.core.compression_planner import CompressionPlanner
from kvllm.core.drafting.step_cost import StepCost
from kvllm.core.host_blocks import DiskPrefixes
from kvllm.core.offloading import Offloading
from kvllm.core.policies import make_policy
from kvllm.core.preemption import Preemption
from kvllm.core.protocol import Accepted, KeptPairs, MissingMass, PromptLogprobs, SampledToken, StepPlan, StepResult
from kvllm.core.queue import LOOKAHEAD, FairQueue, Tenant
from kvllm.core.sequence import PENDING, Sequence
from kvllm.core.shares import Shares
from kvllm.core.speculation import Speculation
from kvllm.core.step import Step
from kvllm.core.tenant_admission import TenantAdmission
from kvllm.stats import EngineStats


def most_idle(config: EngineConfig) -> dict[str, int]:
    """Most idle prefix blocks of each tenant that has a limit."""
    shares = {name: tenant.cached_share for name, tenant in config.tenants.items()}
    return {name: int(share * config.num_blocks) for name, share in shares.items() if share < 1}


class Scheduler:
    """Plans one step at a time; `schedule`, `advance` and `receive` follow each other for each plan.

    Nothing that a step finds out changes a length, so the next one may be planned ahead, between `advance` and
    `receive`: a token that is not there yet is PENDING, at the end of its sequence, until `receive` brings it. The one
    exception is a step with drafts, whose right tokens only `receive` counts: it is not planned ahead of.

    A step is planned by parts, each with a contract of its own, in turn: `planner` (what is compressed), `tenants` (who
    gets what it is entitled to), `preemption` (who makes way), `speculation` (what is drafted), `admission` and
    `waiting` (who starts), and `batch` with its `offloading` (what moves to the host and back). What they tell each
    other is in `step`. A step's cost follows the running batch, never the queue.

    step: planned last.
    """

    def __init__(self, config: EngineConfig, stats: EngineStats, step_cost: StepCost | None = None) -> None:
        self.config = config
        self.stats = stats
        self.blocks = BlockManager(
            config.num_blocks,
            config.block_size,
            config.shares_prefixes,
            most_idle(config),
            config.kv_content,
            config.kv_groups,
            config.num_state_snapshots if config.shares_prefixes else 0,
        )
        self.policy = make_policy(config)
        self.planner = CompressionPlanner(self.policy, config, self.blocks) if self.policy else None
        self.blocks.pool.keeps_evicted = config.num_host_blocks > 0 and self.blocks.is_uniform
        self._on_disk = DiskPrefixes()
        self._step_cost = step_cost
        self.reset([])
        self._reset_workers = False
        self._decode_steps = 0

    # Requests

    def longest_of(self, seq: Sequence) -> int:
        """See `longest_alone`."""
        return longest_alone(self.config, self.policy, seq)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence that `longest_of` has not refused."""
        self.waiting.add(seq)

    def finish(self, seq: Sequence) -> None:
        """Drop a sequence that ended or was aborted, wherever it is, and let its blocks go. Idempotent."""
        if seq.has_left:
            return
        seq.has_left = True
        if self.speculation:
            self.speculation.finish(seq)
        self.admission.ended(seq)
        self.waiting.finish(seq)
        self.batch.finish(seq)
        self.blocks.release(seq)

    @property
    def running(self) -> list[Sequence]:
        """By age (sequence id)."""
        return self.batch.running

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting or self.batch.loading)

    # Planning

    def schedule(self) -> StepPlan:
        """The next step. It may schedule nothing when a lone sequence had to be preempted; the one after will."""
        accepted, self._accepted = self._accepted, []
        plan = StepPlan(reset=self._reset_workers, accepted=[each for seq, each in accepted if not seq.has_left])
        if self.blocks.snapshots:
            plan.state_copies = self.blocks.snapshots.take_due()
        step = self.step = Step(plan, self.config.max_num_batched_tokens, self.step.missing_blocks)
        self.batch.begin(step)
        if self.planner:
            self.planner.plan(step, self.running, self._decode_steps)
        if not self.waiting.is_uniform:
            step.shares = Shares(self.config, self.waiting, self.blocks, [*self.running, *self.batch.loading])
            if not step.blocked:
                self.tenants.admit(step, step.shares)
        self._schedule_running(step)
        if step.blocked:  # blocks that come free belong to the sequences that wait for them
            self.preemption.unblock(step)
        elif not step.has_preempted:
            self._admit(step)
        self.batch.complete(step)
        if self.speculation:
            plan.drafts = self.speculation.order(step.sampling)
        decodes = bool(step.decoding or step.verifying)
        self._decode_steps += decodes or any(not seq.is_prefilling for seq in step.prefilling)
        self._charge(step)
        self._record(plan)
        return plan

    def _record(self, plan: StepPlan) -> None:
        stats = self.stats
        if plan.num_seqs:
            stats.record_step(running=plan.num_seqs, blocks=self.blocks.num_owned)
            stats.step_tokens.add(plan.num_tokens)
        if plan.compressions and self.policy:
            running = {seq.seq_id: seq for seq in self.running}
            stats.compression_events += 1
            for job in plan.compressions:
                dropped = self.policy.dropped(job)
                running[job.seq_id].count_compression(job.num_windows, dropped)
                stats.windows_compressed += job.num_windows
                stats.entries_evicted += dropped
                stats.blocks_released += job.released_blocks

    def _charge(self, step: Step) -> None:
        """Account for the step's tokens, unless that is done, and for blocks: the whole pool held for a step costs as
        much as a token of each sequence of a full batch."""
        block_cost = self.config.max_num_seqs / self.config.num_blocks
        if step.shares:
            step.shares.charge(block_cost)
            self.waiting.advance({seq.tenant: self.waiting.tenant(seq) for seq in self.running}.values())
        elif self.running:
            tenant = self.waiting.tenant(self.running[0])
            self.waiting.charge(tenant, step.plan.num_tokens + block_cost * self.blocks.num_owned)
            self.waiting.advance([tenant])

    # Running sequences

    def _schedule_running(self, step: Step) -> None:
        """Give each running sequence its decode or its next prefill chunk, oldest first."""
        deferred, order = step.deferred, self.running
        if step.shares:
            order, paused = self._order(step, step.shares)
            deferred = deferred | paused
        position = 0
        while position < len(order) and step.tokens > 0:
            seq = order[position]
            if seq.seq_id in deferred:
                position += 1
                continue
            num_tokens = 1 if seq.num_uncomputed == 1 else self.admission.chunk(seq, step.tokens)
            draft = self._draft(step, seq, len(order) - position)
            num_tokens += len(draft)
            num_blocks = self.blocks.blocks_to_append(seq, num_tokens)
            if num_blocks and num_blocks > self.blocks.num_available:
                num_tokens = self.preemption.make_room(step, seq, num_tokens, order, position)
                if not num_tokens:
                    continue
                num_blocks = self.blocks.blocks_to_append(seq, num_tokens)
            self.batch.append(step, seq, num_tokens, num_blocks, draft)
            position += 1

    def _draft(self, step: Step, seq: Sequence, num_left: int) -> list[int]:
        """Tokens to try after the one that a sequence computes next. They take no block that one of the `num_left`
        running sequences from this one on may need."""
        if not self.speculation or not seq.is_decoding:
            return []
        tokens, most = step.plan.num_tokens + num_left, step.tokens - num_left
        if self.blocks.snapshots:
            most = min(most, self.blocks.snapshots.most_drafts(seq))
        if self.planner:
            most = min(most, self.planner.most_drafts(seq))
        draft = self.speculation.propose(seq, most, tokens, step.plan.num_seqs + num_left)
        more = self.blocks.blocks_to_append(seq, 1 + len(draft)) if draft else 0
        return draft if not more or more + num_left <= self.blocks.num_available else []

    def _order(self, step: Step, shares: Shares) -> tuple[list[Sequence], set[int]]:
        """The running sequences that are not in the plan yet, in the order in which several tenants are served; and the
        ids of those that compute nothing in this step."""
        running = step.candidates(self.running)
        shares.pause([seq for seq in self.running if seq.is_prefilling])
        paused = {seq.seq_id for seq in running if seq.tenant in shares.paused} if shares.paused else set[int]()
        return shares.order(running), paused

    # Waiting sequences

    def _admit(self, step: Step) -> None:
        """Start waiting sequences in order while their whole prefill fits into the pool and leaves the running ones
        the room that they are about to need."""
        step.missing_blocks = 0
        if not self.waiting or step.tokens <= 0 or len(self.running) == self.config.max_num_seqs:
            return
        growth = self.admission.growth([*self.running, *self.batch.loading])
        while step.tokens > 0 and (found := self._next(step, growth)):
            tenant, hit = found
            seq = self.waiting.take(tenant)
            self.batch.start(step, seq, hit, step.tokens)
            growth += self.admission.growth([seq])

    def _next(self, step: Step, growth: float) -> tuple[Tenant, PrefixHit] | None:
        """The tenant whose first sequence starts next, and the cached blocks that are found for it.

        Where that of the first tenant has to wait, the next tenants may start what they are entitled to, unless they
        are far ahead: so a large sequence does not hold up everyone, and comes to its turn all the same.
        """
        step.missing_blocks = 0
        shares = step.shares
        waits: Tenant | None = None
        for tenant in self.waiting.first(LOOKAHEAD if shares else 1):
            if shares and tenant.name in shares.paused:
                continue
            seq = self.waiting.head(tenant)
            hit = self.admission.match_prefix(seq)
            needed = self.admission.needed_blocks(seq, hit)
            if waits and not (shares and shares.may_pass(tenant, waits) and shares.is_entitled(seq, needed)):
                continue
            alone = not (self.running or self.batch.loading)
            spare = 0 if alone else self.admission.spare_blocks(seq, growth)
            missing = max(0, needed + spare - self.blocks.num_available)
            has_slots = 1 + seq.forks_pending <= self.batch.free_slots and self.batch.may_hold_adapter(seq)
            if has_slots and not missing:
                return (tenant, hit) if self.admission.may_begin(seq, hit, step.tokens) else None
            if not waits:
                step.missing_blocks = missing if has_slots else 0
                waits = tenant
        return None

    # After a step

    def update(self, plan: StepPlan, result: StepResult) -> list[tuple[Sequence, SampledToken]]:
        """Account for an executed plan. The caller ends what finished."""
        self.advance(plan)
        return self.receive(plan, result)

    def advance(self, plan: StepPlan) -> None:
        """Account for what a launched plan does whatever it finds: KV pairs stored, forks made, one more token of each
        sequence that samples. Sequences that have ended meanwhile stay as they are."""
        self._reset_workers = False
        self._sampling, self._verified, self._prefilled = (
            self.step.decoding[:],
            self.step.verifying,
            self.step.prefilling,
        )
        for seq in (*self._sampling, *self._verified):
            if not seq.has_left:
                self._advance(seq, 1)
                seq.token_ids.append(PENDING)
        for seq, chunk in zip(self._prefilled, plan.chunks, strict=True):
            if seq.has_left:
                self._sampling += [seq] * (chunk.samples + len(chunk.forks))
                self.batch.drop_forks(chunk.forks)
                continue
            self._advance(seq, chunk.num_tokens, prefilled=True)
            if chunk.samples:
                for each in (seq, *self.batch.fork(seq, chunk.forks)):
                    each.token_ids.append(PENDING)
                    self._sampling.append(each)

    def _advance(self, seq: Sequence, num_tokens: int, *, prefilled: bool = False) -> None:
        seq.advance(num_tokens)
        if seq.logical_length >= seq.settles_at:
            self.blocks.settle(seq, prefilled=prefilled)

    @property
    def waits_for_loads(self) -> bool:
        """Whether the plan after one that is in flight depends on what has come from the host meanwhile."""
        return bool(self.batch.loading)

    def finish_longest(self) -> None:
        """Drop the sequences that end with the tokens that are still to come, as `finish` does."""
        for seq in self._sampling:
            if seq.is_longest:
                self.finish(seq)

    @property
    def waits_for_drafts(self) -> bool:
        """Whether the plan after one that is in flight depends on its tokens: on which ones of its drafts are right, or
        as what is drafted next."""
        if self.speculation is None:
            return False
        if self._verified or self.step.plan.drafts:
            return True
        return self.speculation.waits and self.speculation.pays(len(self.running))

    def receive(self, plan: StepPlan, result: StepResult) -> list[tuple[Sequence, SampledToken]]:
        """Take the tokens of a plan after `advance`. Those of sequences that have ended are discarded."""
        if result.missing_masses:
            self._record_missing_masses(result.missing_masses)
        if result.kept_pairs:
            self._record_kept_pairs(result.kept_pairs)
        if self.batch.offloading:
            self.batch.offloading.update(plan, result)
        sampled = []
        for seq, token in zip(self._sampling, result.tokens, strict=True):
            if not seq.has_ended:
                seq.token_ids[-1] = token.token_id
                sampled.append((seq, token))
        for seq, verification, tokens in zip(self._verified, plan.verifications, result.verified, strict=True):
            if not seq.has_ended:
                self._accept(seq, len(verification.token_ids) - 1, [token.token_id for token in tokens])
                sampled += [(seq, token) for token in tokens]
        if self.speculation and plan.drafts:
            self.speculation.take(plan.drafts, result.drafts, (*self._sampling, *self._verified))
        return sampled

    def _accept(self, seq: Sequence, num_drafts: int, token_ids: list[int]) -> None:
        """A sequence gets the right ones of `num_drafts` tokens, which are computed, and the one that comes next."""
        assert self.speculation
        num_right = len(token_ids) - 1
        seq.token_ids[-1:] = token_ids
        self.speculation.received(seq, num_drafts, num_right)
        if not seq.has_left:
            seq.known_tokens += num_right
            self._advance(seq, num_right)
            self._accepted.append((seq, Accepted(seq.seq_id, token_ids[:-1])))

    def prompts_of(self, result: StepResult) -> list[tuple[Sequence, PromptLogprobs]]:
        """The log probabilities of prompts that a step has found, each with its sequence."""
        if not result.prompts:
            return []
        executed = {seq.seq_id: seq for seq in self._prefilled if not seq.has_ended}
        return [(executed[each.seq_id], each) for each in result.prompts if each.seq_id in executed]

    def _record_missing_masses(self, masses: list[MissingMass]) -> None:
        executed = self._executed()
        for mass in masses:
            if seq := executed.get(mass.seq_id):
                seq.metrics.note_missing_mass(mass.bound)

    def _record_kept_pairs(self, found: list[KeptPairs]) -> None:
        executed = self._executed()
        for each in found:
            if (seq := executed.get(each.seq_id)) and seq.index == 0:
                seq.metrics.kept_pairs = [*seq.metrics.kept_pairs, each]

    def _executed(self) -> dict[int, Sequence]:
        """The sequences of the plan that was launched last, with those that have ended since."""
        return {seq.seq_id: seq for seq in (*self.running, *self._sampling, *self._verified, *self._prefilled)}

    def last_plans(self) -> Iterator[StepPlan]:
        """Plans by which the disk gets the prefixes that the pool holds, and nobody owns."""
        return self.batch.offloading.store_idle() if self.batch.offloading else iter(())

    def forget_prefixes(self) -> None:
        """Let later sequences find nothing of what is cached so far, in the pool or on the host."""
        self.blocks.forget_prefixes()
        if self.batch.offloading:
            self.batch.offloading.forget_prefixes()

    def reset(self, sequences: list[Sequence]) -> None:
        """Start over with an empty pool after a failed step, of which an unknown part was executed.

        sequences: all that are unfinished, with nothing in the cache. The workers are told to drop theirs.
        """
        self.blocks.clear()
        self.waiting = FairQueue(self.config.tenants)
        for seq in sorted(sequences, key=lambda seq: seq.seq_id):
            self.waiting.add(seq)
        self._on_disk.restart()
        config, planner = self.config, self.planner
        offloading = Offloading(config, self.stats, self.blocks, self._on_disk) if config.num_host_blocks else None
        self.admission = Admission(config, self.blocks, planner, offloading)
        self.batch = Batch(config, self.stats, self.blocks, self.waiting, self.admission, planner, offloading)
        self.tenants = TenantAdmission(self.batch, self.admission, planner)
        self.preemption = Preemption(self.batch, planner)
        self.step = Step(StepPlan(), 0, 0)
        self._reset_workers = True
        self._prefilled: list[Sequence] = []  # in chunks of the plan that was launched last
        self._sampling: list[Sequence] = []  # its sequences that get tokens, in the order of these
        self._verified: list[Sequence] = []  # its sequences with drafts
        self._accepted: list[tuple[Sequence, Accepted]] = []  # their right tokens, for the next plan
        drafts = self.config.speculation
        self.speculation = Speculation(drafts, self.stats, self._step_cost) if drafts else None

    def check(self) -> None:
        """Raise RuntimeError if the accounting of blocks is not consistent."""
        self.blocks.check([*self.running, *self.batch.loading])
        if self.batch.offloading:
            self.batch.offloading.check(self.waiting.values())
        if any(seq.num_blocks for seq in self.waiting.values()):
            raise RuntimeError("a waiting sequence owns blocks")
