"""Who makes way when the pool has no block left."""

from __future__ import annotations

from kvllm.core.batch import Batch
from kvllm.core.compression_planner import CompressionPlanner
from kvllm.core.sequence import Sequence
from kvllm.core.step import Step


class Preemption:
    """Makes room for running sequences. In this order: a sequence that runs alone is compressed; one that loads its
    blocks from the host waits again; the youngest is preempted, of the tenant that is most above what it is entitled
    to. The oldest always advances."""

    def __init__(self, batch: Batch, planner: CompressionPlanner | None) -> None:
        self.batch = batch
        self.blocks = batch.blocks
        self.planner = planner

    def make_room(self, step: Step, seq: Sequence, num_tokens: int, order: list[Sequence], position: int) -> int:
        """Preempt until `seq` can grow by `num_tokens`. Returns by how many it can: 0 if it was preempted itself.

        The oldest is not preempted for those that were just started, and are in the plan: it grows as far as it can, or
        they would take turns for ever.
        order: of the step, with `seq` at `position`. Those before it are in the plan. Who is preempted leaves it.
        """
        running = self.batch.running
        while self.blocks.blocks_to_append(seq, num_tokens) > self.blocks.num_available:
            if running == [seq] and self.planner and self.planner.compress_complete(step, seq):
                continue
            if self.batch.cancel_load():
                continue
            victim = self._victim(step, order, position)
            if victim is running[0] and len(running) > 1 and num_tokens > 1:
                num_tokens -= 1
                continue
            self.batch.preempt(step, victim)
            if order is not running:
                order.remove(victim)
            if victim is seq:
                return 0
        return num_tokens

    def unblock(self, step: Step) -> None:
        """If all running sequences wait to be compressed, preempt from the youngest on until the oldest can be. Alone
        it shares no block, and is compressed in place."""
        plan, running = step.plan, self.batch.running
        if plan.num_seqs or plan.compressions or plan.choices or not running or self.planner is None:
            return
        while self.batch.cancel_load():
            pass
        while not self.planner.compress_complete(step, running[0]) and len(running) > 1:
            self.batch.preempt(step, running[-1])

    def _victim(self, step: Step, order: list[Sequence], position: int) -> Sequence:
        """The one to be preempted of those that are not in the plan: never the oldest while there are others."""
        running = self.batch.running
        if not step.shares:
            return running[-1]
        younger = [seq for seq in order[position:] if seq is not running[0]]
        return max(younger or order[position:], key=step.shares.rank)
