"""Sequences and prefixes whose blocks are on the host: how they get there, and how they come back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvllm.config import EngineConfig
from kvllm.core.block_manager import BlockManager, PrefixHit
from kvllm.core.host_blocks import DiskPrefixes, HostBlocks
from kvllm.core.protocol import NOWHERE, BlockTransfer, Load, StepPlan, StepResult
from kvllm.core.sequence import Sequence
from kvllm.core.tables import TableStart
from kvllm.stats import EngineStats

MEMORY = 0.9
"""Of what was measured before, what still counts when something is measured."""


class Rate:
    """What was done in a second, over the last measurements."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def measure(self, amount: float, seconds: float) -> None:
        self._amount = MEMORY * self._amount + amount
        self._seconds = MEMORY * self._seconds + seconds

    def seconds_for(self, amount: float) -> float:
        """0 as long as nothing was measured."""
        return amount * self._seconds / self._amount if self._amount else 0.0


class SwapCost:
    """Blocks over the measured speed of the link, out and back, against tokens over the measured speed of prefills.

    mode: "auto", "always" or "never".
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._link, self._prefill = Rate(), Rate()

    def measure(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from an executed plan."""
        if result.transfers.num_blocks:
            self._link.measure(result.transfers.num_blocks, result.transfers.seconds)
        if plan.has_prefill:
            self._prefill.measure(plan.num_tokens, result.seconds.model)

    def swaps(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether a cache of so many blocks goes to the host, rather than that its tokens are computed again. The first
        one does, as it tells how fast the link is."""
        if self.mode == "auto":
            return self._link.seconds_for(2 * num_blocks) <= self._prefill.seconds_for(num_tokens)
        return self.mode == "always"


BLOCKS_AT_ONCE = 64
"""Of which a plan holds copies, when the engine ends."""


class Offloading:
    """Plans the transfers between pool and host for the batch that holds it.

    A sequence that comes back first loads its blocks, beside the steps of others. It runs once the workers have
    reported that they are there. If they are lost, it waits again, and is computed.

    loading: sequences by the numbers of their loads, oldest first. They own blocks of the pool, and do not run.
    """

    def __init__(self, config: EngineConfig, stats: EngineStats, blocks: BlockManager, on_disk: DiskPrefixes) -> None:
        self.stats = stats
        self.blocks = blocks
        self.host = HostBlocks(config.num_host_blocks)
        self.cost = SwapCost(config.swap)
        self.loading: dict[int, Sequence] = {}
        self._sources: dict[int, BlockTransfer] = {}  # of prefixes, by the numbers of their loads
        self._uses_disk = config.kv_offloading_path is not None
        self._on_disk = on_disk
        self._loaded: list[int] = []
        self._lost: list[int] = []
        self._number = 0
        self._plan = StepPlan()  # the transfers of the next one

    def complete(self, plan: StepPlan) -> None:
        """Put all transfers into a plan, those of prefixes among them that leave the pool for it."""
        self._store_prefixes(self.blocks.pool.take_evicted())
        plan.stores, plan.loads, plan.cancelled = self._plan.stores, self._plan.loads, self._plan.cancelled
        plan.suspended, plan.forgotten = self._plan.suspended, self._plan.forgotten
        self.stats.blocks_stored += sum(len(transfer.blocks) for transfer in plan.stores)
        self.stats.blocks_loaded += sum(len(load.transfer.blocks) for load in plan.loads)
        self._plan = StepPlan()
        self.host.begin_plan()

    def update(self, plan: StepPlan, result: StepResult) -> None:
        """Account for an executed plan."""
        self.cost.measure(plan, result)
        self._loaded += [number for number in result.transfers.loaded if number in self.loading]
        self._lost += [number for number in result.transfers.lost if number in self.loading]
        self._on_disk.reported(result.transfers.on_disk)
        self.stats.host_blocks_in_use = self.host.num_used

    # To the host

    def suspend(self, seq: Sequence) -> bool:
        """Let the cache of a sequence that is preempted go to the host, if it is worth it and there is room. The caller
        releases its blocks."""
        num_blocks = seq.num_blocks
        reported = seq.sampling.prompt_logprobs is not None and not seq.num_generated
        if reported or not num_blocks or not self.cost.swaps(num_blocks, seq.logical_length):
            return False
        host_blocks = self.host.allocate(num_blocks)
        if host_blocks is None:
            return False
        blocks, left = [block for table in seq.tables for block in table.blocks], iter(host_blocks)
        self._plan.stores.append(BlockTransfer(blocks, host_blocks))
        self._plan.suspended.append(seq.seq_id)
        seq.suspended([TableStart(table.dropped, [next(left) for _ in table.blocks]) for table in seq.tables])
        self.stats.swapped_out += 1
        return True

    def _store_prefixes(self, prefixes: list[tuple[bytes, int]]) -> None:
        """Let the content of blocks, by digest, go to the host and the disk, as far as it is not there."""
        transfer = BlockTransfer([], [])
        for digest, block in prefixes:
            host_block = self.host.insert(digest)
            is_new = self._uses_disk and digest not in self._on_disk
            if host_block is not None or is_new:
                transfer.blocks.append(block)
                transfer.host_blocks.append(NOWHERE if host_block is None else host_block)
                transfer.digests.append(digest if is_new else b"")
        if transfer.blocks:
            self._plan.stores.append(transfer)
            self._on_disk.written(filter(None, transfer.digests))

    def store_idle(self) -> Iterator[StepPlan]:
        """Plans by which the disk gets the prefixes that the pool holds, and nobody owns."""
        cache = self.blocks.prefix_cache
        finds = self._uses_disk and self.blocks.is_uniform
        prefixes = cache.idle_content() if cache and finds else []
        for first in range(0, len(prefixes), BLOCKS_AT_ONCE):
            self._store_prefixes(prefixes[first : first + BLOCKS_AT_ONCE])
            plan = StepPlan()
            self.complete(plan)
            if plan.stores:
                yield plan

    def forget_prefixes(self) -> None:
        """Let later sequences find nothing that is on the host or the disk now."""
        self.host.forget_prefixes()
        self._on_disk.forget()

    # Back

    def match(self, seq: Sequence, hit: PrefixHit, limit: int) -> PrefixHit:
        """A hit in the pool, and what the host and the disk have of the blocks after it, of at most `limit` tokens."""
        if not (self.blocks.is_uniform and self.blocks.prefix_cache) or self.blocks.snapshots:
            return hit
        found: list[int | bytes] = []
        for digest in seq.block_hashes[hit.num_blocks : limit // self.blocks.block_size]:
            host_block = self.host.find(digest)
            if host_block is None and digest not in self._on_disk:
                break
            found.append(digest if host_block is None else host_block)
        return hit._replace(host=found)

    def load(self, seq: Sequence, hit: PrefixHit) -> None:
        """Begin to load what a waiting sequence has on the host, into blocks that it owns from now on."""
        if seq.host_tables is not None:
            self.blocks.restore(seq, hit)
            transfer = BlockTransfer([], [])
            for table, host, found in zip(seq.tables, seq.host_tables, hit.tables, strict=True):
                transfer.blocks.extend(table.blocks[len(found) :])  # the pool still has those before
                transfer.host_blocks.extend(host.blocks[len(found) :])
        else:
            host_blocks = [NOWHERE if isinstance(source, bytes) else source for source in hit.host]
            digests = [source if isinstance(source, bytes) else b"" for source in hit.host]
            transfer = BlockTransfer(seq.tables[0].blocks[-len(hit.host) :], host_blocks, digests)
            self._sources[self._number] = transfer
        self.host.read(transfer.host_blocks)
        self._plan.loads.append(Load(self._number, transfer))
        self.loading[self._number] = seq
        self._number += 1

    def take_loaded(self) -> Iterator[tuple[Sequence, bool]]:
        """The sequences whose blocks are there. They run from now on. Of each, whether it was suspended."""
        for number in self._loaded:
            seq = self.loading.pop(number)
            suspended = seq.host_tables is not None
            if suspended:
                self.stats.swapped_in += 1
                self._release(seq)
            else:
                source = self._sources.pop(number)
                self.stats.prefix_host_hits += seq.is_new * len(source.blocks) * self.blocks.block_size
            yield seq, suspended
        self._loaded = []

    def take_lost(self) -> Iterator[Sequence]:
        """The sequences whose blocks are lost. They own nothing, and are to wait again."""
        for number in self._lost:
            seq = self.loading.pop(number)
            self.blocks.release(seq)
            if seq.host_tables is None:
                lost = self._sources.pop(number)
                self.host.remove(lost.host_blocks)
                self._on_disk.lost(lost.digests)
                seq.reset()
            else:
                self.stats.tokens_recomputed += seq.logical_length
                self._release(seq)
                self.forget(seq)
                seq.forgotten()
            yield seq
        self._lost = []

    def cancel_youngest(self) -> Sequence | None:
        """Stop a load, so that its blocks are free. Returns the sequence, which is to wait again."""
        if not self.loading:
            return None
        number, seq = max(self.loading.items(), key=lambda item: item[1].seq_id)
        self._cancel(number)
        self.blocks.release(seq)
        if seq.host_tables is None:
            seq.reset()
        return seq

    def finish(self, seq: Sequence) -> None:
        """Forget what the host has of a sequence that ended."""
        for number in [number for number, each in self.loading.items() if each is seq]:
            self._cancel(number)
        if seq.host_tables is not None:
            self._release(seq)
            self.forget(seq)

    def forget(self, seq: Sequence) -> None:
        """Let workers keep nothing of a sequence that does not come back from the host."""
        self._plan.forgotten.append(seq.seq_id)

    def check(self, waiting: Iterable[Sequence]) -> None:
        """Raise RuntimeError if the accounting of host blocks is not consistent."""
        suspended = (seq.host_tables or () for seq in (*waiting, *self.loading.values()))
        self.host.check(block for tables in suspended for table in tables for block in table.blocks)

    def _cancel(self, number: int) -> None:
        del self.loading[number]
        self._sources.pop(number, None)
        self._loaded = [each for each in self._loaded if each != number]
        self._lost = [each for each in self._lost if each != number]
        planned = [load for load in self._plan.loads if load.number == number]
        if planned:
            self._plan.loads.remove(planned[0])
        else:
            self._plan.cancelled.append(number)

    def _release(self, seq: Sequence) -> None:
        assert seq.host_tables is not None
        self.host.release(block for table in seq.host_tables for block in table.blocks)
        seq.host_tables = None
