"""The state of a step while it is planned: the one object that all parts of the scheduler read and change."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field

from kvllm.core.protocol import Fork, PrefillChunk, StepPlan, Verification
from kvllm.core.sequence import PENDING, Sequence, fork_seed
from kvllm.core.shares import Shares


@dataclass(slots=True, eq=False)
class Step:
    """What the plan of a step has so far, and what is left to plan with.

    The scheduler makes one for each step and hands it to its parts, which keep nothing of it.

    plan: what the workers get.
    decoding, verifying, prefilling: the sequences of the plan's decodes, verifications and chunks, in its order.
    tokens: of the budget, those that are left. decode_tokens: of these, the part that compression leaves alone, one for
        each sequence that ran when the step began.
    shares: of the tenants; None if all unfinished sequences are alike.
    deferred: ids of running sequences that compute nothing, because they wait to be compressed first.
    blocked: whether one of these waits for blocks: others share its region, and the pool has no room for its survivors.
    has_preempted: whether a sequence was preempted.
    missing_blocks: that the first waiting sequence lacks; of the last step that looked, until this one does.
    """

    plan: StepPlan
    tokens: int
    missing_blocks: int
    decode_tokens: int = 0
    decoding: list[Sequence] = field(default_factory=list)
    verifying: list[Sequence] = field(default_factory=list)
    prefilling: list[Sequence] = field(default_factory=list)
    shares: Shares | None = None
    deferred: set[int] = field(default_factory=set)
    blocked: bool = False
    has_preempted: bool = False

    # Compression

    @property
    def compression_tokens(self) -> int:
        """Tokens that compression may still take."""
        return max(0, self.tokens - self.decode_tokens)

    def take_for_compression(self, tokens: int) -> None:
        """Account for query tokens of a compression. One that cannot wait may take more than there are, but none of
        the decodes'."""
        self.tokens -= min(tokens, self.compression_tokens)

    # Model inputs

    def candidates(self, running: Iterable[Sequence]) -> list[Sequence]:
        """The running sequences that are not in the plan."""
        planned = {seq_id for seq_id, _ in self.plan.query_tokens()}
        return [seq for seq in running if seq.seq_id not in planned]

    def decode(self, seq: Sequence, new_blocks: list[list[int]]) -> None:
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
        self.tokens -= 1

    def verify(self, seq: Sequence, draft: list[int], new_blocks: list[list[int]]) -> None:
        """Put the token that was sampled last into the plan, and a draft of those after it."""
        num_tokens = 1 + len(draft)
        if self.shares:
            self.shares.count(seq, num_tokens)
        self.plan.verifications.append(Verification(seq.seq_id, [seq.token_ids[-1], *draft], new_blocks))
        seq.known_tokens += 1
        self.verifying.append(seq)
        self.tokens -= num_tokens

    def prefill(self, seq: Sequence, num_tokens: int, new_blocks: list[list[int]]) -> None:
        """Put tokens that the workers have into the plan."""
        if self.shares:
            self.shares.count(seq, num_tokens)
        samples = num_tokens == seq.num_uncomputed
        forks = _forks(seq) if samples else []
        self.plan.chunks.append(PrefillChunk(seq.seq_id, num_tokens, new_blocks, samples, forks))
        self.prefilling.append(seq)
        self.tokens -= num_tokens

    @property
    def sampling(self) -> list[Sequence]:
        """The sequences that get a token or several, without forks that are made by the step."""
        prefilled = zip(self.prefilling, self.plan.chunks, strict=True)
        return [*self.decoding, *self.verifying, *(seq for seq, chunk in prefilled if chunk.samples)]

    # Changes of a plan that is made

    def withdraw(self, seq: Sequence) -> tuple[bool, bool]:
        """Take out what is planned for a running sequence that computes nothing in this step.

        Returns:
            Whether it was to start in this step; and whether a compression was planned, which counts as done in its
            tables and lengths, but will not be.
        """
        plan, seq_id = self.plan, seq.seq_id
        starts = any(start.seq_id == seq_id for start in plan.new_seqs)
        changed = any(each.seq_id == seq_id for each in (*plan.compressions, *plan.scored))
        plan.new_seqs = [start for start in plan.new_seqs if start.seq_id != seq_id]
        plan.compressions = [job for job in plan.compressions if job.seq_id != seq_id]
        plan.choices = [job for job in plan.choices if job.seq_id != seq_id]
        plan.scored = [start for start in plan.scored if start.seq_id != seq_id]
        return starts, changed

    def resolve(self, running: Sequences[Sequence]) -> None:
        """Give the plan the tokens that were still to be sampled when it was made."""
        self.plan.decodes.token_ids[:] = [seq.token_ids[-1] for seq in self.decoding]
        for start in self.plan.new_seqs:
            if start.token_ids[-1] == PENDING:  # it was preempted for this very plan
                start.token_ids[-1] = next(seq.token_ids[-1] for seq in running if seq.seq_id == start.seq_id)

    @property
    def restarts_pending(self) -> bool:
        """Whether a sequence that gets a token of the step in flight was preempted, and starts again in the plan."""
        return any(start.token_ids[-1] == PENDING for start in self.plan.new_seqs)


def _forks(seq: Sequence) -> list[Fork]:
    return [Fork(seq.seq_id + i, fork_seed(seq.seed, i)) for i in range(1, seq.forks_pending + 1)]
