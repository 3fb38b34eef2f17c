"""The running sequences: how they start, go on, are preempted, branch off and end."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterable

from kvllm.config import EngineConfig
from kvllm.core.admission import Admission
from kvllm.core.block_manager import BlockManager, PrefixHit
from kvllm.core.compression_planner import CompressionPlanner
from kvllm.core.offloading import Offloading
from kvllm.core.protocol import Fork, SequenceStart
from kvllm.core.queue import FairQueue
from kvllm.core.sequence import Sequence
from kvllm.core.step import Step
from kvllm.core.tables import TableStart
from kvllm.stats import EngineStats


class Batch:
    """Holds the running sequences. What changes for them goes into the step that is planned.

    running: by age (sequence id).
    offloading: None if nothing goes to the host.
    """

    def __init__(
        self,
        config: EngineConfig,
        stats: EngineStats,
        blocks: BlockManager,
        waiting: FairQueue,
        admission: Admission,
        planner: CompressionPlanner | None,
        offloading: Offloading | None,
    ) -> None:
        self.config = config
        self.stats = stats
        self.blocks = blocks
        self.waiting = waiting
        self.admission = admission
        self.planner = planner
        self.offloading = offloading
        self.running: list[Sequence] = []
        self._dropped_seq_ids: list[int] = []  # which the workers still have

    def begin(self, step: Step) -> None:
        """Let sequences run whose blocks have come from the host."""
        if self.offloading:
            for seq in self.offloading.take_lost():
                self.waiting.requeue(seq)
            for seq, resumed in self.offloading.take_loaded():
                self._begin(step, seq, resumed=resumed)

    def complete(self, step: Step) -> None:
        """Let the plan, to which nothing is added any more, name all that the workers are to drop and to move."""
        step.plan.dropped_seq_ids, self._dropped_seq_ids = self._dropped_seq_ids, []
        if self.offloading:
            self.offloading.complete(step.plan)

    @property
    def free_slots(self) -> int:
        """Sequences that may start beside those that run or are about to branch off."""
        taken = [*self.running, *self.loading]
        return self.config.max_num_seqs - len(taken) - sum(seq.forks_pending for seq in taken)

    @property
    def loading(self) -> Iterable[Sequence]:
        """Sequences that own blocks, and will run when the content of these has come from the host."""
        return self.offloading.loading.values() if self.offloading else ()

    def may_hold_adapter(self, seq: Sequence) -> bool:
        """Whether workers can hold a sequence's adapter beside those of the sequences that run."""
        if seq.adapter is None:
            return True
        held = {each.adapter.digest for each in (*self.running, *self.loading) if each.adapter}
        return seq.adapter.digest in held or len(held) < self.config.max_loras

    # Starting and going on

    def start(self, step: Step, seq: Sequence, hit: PrefixHit, budget: int) -> None:
        """Admit a sequence: own the cached prefix, allocate its prefill, plan a first chunk of at most `budget` tokens.

        One that has blocks on the host begins to load these instead.
        """
        if self.offloading and (seq.host_tables is not None or hit.host):
            self._load(self.offloading, seq, hit)
            if step.shares:
                step.shares.holding(seq).add(seq)
            return
        self._share(seq, hit)
        num_tokens = self.admission.chunk(seq, budget)
        self.blocks.append(seq, num_tokens, None if self.admission.refills_compressed(seq) else seq.num_uncomputed)
        self._begin(step, seq, state_row=hit.state_row)
        step.prefill(seq, num_tokens, [])
        if step.shares:
            step.shares.holding(seq).add(seq)
            step.shares.charge_tokens(self.waiting.tenant(seq))

    def append(self, step: Step, seq: Sequence, num_tokens: int, num_blocks: int, draft: list[int]) -> None:
        """Put `num_tokens` of a running sequence into the plan, for which it needs `num_blocks` more.

        draft: the last ones of them, which it may turn out not to have.
        """
        new_blocks: list[list[int]] = []
        if num_blocks:
            new_blocks, copies = self.blocks.append(seq, num_tokens)
            step.plan.copies += copies
        if draft:
            step.verify(seq, draft, new_blocks)
        elif seq.is_decoding:
            step.decode(seq, new_blocks)
        else:
            step.prefill(seq, num_tokens, new_blocks)

    def _share(self, seq: Sequence, hit: PrefixHit) -> None:
        """Let a sequence that has nothing begin with cached blocks."""
        self.blocks.share(seq, hit)
        seq.advance(hit.num_blocks * self.config.block_size)
        seq.hashed_blocks = hit.num_blocks

    def _load(self, offloading: Offloading, seq: Sequence, hit: PrefixHit) -> None:
        """Own all blocks that a sequence needs to begin, and load what the host has of them."""
        if seq.host_tables is not None:
            offloading.load(seq, hit)
            return
        self._share(seq, hit)
        num_tokens = len(hit.host) * self.config.block_size
        self.blocks.append(seq, num_tokens)
        offloading.load(seq, hit)
        seq.advance(num_tokens)
        if not self.admission.refills_compressed(seq):
            self.blocks.append(seq, seq.num_uncomputed)

    def _begin(self, step: Step, seq: Sequence, *, resumed: bool = False, state_row: int | None = None) -> None:
        """Let a sequence run, with the blocks that it has. resumed: it goes on where it was."""
        insort(self.running, seq, key=lambda each: each.seq_id)
        if seq.is_new:
            self._count_admission(seq)
        if self.planner and not resumed:
            self.planner.started(step, seq)
        step.plan.new_seqs.append(
            SequenceStart(
                seq.seq_id,
                seq.token_ids[:],
                seq.prompt_length,
                seq.logical_length,
                seq.sampling,
                seq.seed,
                tables=[TableStart(table.dropped, table.blocks[:]) for table in seq.tables],
                state_row=state_row,
                adapter=seq.adapter,
            )
        )
        seq.known_tokens = seq.num_tokens

    def _count_admission(self, seq: Sequence) -> None:
        seq.admitted(time.monotonic(), seq.logical_length)
        self.stats.prompt_tokens += seq.prompt_length
        if self.config.shares_prefixes:
            self.stats.prefix_cache_queries += seq.num_tokens
            self.stats.prefix_cache_hits += seq.logical_length

    # Making way

    def preempt(self, step: Step, seq: Sequence) -> None:
        """Take everything from a running sequence. It comes back from the host, or is computed again."""
        if step.shares:
            step.shares.holding(seq).remove(seq)
        step.has_preempted = True
        self.stats.preemptions += 1
        starts, changed = step.withdraw(seq)
        # Alone it would come back with as many blocks, and find no room again: computed again, all is compressed.
        is_alone = self.running == [seq] and not self.loading
        self.running.remove(seq)
        if not starts:
            self._dropped_seq_ids.append(seq.seq_id)
        suspends = self.offloading is not None and not (changed or is_alone) and self.offloading.suspend(seq)
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

    # Branching off and ending

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

    def drop_forks(self, forks: list[Fork]) -> None:
        """Let workers drop the forks of a sequence that has ended since they were planned."""
        self._dropped_seq_ids += [fork.seq_id for fork in forks]

    def finish(self, seq: Sequence) -> None:
        """A sequence ends, whether it runs, loads its blocks or waits. The caller releases them."""
        if seq in self.running:
            self.running.remove(seq)
            self._dropped_seq_ids.append(seq.seq_id)
        if self.offloading:
            self.offloading.finish(seq)
