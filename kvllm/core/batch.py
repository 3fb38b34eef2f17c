"""The running sequences, and the plan of the step that they take next."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterable

from kvllm.config import EngineConfig
from kvllm.core.admission import Admission
from kvllm.core.block_manager import BlockManager, PrefixHit
from kvllm.core.disk_prefixes import DiskPrefixes
from kvllm.core.offloading import Offloading
from kvllm.core.protocol import Fork, PrefillChunk, SequenceStart, StepPlan
from kvllm.core.queue import FairQueue
from kvllm.core.sequence import PENDING, Sequence, fork_seed
from kvllm.core.shares import Shares
from kvllm.core.tables import TableStart
from kvllm.stats import EngineStats


class Batch:
    """Starts, continues and preempts sequences for the scheduler that holds it: each change goes into the plan.

    running: by age (sequence id).
    plan: of the step that is planned. decoding, prefilling: the sequences of its decodes and its chunks, in its order.
    shares: of the tenants in that step; None if all unfinished sequences are alike.
    has_preempted: whether a sequence was preempted in that step.
    offloading: None if nothing goes to the host.
    """

    def __init__(
        self,
        config: EngineConfig,
        stats: EngineStats,
        blocks: BlockManager,
        waiting: FairQueue,
        admission: Admission,
        on_disk: DiskPrefixes,
    ) -> None:
        self.config = config
        self.stats = stats
        self.blocks = blocks
        self.waiting = waiting
        self.admission = admission
        self.offloading = Offloading(config, stats, blocks, on_disk) if config.num_host_blocks else None
        admission.offloading = self.offloading
        self.running: list[Sequence] = []
        self.plan = StepPlan()
        self.decoding: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.shares: Shares | None = None
        self.has_preempted = False
        self._dropped_seq_ids: list[int] = []  # which the workers still have

    def begin(self, *, reset: bool) -> StepPlan:
        """A new plan. reset: whether the workers are to drop all that they have."""
        self.plan = StepPlan(reset=reset)
        self.shares = None
        self.has_preempted = False
        if self.offloading:
            for seq in self.offloading.take_lost():
                self.waiting.requeue(seq)
            for seq, resumed in self.offloading.take_loaded():
                self._begin(seq, resumed=resumed)
        return self.plan

    def complete(self) -> None:
        """Let the plan, to which nothing is added any more, name all that the workers are to drop and to move."""
        self.plan.dropped_seq_ids, self._dropped_seq_ids = self._dropped_seq_ids, []
        if self.offloading:
            self.offloading.complete(self.plan)

    def resolve(self) -> None:
        """Give the plan the tokens that were still to be sampled when it was made."""
        self.plan.decodes.token_ids[:] = [seq.token_ids[-1] for seq in self.decoding]
        for start in self.plan.new_seqs:
            if start.token_ids[-1] == PENDING:  # it was preempted for this very plan
                start.token_ids[-1] = next(seq.token_ids[-1] for seq in self.running if seq.seq_id == start.seq_id)

    @property
    def restarts_pending(self) -> bool:
        """Whether a sequence that gets a token of the step in flight was preempted, and starts again in the plan."""
        return any(start.token_ids[-1] == PENDING for start in self.plan.new_seqs)

    def take_scheduled(self) -> tuple[list[Sequence], list[Sequence]]:
        """The sequences that decode and those that prefill, in the plan's order. The plan counts as launched."""
        scheduled = self.decoding, self.prefilling
        self.decoding, self.prefilling = [], []
        return scheduled

    @property
    def candidates(self) -> list[Sequence]:
        """The running sequences that are not in the plan, by age."""
        planned = {*self.plan.decodes.seq_ids, *(chunk.seq_id for chunk in self.plan.chunks)}
        return [seq for seq in self.running if seq.seq_id not in planned]

    @property
    def free_slots(self) -> int:
        """Sequences that may start beside those that run or are about to branch off."""
        taken = [*self.running, *self.loading]
        return self.config.max_num_seqs - len(taken) - sum(seq.forks_pending for seq in taken)

    @property
    def loading(self) -> Iterable[Sequence]:
        """Sequences that own blocks, and will run when the content of these has come from the host."""
        return self.offloading.loading.values() if self.offloading else ()

    def start(self, seq: Sequence, hit: PrefixHit, budget: int) -> int:
        """Admit a sequence: own the cached prefix, allocate its prefill, plan the first chunk. Returns its tokens.

        One that has blocks on the host begins to load these instead.
        """
        if self.offloading and (seq.host_tables is not None or hit.host):
            self._load(self.offloading, seq, hit)
            if self.shares:
                self.shares.holding(seq).add(seq)
            return 0
        self._share(seq, hit)
        num_tokens = self.admission.chunk(seq, budget)
        self.blocks.append(seq, num_tokens, None if self.admission.refills_compressed(seq) else seq.num_uncomputed)
        self._begin(seq)
        self._prefill(seq, num_tokens, [])
        if self.shares:
            self.shares.holding(seq).add(seq)
            self.shares.charge_tokens(self.waiting.tenant(seq))
        return num_tokens

    def _share(self, seq: Sequence, hit: PrefixHit) -> None:
        """Let a sequence that has nothing begin with cached blocks."""
        self.blocks.share(seq, hit)
        seq.advance(hit.num_blocks * self.config.block_size)
        seq.hashed_blocks = hit.num_blocks

    def _load(self, offloading: Offloading, seq: Sequence, hit: PrefixHit) -> None:
        """Own all blocks that a sequence needs to begin, and load what the host has of them."""
        if seq.host_tables is None:
            self._share(seq, hit)
            num_tokens = len(hit.host) * self.config.block_size
            self.blocks.append(seq, num_tokens)
            offloading.load(seq, hit)
            seq.advance(num_tokens)
            if not self.admission.refills_compressed(seq):
                self.blocks.append(seq, seq.num_uncomputed)
        else:
            offloading.load(seq, hit)

    def _begin(self, seq: Sequence, *, resumed: bool = False) -> None:
        """Let a sequence run, with the blocks that it has. resumed: it goes on where it was."""
        insort(self.running, seq, key=lambda each: each.seq_id)
        if not seq.refill_length and not seq.preemptions:
            self._count_admission(seq)
        if self.admission.planner and not resumed:
            self.admission.planner.started(self.plan, seq)
        self.plan.new_seqs.append(
            SequenceStart(
                seq.seq_id,
                seq.token_ids[:],
                seq.prompt_length,
                seq.logical_length,
                seq.sampling,
                seq.seed,
                tables=[TableStart(table.dropped, table.blocks[:]) for table in seq.tables],
            )
        )
        seq.known_tokens = seq.num_tokens

    def append(self, seq: Sequence, num_tokens: int, num_blocks: int) -> None:
        """Put `num_tokens` of a running sequence into the plan, for which it needs `num_blocks` more."""
        new_blocks: list[list[int]] = []
        if num_blocks:
            new_blocks, copies = self.blocks.append(seq, num_tokens)
            self.plan.copies += copies
        if seq.is_decoding:
            self._decode(seq, new_blocks)
        else:
            self._prefill(seq, num_tokens, new_blocks)

    def preempt(self, seq: Sequence) -> None:
        """Take everything from a running sequence. It comes back from the host, or is computed again."""
        # What was planned for it in this step counts as done in its tables and lengths, but workers will not do it.
        changed = any(each.seq_id == seq.seq_id for each in (*self.plan.compressions, *self.plan.scored))
        self.plan.compressions = [job for job in self.plan.compressions if job.seq_id != seq.seq_id]
        self.plan.choices = [job for job in self.plan.choices if job.seq_id != seq.seq_id]
        self.plan.scored = [start for start in self.plan.scored if start.seq_id != seq.seq_id]
        if self.shares:
            self.shares.holding(seq).remove(seq)
        self.has_preempted = True
        self.stats.preemptions += 1
        if any(start.seq_id == seq.seq_id for start in self.plan.new_seqs):
            self._withdraw(seq)
        else:
            self.remove(seq)
        suspends = self.offloading is not None and not changed and self.offloading.suspend(seq)
        self.blocks.release(seq)
        if not suspends:
            self.stats.tokens_recomputed += seq.logical_length
            if self.offloading:
                self.offloading.forget(seq)
            seq.preempted()
        self.waiting.requeue(seq)

    def cancel_load(self) -> bool:
        """Let the youngest of the sequences that load their blocks wait again. Returns whether there was one."""
        seq = self.offloading.cancel_youngest() if self.offloading else None
        if seq:
            self.waiting.requeue(seq)
        return seq is not None

    def finish(self, seq: Sequence) -> None:
        """A sequence ends, whether it runs, loads its blocks or waits. The caller releases them."""
        if seq in self.running:
            self.remove(seq)
        if self.offloading:
            self.offloading.finish(seq)

    def remove(self, seq: Sequence) -> None:
        """A sequence runs no longer."""
        self.running.remove(seq)
        self._dropped_seq_ids.append(seq.seq_id)

    def drop_forks(self, forks: list[Fork]) -> None:
        """Let workers drop the forks of a sequence that has ended since they were planned."""
        self._dropped_seq_ids += [fork.seq_id for fork in forks]

    def _withdraw(self, seq: Sequence) -> None:
        """A sequence has begun to run in this step, and does not."""
        self.running.remove(seq)
        self.plan.new_seqs = [start for start in self.plan.new_seqs if start.seq_id != seq.seq_id]

    def fork(self, parent: Sequence, forks: list[Fork]) -> list[Sequence]:
        """Let the other completions of a request branch off: they share all blocks computed so far."""
        children = []
        for index, fork in enumerate(forks, start=1):
            child = parent.fork(fork.seq_id, index, fork.seed)
            self.waiting.fork(child)
            children.append(child)
        position = self.running.index(parent) + 1
        self.running[position:position] = children
        parent.forks_pending = 0
        return children

    def _decode(self, seq: Sequence, new_blocks: list[list[int]]) -> None:
        """Put the token that was sampled last into the plan."""
        if self.shares:
            self.shares.count(seq, 1)
        decodes = self.plan.decodes
        if new_blocks:
            decodes.grow(new_blocks)
        decodes.seq_ids.append(seq.seq_id)
        decodes.token_ids.append(seq.token_ids[-1])
        seq.known_tokens += 1
        self.decoding.append(seq)

    def _prefill(self, seq: Sequence, num_tokens: int, new_blocks: list[list[int]]) -> None:
        """Put tokens that the workers have into the plan."""
        if self.shares:
            self.shares.count(seq, num_tokens)
        samples = num_tokens == seq.num_uncomputed
        forks = self._forks(seq) if samples and seq.forks_pending else []
        self.plan.chunks.append(PrefillChunk(seq.seq_id, num_tokens, new_blocks, samples, forks))
        self.prefilling.append(seq)

    def _forks(self, seq: Sequence) -> list[Fork]:
        return [Fork(seq.seq_id + i, fork_seed(seq.seed, i)) for i in range(1, seq.forks_pending + 1)]

    def _count_admission(self, seq: Sequence) -> None:
        seq.admitted(time.monotonic(), seq.logical_length)
        self.stats.prompt_tokens += seq.prompt_length
        if self.config.shares_prefixes:
            self.stats.prefix_cache_queries += seq.num_tokens
            self.stats.prefix_cache_hits += seq.logical_length
