"""Sequences that run in replicas: queued here, handed out, and given the tokens that come back."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator

from msgspec import structs

from kvllm.config import EngineConfig
from kvllm.core.compression_policy import check_fits, make_policy
from kvllm.core.protocol import PromptLogprobs, SampledToken, SequenceStart
from kvllm.core.sequence import Sequence, fork_seed
from kvllm.distributed.replicas.messages import Report, Sampled
from kvllm.distributed.replicas.router import Router


class Dispatcher:
    """Keeps the sequences that run elsewhere, each in one of several replicas, under the ids that they have here."""

    def __init__(self, config: EngineConfig, num_blocks: list[int]) -> None:
        """num_blocks: of the pool of each replica; of the smallest in `config`, for a request may come to any."""
        self.config = config
        self.num_blocks = num_blocks
        self._policy = make_policy(config)
        self.reset([])

    def reset(self, sequences: list[Sequence]) -> None:
        """Start over: all replicas are empty, and `sequences`, in order, wait."""
        self.waiting = OrderedDict((seq.seq_id, seq) for seq in sequences)
        self.router = Router(
            self.num_blocks,
            block_size=self.config.block_size,
            max_num_seqs=self.config.max_num_seqs,
            shares_prefixes=self.config.shares_prefixes,
        )
        self._placed: list[dict[int, Sequence]] = [{} for _ in self.num_blocks]
        self._unsent: list[dict[int, Sequence]] = [{} for _ in self.num_blocks]
        self._replica_of: dict[int, int] = {}

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises RequestError if no replica could finish it."""
        check_fits(self.config, self._policy, seq)
        self.waiting[seq.seq_id] = seq

    def finish(self, seq: Sequence) -> None:
        """Drop a sequence that ended or was aborted, wherever it is."""
        if self.waiting.pop(seq.seq_id, None) is None:
            replica = self._replica_of.pop(seq.seq_id)
            del self._placed[replica][seq.seq_id]
            self._unsent[replica].pop(seq.seq_id, None)
            self.router.finish(replica, 1 + seq.forks_pending)

    @property
    def placed(self) -> list[Sequence]:
        """Sequences that have a replica."""
        return [seq for of_replica in self._placed for seq in of_replica.values()]

    def replica_of(self, seq: Sequence) -> int | None:
        """The replica that was sent a sequence."""
        replica = self._replica_of.get(seq.seq_id)
        return None if replica is None or seq.seq_id in self._unsent[replica] else replica

    def sent(self, replica: int) -> list[int]:
        """Ids of the sequences that a replica was sent, and that have not ended."""
        return [seq_id for seq_id in self._placed[replica] if seq_id not in self._unsent[replica]]

    def dispatch(self) -> None:
        """Choose replicas for what waits, in order, as long as there is room."""
        while self.waiting:
            seq = next(iter(self.waiting.values()))
            replica = self.router.place(seq.token_ids, 1 + seq.forks_pending, seq.cache_salt)
            if replica is None:
                return
            del self.waiting[seq.seq_id]
            self._place(replica, seq)
            if seq.metrics.scheduled_time is None:
                seq.metrics.scheduled_time = time.monotonic()
            self._unsent[replica][seq.seq_id] = seq

    def take(self, replica: int) -> list[SequenceStart] | None:
        """The sequences to send to a replica, or None while it has nothing to do."""
        if not self._placed[replica]:
            return None
        starts = [_start(seq) for seq in self._unsent[replica].values()]
        self._unsent[replica] = {}
        return starts

    def receive(
        self, replica: int, report: Report
    ) -> Iterator[tuple[list[tuple[Sequence, SampledToken]], list[tuple[Sequence, PromptLogprobs]]]]:
        """Account for a replica's report. For each of its steps come the sequences with their tokens, and those with
        log probabilities of their prompts; the caller ends what finished before it asks for the next."""
        self.router.report(replica, report.room)
        for seq in self._unsent[replica].values():  # which the report cannot include
            self.router.promise(replica, seq.num_tokens, 1 + seq.forks_pending)
        for step in report.steps:
            placed = self._placed[replica]
            prompts = [(placed[prompt.seq_id], prompt) for prompt in step.prompts if prompt.seq_id in placed]
            yield self._receive_step(replica, step), prompts

    def lose(self, replica: int) -> None:
        """A replica is lost: queue again, in front, what it had. They keep their tokens."""
        lost, self._placed[replica], self._unsent[replica] = self._placed[replica], {}, {}
        for seq_id in sorted(lost, reverse=True):
            del self._replica_of[seq_id]
            self.waiting[seq_id] = lost[seq_id]
            self.waiting.move_to_end(seq_id, last=False)
        self.router.lose(replica)

    def _receive_step(self, replica: int, step: Sampled) -> list[tuple[Sequence, SampledToken]]:
        placed = self._placed[replica]
        received = []
        for seq_id, token in step.tokens:
            if seq := placed.get(seq_id):  # else it was aborted
                if seq.forks_pending:
                    self._branch(replica, seq)
                seq.token_ids.append(token.token_id)
                received.append((seq, token))
        for ended in step.ended:
            if seq := placed.get(ended.seq_id):
                seq.preemptions += ended.preemptions
                seq.evicted += ended.evicted
                seq.cache_hits = max(seq.cache_hits, ended.cache_hits)
                metrics = seq.metrics
                metrics.preemptions += ended.preemptions
                metrics.evicted_entries += ended.evicted
                metrics.missing_entries += ended.missing
                metrics.num_cached_tokens = max(metrics.num_cached_tokens, ended.cache_hits)
        return received

    def _place(self, replica: int, seq: Sequence) -> None:
        self._placed[replica][seq.seq_id] = seq
        self._replica_of[seq.seq_id] = replica

    def _branch(self, replica: int, parent: Sequence) -> None:
        """The prompt is computed: the replica has made the other completions."""
        for index in range(1, parent.forks_pending + 1):
            self._place(replica, parent.fork(parent.seq_id + index, index, fork_seed(parent.seed, index)))
        parent.forks_pending = 0


def _start(seq: Sequence) -> SequenceStart:
    """A sequence goes on alone, unless other completions of its request are still to branch off from it."""
    sampling = structs.replace(seq.sampling, n=1 + seq.forks_pending)
    return SequenceStart(seq.seq_id, seq.token_ids[:], seq.prompt_length, 0, sampling, seq.seed, seq.origin)
