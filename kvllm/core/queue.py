"""The order of waiting sequences: weighted fair queueing among tenants, then priority, then arrival."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator

from msgspec import structs

from kvllm.config import TenantConfig
from kvllm.core.sequence import Sequence

LOOKAHEAD = 8
"""Tenants that are looked at when the first of them has to wait."""

Waiting = tuple[bool, int, int, Sequence]
"""Whether it was never preempted, priority, id, and the sequence: the least is the first of its tenant."""


class Tenant:
    """A tenant with unfinished sequences, or one that left with more service than others.

    service: virtual time, which is the cost of all its steps divided by its weight.
    cost: of its steps since it was last taken.
    num_unfinished: sequences that wait or run. num_waiting: those that wait.
    """

    __slots__ = ("cost", "entry", "heap", "name", "num_unfinished", "num_waiting", "service", "settings")

    def __init__(self, name: str, settings: TenantConfig) -> None:
        self.name = name
        self.settings = settings
        self.service = self.cost = 0.0
        self.num_unfinished = 0
        self.num_waiting = 0
        self.heap: list[Waiting] = []
        self.entry: tuple[float, int, str] | None = None  # its valid entry in the queue's heap of tenants


class FairQueue:
    """The unfinished sequences of all tenants, and the order in which those that wait are admitted.

    The tenant with the least service comes first. One that was away begins where the least served is, so an idle time
    saves up nothing; and one that left ahead of the others is still ahead when it returns. Within a tenant preempted
    sequences come first, then lower priorities, then earlier ones. With one tenant and one priority that is the order
    of arrival. Each operation takes O(log n).

    total_weight, total_guarantee: of all tenants that have unfinished sequences.
    """

    def __init__(self, settings: dict[str, TenantConfig]) -> None:
        self._settings = settings
        self._tenants: dict[str, Tenant] = {}
        self._waiting: dict[int, Sequence] = {}
        self._by_service: list[tuple[float, int, str]] = []  # entries of tenants with waiting sequences, and stale ones
        self._ahead: list[tuple[float, str]] = []  # tenants that left with more service than `_least`
        self._least = 0.0  # service of the least served tenant with unfinished sequences; never falls
        self._classes: Counter[tuple[str, int]] = Counter()  # unfinished sequences by tenant and priority
        self.num_active = 0
        self.total_weight = 0.0
        self.total_guarantee = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.seq_id in self._waiting

    def values(self) -> Iterable[Sequence]:
        """All waiting sequences, in no particular order."""
        return self._waiting.values()

    @property
    def is_uniform(self) -> bool:
        """Whether all unfinished sequences have one tenant and one priority."""
        return len(self._classes) <= 1

    # Sequences

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        self._join(seq)
        self._push(seq)

    def fork(self, child: Sequence) -> None:
        """A sequence runs that has branched off from another."""
        self._join(child)

    def requeue(self, seq: Sequence) -> None:
        """Queue a sequence that was preempted: it goes before those of its tenant that were not."""
        self._push(seq)

    def take(self, tenant: Tenant) -> Sequence:
        """Take the first waiting sequence of a tenant out of the queue, to run it."""
        seq = self.head(tenant)
        heapq.heappop(tenant.heap)
        self._remove(seq)
        return seq

    def finish(self, seq: Sequence) -> bool:
        """Forget a sequence that ended. Returns whether it was waiting."""
        was_waiting = seq.seq_id in self._waiting
        if was_waiting:
            self._remove(seq)
        self._leave(seq)
        return was_waiting

    # Tenants

    def tenant(self, seq: Sequence) -> Tenant:
        return self._tenants[seq.tenant]

    def find(self, name: str) -> Tenant | None:
        """The tenant of that name, if it has unfinished sequences."""
        tenant = self._tenants.get(name)
        return tenant if tenant and tenant.num_unfinished else None

    def num_waiting(self, name: str) -> int:
        """Waiting sequences of the tenant of that name."""
        tenant = self.find(name)
        return tenant.num_waiting if tenant else 0

    def part(self, tenant: Tenant) -> float:
        """Of what is shared by weight, what a tenant is entitled to while it has unfinished sequences."""
        return tenant.settings.weight / self.total_weight

    def first(self, count: int) -> Iterator[Tenant]:
        """The first `count` tenants with waiting sequences, the least served first. The queue may not change while
        they are iterated over."""
        entries = []
        while self._by_service and len(entries) < count:
            entry = heapq.heappop(self._by_service)
            if self._is_valid(entry):
                entries.append(entry)
        for entry in entries:
            heapq.heappush(self._by_service, entry)
        return (self._tenants[name] for _, _, name in entries)

    def head(self, tenant: Tenant) -> Sequence:
        """The first waiting sequence of a tenant that has some."""
        heap = tenant.heap
        while heap[0][2] not in self._waiting:  # it was aborted
            heapq.heappop(heap)
        return heap[0][3]

    def charge(self, tenant: Tenant, cost: float) -> None:
        """Account for `cost` tokens that a tenant had."""
        tenant.service += cost / tenant.settings.weight
        tenant.cost += cost
        if tenant.num_waiting:
            self._enter(tenant)

    def take_costs(self) -> dict[str, float]:
        """What tenants were charged since the last call, by name."""
        costs = {name: tenant.cost for name, tenant in self._tenants.items() if tenant.cost}
        for name in costs:
            self._tenants[name].cost = 0.0
        return costs

    def advance(self, running: Iterable[Tenant]) -> None:
        """Find the least service after a step, given the tenants with running sequences."""
        services = [tenant.service for tenant in running]
        while self._by_service and not self._is_valid(self._by_service[0]):
            heapq.heappop(self._by_service)
        if self._by_service:
            services.append(self._by_service[0][0])
        if services:
            self._least = max(self._least, min(services))
        while self._ahead and self._ahead[0][0] <= self._least:
            service, name = heapq.heappop(self._ahead)
            tenant = self._tenants.get(name)
            if tenant and not tenant.num_unfinished and tenant.service == service:
                del self._tenants[name]

    # Entries

    def _join(self, seq: Sequence) -> None:
        tenant = self._tenants.get(seq.tenant)
        if tenant is None:
            tenant = Tenant(seq.tenant, self._settings.get(seq.tenant, TenantConfig()))
            self._tenants[seq.tenant] = tenant
        highest = tenant.settings.max_priority
        if highest is not None and seq.priority < highest:
            seq.service_class = structs.replace(seq.service_class, priority=highest)
        if not tenant.num_unfinished:
            tenant.service = max(tenant.service, self._least)
            self._activate(tenant, 1)
        tenant.num_unfinished += 1
        self._classes[seq.tenant, seq.priority] += 1

    def _leave(self, seq: Sequence) -> None:
        tenant = self._tenants[seq.tenant]
        key = seq.tenant, seq.priority
        self._classes[key] -= 1
        if not self._classes[key]:
            del self._classes[key]
        tenant.num_unfinished -= 1
        if not tenant.num_unfinished:
            self._activate(tenant, -1)
            tenant.heap.clear()
            heapq.heappush(self._ahead, (tenant.service, tenant.name))

    def _activate(self, tenant: Tenant, sign: int) -> None:
        self.num_active += sign
        self.total_weight += sign * tenant.settings.weight
        self.total_guarantee += sign * tenant.settings.guaranteed_share
        if not self.num_active:  # no rounding error adds up
            self.total_weight = self.total_guarantee = 0.0

    def _push(self, seq: Sequence) -> None:
        tenant = self._tenants[seq.tenant]
        self._waiting[seq.seq_id] = seq
        tenant.num_waiting += 1
        heapq.heappush(tenant.heap, (seq.preemptions == 0, seq.priority, seq.seq_id, seq))
        if tenant.num_waiting == 1:
            self._enter(tenant)

    def _remove(self, seq: Sequence) -> None:
        tenant = self._tenants[seq.tenant]
        del self._waiting[seq.seq_id]
        tenant.num_waiting -= 1
        if not tenant.num_waiting:
            tenant.heap.clear()
            tenant.entry = None
        elif len(tenant.heap) > 2 * tenant.num_waiting + 16:  # most were aborted
            tenant.heap = [entry for entry in tenant.heap if entry[2] in self._waiting]
            heapq.heapify(tenant.heap)

    def _enter(self, tenant: Tenant) -> None:
        """Give a tenant with waiting sequences its place by service. Ties go to the earlier sequence."""
        tenant.entry = (tenant.service, self.head(tenant).seq_id, tenant.name)
        heapq.heappush(self._by_service, tenant.entry)
        if len(self._by_service) > 2 * len(self._tenants) + 16:
            self._by_service = [entry for entry in self._by_service if self._is_valid(entry)]
            heapq.heapify(self._by_service)

    def _is_valid(self, entry: tuple[float, int, str]) -> bool:
        tenant = self._tenants.get(entry[2])
        return tenant is not None and tenant.entry is entry
