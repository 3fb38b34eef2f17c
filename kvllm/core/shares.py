"""What each tenant holds of slots and blocks, against what it is entitled to while others want them, too."""

from __future__ import annotations

import math
from collections.abc import Sequence as Sequences

from kvllm.config import EngineConfig
from kvllm.core.block_manager import BlockManager
from kvllm.core.queue import FairQueue, Tenant
from kvllm.core.sequence import Sequence

PATIENCE = 8
"""Full steps of work by which a tenant may be ahead of one that waits, and still go before it or preempt it."""
PROTECTED = 1.25
"""A preempted sequence makes way for another tenant again when it is so many times longer than it was: what is
computed or moved again stays in proportion to what is new, and every sequence ends."""


class Holding:
    """Slots and blocks that a tenant's running sequences hold, and those that it is entitled to.

    service: of the tenant when the step began. tokens: that it gets in this step.
    """

    __slots__ = ("blocks", "entitled_blocks", "entitled_slots", "service", "slots", "tenant", "tokens")

    def __init__(self, tenant: Tenant, entitled_slots: float, entitled_blocks: float) -> None:
        self.tenant = tenant
        self.service = tenant.service
        self.entitled_slots = entitled_slots
        self.entitled_blocks = entitled_blocks
        self.slots = 0
        self.blocks = 0
        self.tokens = 0

    @property
    def excess(self) -> float:
        """The larger share of what is held to what it is entitled to; above 1 it may have to make way."""
        return max(self.slots / self.entitled_slots, self.blocks / self.entitled_blocks)

    @property
    def is_modest(self) -> bool:
        """Whether no more is held than the tenant is entitled to, or a single sequence."""
        return self.slots <= 1 or self.excess <= 1

    def add(self, seq: Sequence) -> None:
        self.slots += 1 + seq.forks_pending
        self.blocks += seq.num_blocks

    def remove(self, seq: Sequence) -> None:
        self.slots -= 1 + seq.forks_pending
        self.blocks -= seq.num_blocks


