"""A rank's part in the transfers between its KV pool and host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from kvllm.core.protocol import StepPlan, TransferReport
from kvllm.kvcache.cache import PagedKVCache
from kvllm.kvcache.tiers.host import HostStore
from kvllm.worker.state import SequenceState


class SlotState(Protocol):
    """State that a compression method keeps of each running sequence, beside the cache."""

    def save(self, table_slot: int) -> Any: ...

    def restore(self, table_slot: int, saved: Any) -> None: ...


class Offloader:
    """Executes what plans say of blocks on the host, and keeps what the pool does not hold of suspended sequences."""

    def __init__(self, cache: PagedKVCache, store: HostStore, slot_states: list[SlotState]) -> None:
        self.cache = cache
        self.store = store
        self.slot_states = slot_states
        self._saved: dict[int, list[Any]] = {}
        self._told = False  # what the disk has

    def reset(self) -> None:
        """Drop all that a step that was cut short may have left half done."""
        self.store.clear()
        self._saved.clear()
        self._told = False

    def begin(self, plan: StepPlan, states: Mapping[int, SequenceState]) -> None:
        """Execute what comes before everything that writes to blocks or drops sequences."""
        self.store.cancel(plan.cancelled)
        for transfer in plan.stores:
            self.store.store(self.cache, transfer.blocks, transfer.host_blocks, transfer.digests)
        if plan.stores and not plan.num_seqs and self.store.disk:
            self.store.disk.wait()  # nobody waits for this plan, and copies take memory
        for seq_id in plan.suspended:
            if seq_id in states:  # else it came back for this step, and goes again before it began
                table_slot = states[seq_id].table_slot
                self._saved[seq_id] = [state.save(table_slot) for state in self.slot_states]
        for seq_id in plan.forgotten:
            self._saved.pop(seq_id, None)

    def load(self, plan: StepPlan) -> None:
        """Begin to load, after all in the step that still reads the blocks."""
        for load in plan.loads:
            transfer = load.transfer
            self.store.load(load.number, transfer.host_blocks, self.cache, transfer.blocks, transfer.digests)

    def restore(self, seq_id: int, table_slot: int) -> None:
        """Let a sequence that starts go on with what was kept of it, if it was suspended."""
        for state, saved in zip(self.slot_states, self._saved.pop(seq_id, ()), strict=False):
            state.restore(table_slot, saved)

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
