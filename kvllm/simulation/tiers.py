"""Tiers below a simulated pool: transfers that take the time of a link, and the KV pairs that compressions drop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvllm.config import CompressionConfig
from kvllm.core.protocol import CompressionJob, StepPlan, TransferReport
from kvllm.kvcache.tiers.chunks import CHUNK, ChunkPool, HeldPairs
from kvllm.simulation.cost import RecallBatch


@dataclass(frozen=True, slots=True)
class _Transfer:
    """end: when it has ended. seconds: that it took."""

    num_blocks: int
    end: float
    seconds: float


class HostLink:
    """The transfers between pool and host, one after the other and beside the steps, as `HostStore` makes them.

    block_seconds: time of a block on the link.
    """

    def __init__(self, block_seconds: float) -> None:
        self._block_seconds = block_seconds
        self._free_at = 0.0
        self._stores: list[_Transfer] = []
        self._loads: dict[int, _Transfer] = {}

    def store(self, num_blocks: int, now: float, copy_seconds: float) -> None:
        """copy_seconds: that the copies on the device took, before `now`."""
        self._stores.append(self._transfer(num_blocks, now, copy_seconds))

    def load(self, number: int, num_blocks: int, now: float) -> None:
        self._loads[number] = self._transfer(num_blocks, now, 0.0)

    def cancel(self, numbers: Iterable[int]) -> None:
        """Report nothing of these loads. What comes after them on the link comes no earlier."""
        for number in numbers:
            self._loads.pop(number, None)

    def clear(self) -> None:
        """Report no load."""
        self._loads.clear()

    def wait(self, now: float) -> float:
        """Seconds until all loads have ended."""
        return max([0.0, *(load.end - now for load in self._loads.values())])

    def ended(self, now: float, *, all_loads: bool) -> TransferReport:
        """What has ended since the last call. all_loads: they have, whatever rounding makes of their times."""
        stores = [store for store in self._stores if store.end <= now]
        self._stores = [store for store in self._stores if store.end > now]
        loaded = [number for number, load in self._loads.items() if all_loads or load.end <= now]
        transfers = [*stores, *(self._loads.pop(number) for number in loaded)]
        num_blocks = sum(transfer.num_blocks for transfer in transfers)
        return TransferReport(loaded, [], num_blocks, sum(transfer.seconds for transfer in transfers))

    def _transfer(self, num_blocks: int, now: float, copy_seconds: float) -> _Transfer:
        seconds = num_blocks * self._block_seconds
        self._free_at = max(self._free_at, now) + seconds
        return _Transfer(num_blocks, self._free_at, copy_seconds + seconds)


class SimulatedRecall:
    """What each sequence has dropped, and which of it the queries of a step score, as `Recall` has it.

    pairs: that come back at a recall, in each layer and KV head. That depends on queries, which there are none of.
    recalls: how often a sequence's queries have scored what it dropped. peak_chunks: most chunks in use.
    recalled: KV pairs that came back. lost: those that found no room; both in each layer and KV head.
    """

    def __init__(self, config: CompressionConfig, num_chunks: int, pairs: float | None) -> None:
        self.config = config
        self.pairs = config.recall_chunks * CHUNK if pairs is None else pairs
        self.chunks = ChunkPool(num_chunks)
        self.held: dict[int, HeldPairs] = {}
        self.recalls = self.peak_chunks = self.lost = 0
        self.recalled = 0.0

    def release(self, plan: StepPlan) -> None:
        """Give up what sequences have dropped that neither run nor come back with their blocks."""
        for seq_id in {*plan.dropped_seq_ids}.difference(plan.suspended).union(plan.forgotten):
            if held := self.held.pop(seq_id, None):
                self.chunks.release(held.chunks)

    def clear(self) -> None:
        """Give up all."""
        self.chunks = ChunkPool(self.chunks.num_chunks)
        self.held.clear()

    def take(self, jobs: list[CompressionJob]) -> int:
        """Hold what compressions drop. Returns how many KV pairs found room."""
        taken = 0
        for job in jobs:
            dropped = job.parts[0].dropped
            if self.held.setdefault(job.seq_id, HeldPairs()).add(dropped, self.chunks):
                taken += dropped
            else:
                self.lost += dropped
        self.peak_chunks = max(self.peak_chunks, self.chunks.num_chunks - self.chunks.num_free)
        return taken

    def batch(self, plan: StepPlan, cached: Mapping[int, int], dropped: Mapping[int, list[int]]) -> RecallBatch | None:
        """What the query tokens of a step score; None if none is due.

        cached, dropped: KV pairs of each sequence before the step, in the first part and in each.
        """
        batch = RecallBatch()
        for seq_id, tokens in plan.query_tokens():
            held, resident = self.held.get(seq_id), cached[seq_id]
            if held and held.chunks and self.config.recalls_in(resident + dropped[seq_id][0], tokens):
                batch.add(tokens, resident, held.count, min(self.pairs, held.count))
                self.recalls += 1
        self.recalled += batch.exchanged
        return batch if batch.products else None