class Shares:
    """The holdings of all tenants during one step.

    A tenant is entitled to the share of the pool that it was guaranteed, and, by weight among those with unfinished
    sequences, to its part of the rest and of the slots. It may have more as long as no other tenant lacks it.

    paused: names of tenants that start and compute nothing in this step.
    """

    def __init__(self, config: EngineConfig, queue: FairQueue, blocks: BlockManager, running: list[Sequence]) -> None:
        self.queue = queue
        self._config = config
        self._blocks = blocks
        self._patience = PATIENCE * config.max_num_batched_tokens
        self._holdings: dict[str, Holding] = {}
        self.paused: set[str] = set()
        for seq in running:
            self.holding(seq).add(seq)

    def holding(self, seq: Sequence) -> Holding:
        """Of the tenant of a sequence."""
        found = self._holdings.get(seq.tenant)
        if found is None:
            tenant = self.queue.tenant(seq)
            found = self._holdings[tenant.name] = Holding(tenant, *self._entitlement(tenant))
        return found

    def _entitlement(self, tenant: Tenant) -> tuple[float, float]:
        """Slots and blocks."""
        settings, config = tenant.settings, self._config
        part = self.queue.part(tenant)
        share = settings.guaranteed_share + part * max(0.0, 1 - self.queue.total_guarantee)
        return max(1.0, part * config.max_num_seqs), max(1.0, share * config.num_blocks)

    # The order of a step

    def order(self, running: Sequences[Sequence]) -> list[Sequence]:
        """Running sequences in the order in which they get tokens and blocks.

        Decodes come first, as each of them takes one token; then prefills, those of the least served tenant first; then
        what is paused. The oldest sequence goes before all others if it may need blocks, so there is always one that
        advances.

        running: by age.
        """
        first: list[Sequence] = []
        decodes: dict[str, list[Sequence]] = {}
        prefills: list[Sequence] = []
        last: list[Sequence] = []
        for position, seq in enumerate(running):
            name = seq.tenant
            prefilling = seq.is_prefilling
            if name in self.paused:
                last.append(seq)
            elif position == 0 and (not prefilling or seq.num_generated):
                first.append(seq)
            elif prefilling:
                prefills.append(seq)
            else:
                decodes.setdefault(name, []).append(seq)
        for name in sorted(decodes, key=lambda name: (self._holdings[name].excess, name)):
            first += decodes[name]
        prefills.sort(key=lambda seq: (self._holdings[seq.tenant].service, seq.priority, seq.seq_id))
        return first + prefills + last

    def pause(self, prefilling: Sequences[Sequence]) -> None:
        """Pause tenants that have more than they are entitled to while one that does not, and was served less, computes
        a prompt: so that its first token does not wait for their decodes and prompts, too."""
        services = [held.service for held in map(self.holding, prefilling) if held.is_modest]
        least = min(services, default=math.inf)
        self.paused = {name for name, held in self._holdings.items() if not held.is_modest and held.service >= least}

    def slots_ahead(self, tenant: Tenant) -> int:
        """Sequences that decode even while one of `tenant` computes its prompt."""
        others = self._holdings.values()
        return sum(held.slots for held in others if held.is_modest or held.service < tenant.service)

    def rank(self, seq: Sequence) -> tuple[float, int, int]:
        """Who is preempted first has the highest: most above what its tenant is entitled to, then youngest."""
        return self._holdings[seq.tenant].excess, seq.priority, seq.seq_id

    # Admission

    def is_entitled(self, seq: Sequence, num_blocks: int) -> bool:
        """Whether a tenant stays within what it is entitled to if `seq` starts, with `num_blocks`. A tenant that holds
        nothing may start one sequence."""
        held = self.holding(seq)
        slots = held.slots + 1 + seq.forks_pending
        within = slots <= held.entitled_slots and held.blocks + num_blocks <= held.entitled_blocks
        return within or not held.slots

    def may_pass(self, tenant: Tenant, other: Tenant) -> bool:
        """Whether a tenant is not so far ahead of another that it has to wait for it."""
        return tenant.service <= other.service + self._patience

    def debtors(self, tenant: Tenant, running: Sequences[Sequence]) -> list[Sequence]:
        """Sequences of other tenants that hold more blocks than they are entitled to, the first to make way first."""
        above = [name for name, held in self._holdings.items() if held.blocks > held.entitled_blocks]
        owing = [seq for seq in running if seq.tenant in above and self._owes(tenant, seq)]
        return sorted(owing, key=self.rank, reverse=True)

    def victims(
        self, tenant: Tenant, running: Sequences[Sequence], *, slots: int, blocks: int
    ) -> list[Sequence] | None:
        """Sequences to preempt so that a tenant gets so many slots and blocks more; None if there are too few."""
        left = {name: (held.slots, held.blocks) for name, held in self._holdings.items()}
        chosen = []
        for seq in sorted(running, key=self.rank, reverse=True):
            if slots <= 0 and blocks <= 0:
                break
            held = self._holdings[seq.tenant]
            held_slots, held_blocks = left[seq.tenant]
            above = (slots > 0 and held_slots > held.entitled_slots) or (
                blocks > 0 and held_blocks > held.entitled_blocks
            )
            if not above or self._is_protected(seq) or not self._owes(tenant, seq):
                continue
            freed = self._blocks.num_exclusive(seq)
            left[seq.tenant] = held_slots - 1 - seq.forks_pending, held_blocks - seq.num_blocks
            slots, blocks = slots - 1 - seq.forks_pending, blocks - freed
            chosen.append(seq)
        return chosen if slots <= 0 and blocks <= 0 else None

    def _owes(self, tenant: Tenant, seq: Sequence) -> bool:
        return seq.tenant != tenant.name and self.may_pass(tenant, self.queue.tenant(seq))

    @staticmethod
    def _is_protected(seq: Sequence) -> bool:
        return seq.num_tokens < PROTECTED * seq.preempted_length

    # Service

    def count(self, seq: Sequence, num_tokens: int) -> None:
        """Tokens of a sequence that are about to be computed. Those that a preemption made necessary are free."""
        again = seq.refill_length - seq.logical_length
        if again > 0:
            num_tokens = max(0, num_tokens - again)
        self.holding(seq).tokens += num_tokens

    def charge(self, block_cost: float) -> None:
        """Account for the tokens that tenants got, and for the blocks that they hold."""
        for held in self._holdings.values():
            self.queue.charge(held.tenant, held.tokens + block_cost * held.blocks)
            held.tokens = 0

    def charge_tokens(self, tenant: Tenant) -> None:
        """Account for the tokens of one tenant now, so that another may be next."""
        held = self._holdings[tenant.name]
        self.queue.charge(tenant, held.tokens)
        held.tokens = 0
