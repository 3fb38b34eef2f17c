"""Admission of tenants below what they are entitled to: whom it compresses and preempts for them."""

from __future__ import annotations

from kvllm.core.admission import Admission
from kvllm.core.batch import Batch
from kvllm.core.compression_planner import CompressionPlanner
from kvllm.core.queue import LOOKAHEAD, Tenant
from kvllm.core.sequence import Sequence
from kvllm.core.shares import Shares
from kvllm.core.step import Step


class TenantAdmission:
    """Starts sequences of tenants that have less than they are entitled to, at the cost of those that have more."""

    def __init__(self, batch: Batch, admission: Admission, planner: CompressionPlanner | None) -> None:
        self.batch = batch
        self.waiting = batch.waiting
        self.blocks = batch.blocks
        self.admission = admission
        self.planner = planner

    def admit(self, step: Step, shares: Shares) -> None:
        """Start what tenants are entitled to.

        Prompts go before the prefills of tenants that were served more, and leave a token for each decode. A tenant
        that is far ahead starts nothing while one that has nothing running waits: it may need more than is left to it
        by what all others are entitled to.
        """
        prefilling = [self.waiting.tenant(seq) for seq in self.batch.running if seq.is_prefilling]
        waits: Tenant | None = None
        for tenant in self.waiting.first(LOOKAHEAD):
            if waits and not shares.may_pass(tenant, waits):
                break
            while tenant.num_waiting:
                if any(other is not tenant and other.service < tenant.service for other in prefilling):
                    break
                has_room = self._make_way(step, shares, tenant)
                spare = step.tokens - shares.slots_ahead(tenant)
                if not has_room or spare <= 0:
                    break
                seq = self.waiting.take(tenant)
                self.batch.start(step, seq, self.admission.match_prefix(seq), spare)
            if tenant.num_waiting and not waits and not shares.holding(self.waiting.head(tenant)).slots:
                waits = tenant

    def _make_way(self, step: Step, shares: Shares, tenant: Tenant) -> bool:
        """Compress, then preempt, sequences of tenants above what they are entitled to, until the first sequence of a
        tenant below has slots and blocks. Returns whether it has."""
        seq, candidates = self.waiting.head(tenant), step.candidates(self.batch.running)
        blocks = self._entitled_blocks(step, shares, seq, candidates)
        if blocks is None or not self.batch.may_hold_adapter(seq):
            return False
        slots = 1 + seq.forks_pending - self.batch.free_slots
        if slots <= 0 and blocks <= self.blocks.num_available:
            return True
        if self.planner and blocks > self.blocks.num_available:
            debtors = shares.debtors(tenant, candidates)
            spare = self.admission.spare_blocks(seq, self.admission.growth(candidates))  # or growth would preempt
            goes_on = self._compress_debtors(self.planner, step, shares, debtors, blocks + spare)
            if goes_on and blocks > self.blocks.num_available:
                return False
        victims = shares.victims(tenant, candidates, slots=slots, blocks=blocks - self.blocks.num_available)
        if victims is None:
            return False
        for victim in victims:
            self.batch.preempt(step, victim)
        # What made way may have been a part of the cached prefix.
        blocks = self._entitled_blocks(step, shares, seq, [each for each in candidates if each not in victims])
        return blocks is not None and blocks <= self.blocks.num_available

    def _entitled_blocks(self, step: Step, shares: Shares, seq: Sequence, candidates: list[Sequence]) -> int | None:
        """Blocks that must be available for a waiting sequence, or None if its tenant is not entitled to it."""
        needed = self.admission.needed_blocks(seq, self.admission.match_prefix(seq))
        if not shares.is_entitled(seq, needed):
            return None
        if candidates and candidates[0].seq_id not in step.deferred:  # the oldest grows, or it would lose all
            num_tokens = self.admission.chunk(candidates[0], len(self.batch.running))
            needed += self.blocks.blocks_to_append(candidates[0], num_tokens)
        return needed + seq.forks_pending

    def _compress_debtors(
        self, planner: CompressionPlanner, step: Step, shares: Shares, debtors: list[Sequence], blocks: int
    ) -> bool:
        """Compress sequences until so many blocks are available. Returns whether that goes on in the next step, because
        there are no tokens left for more."""
        compressed = {job.seq_id for job in step.plan.compressions}
        for seq in debtors:
            if blocks <= self.blocks.num_available:
                return False
            if seq.seq_id in compressed or not planner.can_compress(seq):
                continue
            if compressed and not step.compression_tokens:
                return True
            before = seq.num_blocks
            planner.compress_complete(step, seq)
            shares.holding(seq).blocks -= before - seq.num_blocks
            compressed.add(seq.seq_id)
        return False
