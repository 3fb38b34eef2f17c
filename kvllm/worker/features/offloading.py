"""A rank's part in the transfers between its KV pool and host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from kvllm.core.protocol import SequenceStart, StepPlan, StepResult, TransferReport
from kvllm.kvcache.cache import PagedKVCache
from kvllm.kvcache.tiers.host import HostStore
from kvllm.worker.features.base import Restore, StepFeature, WorkerParts
from kvllm.worker.state import SequenceState


class Offloader(StepFeature):
    """Executes what plans say of blocks on the host, and keeps what other features hold of suspended sequences."""

    overlaps = False

    def __init__(self, cache: PagedKVCache, store: HostStore, features: Sequence[StepFeature]) -> None:
        self.cache = cache
        self.store = store
        self.features = features
        self._saved: dict[int, list[Restore]] = {}
        self._told = False  # what the disk has

    @classmethod
    def make(cls, worker: WorkerParts) -> Self | None:
        return cls(worker.operations.cache, worker.store, [*worker.features]) if worker.store else None

    def reset(self) -> None:
        self.store.clear()
        self._saved.clear()
        self._told = False

    def before_plan(self, plan: StepPlan, states: Mapping[int, SequenceState]) -> None:
        self.store.cancel(plan.cancelled)
        for transfer in plan.stores:
            self.store.store(self.cache, transfer.blocks, transfer.host_blocks, transfer.digests)
        if plan.stores and not plan.num_seqs and self.store.disk:
            self.store.disk.wait()  # nobody waits for this plan, and copies take memory
        for seq_id in plan.suspended:
            if seq_id in states:  # else it came back for this step, and goes again before it began
                table_slot = states[seq_id].table_slot
                self._saved[seq_id] = [feature.save(table_slot) for feature in self.features]
        for seq_id in plan.forgotten:
            self._saved.pop(seq_id, None)

    def start(self, table_slot: int, start: SequenceStart) -> None:
        """A sequence that was suspended goes on with what was kept of it."""
        for restore in self._saved.pop(start.seq_id, ()):
            restore(table_slot)

    def after_compression(self, plan: StepPlan) -> None:
        """Begin to load."""
        for load in plan.loads:
            transfer = load.transfer
            self.store.load(load.number, transfer.host_blocks, self.cache, transfer.blocks, transfer.digests)

    def after_pass(self, plan: StepPlan, result: StepResult) -> None:
        result.transfers = self.report(wait=not plan.num_seqs)

    def report(self, *, wait: bool) -> TransferReport:
        """What has ended since the last report. wait: for all loads."""
        ended = self.store.ended(wait=wait)
        on_disk = self.store.disk.digests() if self.store.disk and not self._told else []
        self._told = True
        return TransferReport(ended.loaded, ended.lost, ended.num_blocks, ended.seconds, on_disk)

    def close(self) -> None:
        """Return when the disk has all that goes there."""
        if self.store.disk:
            self.store.disk.close()
