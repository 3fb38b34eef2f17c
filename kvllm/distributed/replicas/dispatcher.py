"""Sequences that run in replicas: queued here, handed out, and given the tokens that come back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from msgspec import structs

from kvllm.config import EngineConfig
from kvllm.core.capacity import longest_alone
from kvllm.core.policies import make_policy
from kvllm.core.protocol import PromptLogprobs, SampledToken, SequenceStart
from kvllm.core.queue import LOOKAHEAD, FairQueue, Tenant
from kvllm.core.sequence import Sequence, fork_seed
from kvllm.distributed.replicas.messages import Report, Sampled
from kvllm.distributed.replicas.router import Router

FAILED = SampledToken(0, error="another completion of the request has failed")
"""In place of a first token that a replica does not report, because one of the same step has ended the request."""


class Dispatcher:
    """Keeps the sequences that run elsewhere, each in one of several replicas, under the ids that they have here.

    Those that wait are handed out in the order of the same fair queue that each replica has. What a tenant has had
    counts over all replicas.
    """

    def __init__(self, config: EngineConfig, num_blocks: list[int], routing: str = "both") -> None:
        """num_blocks: of the pool of each replica; of the smallest in `config`, for a request may come to any.
        routing: see Router."""
        self.config = config
        self.routing = routing
        self.num_blocks = num_blocks
        self._policy = make_policy(config)
        self.reset([])

    def reset(self, sequences: list[Sequence]) -> None:
        """Start over: all replicas are empty, and `sequences`, in order, wait."""
        self.waiting = FairQueue(self.config.tenants)
        for seq in sequences:
            self.waiting.add(seq)
        self.router = Router(
            self.num_blocks,
            block_size=self.config.block_size,
            max_num_seqs=self.config.max_num_seqs,
            shares_prefixes=self.config.shares_prefixes,
            routing=self.routing,
        )
        self.crowding = Crowding(self.waiting, len(self.num_blocks), self.config.max_num_seqs)
        self._prepaid: dict[int, int] = {}  # by sequence without a first token: what it will be charged for its prompt
        self._placed: list[dict[int, Sequence]] = [{} for _ in self.num_blocks]
        self._unsent: list[dict[int, Sequence]] = [{} for _ in self.num_blocks]
        self._replica_of: dict[int, int] = {}

    def longest_of(self, seq: Sequence) -> int:
        """See `longest_alone`."""
        return longest_alone(self.config, self._policy, seq)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence that `longest_of` has not refused."""
        self.waiting.add(seq)

    def finish(self, seq: Sequence) -> None:
        """Drop a sequence that ended or was aborted, wherever it is."""
        self._repay(seq)
        if not self.waiting.finish(seq):
            replica = self._replica_of.pop(seq.seq_id)
            del self._placed[replica][seq.seq_id]
            self._unsent[replica].pop(seq.seq_id, None)
            self.router.finish(replica, 1 + seq.forks_pending)
            self.crowding.remove(replica, seq)
            if not self._placed[replica]:  # after an abort it is not asked for a report
                self.router.report(replica, self.num_blocks[replica])

    @property
    def placed(self) -> list[Sequence]:
        """Sequences that have a replica."""
        return [seq for of_replica in self._placed for seq in of_replica.values()]

    def is_in_use(self, replica: int) -> bool:
        """Whether a replica has sequences."""
        return bool(self._placed[replica])

    def replica_of(self, seq: Sequence) -> int | None:
        """The replica that was sent a sequence."""
        replica = self._replica_of.get(seq.seq_id)
        return None if replica is None or seq.seq_id in self._unsent[replica] else replica

    def sent(self, replica: int) -> list[int]:
        """Ids of the sequences that a replica was sent, and that have not ended."""
        return [seq_id for seq_id in self._placed[replica] if seq_id not in self._unsent[replica]]

    def dispatch(self) -> None:
        """Choose replicas for what waits, in the order of the queue, as long as they take it."""
        while found := self._next():
            tenant, replicas = found
            seq = self.waiting.take(tenant)
            replica = self.router.place(seq.token_ids, 1 + seq.forks_pending, seq.extra_keys, replicas)
            assert replica is not None
            self._place(replica, seq)
            if seq.metrics.scheduled_time is None:
                seq.metrics.scheduled_time = time.monotonic()
            self._unsent[replica][seq.seq_id] = seq
            self._prepay(seq)

    def _next(self) -> tuple[Tenant, list[int]] | None:
        """The tenant whose first sequence is next, and the replicas that take it."""
        replicas = self.router.open_replicas()
        for tenant in self.waiting.first(LOOKAHEAD):
            if replicas:
                return tenant, replicas
            making_way = self.crowding.making_way(self.waiting.head(tenant))
            if takers := [i for i in making_way if i not in self.router.lost]:
                return tenant, takers
        return None

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
        self._charge(report.costs)
        self.router.report(replica, report.room)
        for seq in self._unsent[replica].values():  # which the report cannot include
            self.router.promise(replica, seq.num_tokens, 1 + seq.forks_pending)
        for step in report.steps:
            placed = self._placed[replica]
            prompts = [(placed[prompt.seq_id], prompt) for prompt in step.prompts if prompt.seq_id in placed]
            yield self._receive_step(replica, step), prompts
        for compressed in report.compressed:
            if seq := self._placed[replica].get(compressed.seq_id):  # else it has ended
                seq.compressions[compressed.known :] = compressed.regions

    def lose(self, replica: int) -> None:
        """A replica is lost: queue again what it had. They keep their tokens, and come before what is younger."""
        lost, self._placed[replica], self._unsent[replica] = self._placed[replica], {}, {}
        for seq_id in sorted(lost):
            del self._replica_of[seq_id]
            lost[seq_id].compressions.clear()
            self._repay(lost[seq_id])
            self.waiting.requeue(lost[seq_id])
        self.router.lose(replica)
        self.crowding.clear(replica)

    # What tenants had

    def _charge(self, costs: dict[str, float]) -> None:
        """Account for what tenants had in a replica. Those of them that have ended all meanwhile owe nothing."""
        for name, cost in costs.items():
            if tenant := self.waiting.find(name):
                self.waiting.charge(tenant, cost)
        self.waiting.advance({seq.tenant: self.waiting.tenant(seq) for seq in self.placed}.values())

    def _prepay(self, seq: Sequence) -> None:
        """Charge a prompt until its replica does, so that one tenant's do not go out all at once."""
        self._prepaid[seq.seq_id] = seq.num_tokens
        self.waiting.charge(self.waiting.tenant(seq), seq.num_tokens)

    def _repay(self, seq: Sequence) -> None:
        if tokens := self._prepaid.pop(seq.seq_id, 0):
            self.waiting.charge(self.waiting.tenant(seq), -tokens)

    # Reports

    def _receive_step(self, replica: int, step: Sampled) -> list[tuple[Sequence, SampledToken]]:
        placed = self._placed[replica]
        received: list[tuple[Sequence, SampledToken]] = []
        branched: list[Sequence] = []
        for seq_id, token in step.tokens:
            if seq := placed.get(seq_id):  # else it was aborted
                self._repay(seq)
                if seq.forks_pending:
                    branched += self._branch(replica, seq)
                seq.token_ids.append(token.token_id)
                received.append((seq, token))
        if branched:
            sampled = {seq_id for seq_id, _ in step.tokens}
            received += [(seq, FAILED) for seq in branched if seq.seq_id not in sampled]
        for ended in step.ended:
            if seq := placed.get(ended.seq_id):
                seq.preemptions += ended.preemptions
                seq.evicted += ended.evicted
                seq.cache_hits = max(seq.cache_hits, ended.cache_hits)
                metrics = seq.metrics
                metrics.preemptions += ended.preemptions
                metrics.windows_compressed += ended.windows_compressed
                metrics.evicted_entries += ended.evicted
                metrics.missing_entries += ended.missing
                metrics.num_cached_tokens = max(metrics.num_cached_tokens, ended.cache_hits)
        return received

    def _place(self, replica: int, seq: Sequence) -> None:
        self._placed[replica][seq.seq_id] = seq
        self._replica_of[seq.seq_id] = replica
        self.crowding.add(replica, seq)

    def _branch(self, replica: int, parent: Sequence) -> list[Sequence]:
        """The prompt is computed: the replica has made the other completions."""
        self.crowding.remove(replica, parent)
        children = []
        for index in range(1, parent.forks_pending + 1):
            child = parent.fork(parent.seq_id + index, index, fork_seed(parent.seed, index))
            self.waiting.fork(child)
            self._place(replica, child)
            children.append(child)
        parent.forks_pending = 0
        self.crowding.add(replica, parent)
        return children


def _start(seq: Sequence) -> SequenceStart:
    """A sequence goes on alone, unless other completions of its request are still to branch off from it."""
    sampling = structs.replace(seq.sampling, n=1 + seq.forks_pending)
    return SequenceStart(seq.seq_id, seq.token_ids[:], seq.prompt_length, 0, sampling, seq.seed, seq.service_class)


class Crowding:
    """Counts the sequences that each replica was given, by tenant and priority.

    A replica without room still takes a sequence of a tenant that has less than its part of it, or of a higher priority
    than what its tenant has there: its own scheduler lets others make way. How many blocks a tenant may hold is left to
    that scheduler, too: a guaranteed share is that of the pool of each replica.
    """

    def __init__(self, queue: FairQueue, num_replicas: int, max_num_seqs: int) -> None:
        self._queue = queue
        self._max_num_seqs = max_num_seqs
        self._placed: list[Counter[tuple[str, int]]] = [Counter() for _ in range(num_replicas)]

    def add(self, replica: int, seq: Sequence) -> None:
        self._placed[replica][seq.tenant, seq.priority] += 1 + seq.forks_pending

    def remove(self, replica: int, seq: Sequence) -> None:
        placed, key = self._placed[replica], (seq.tenant, seq.priority)
        placed[key] -= 1 + seq.forks_pending
        if not placed[key]:
            del placed[key]

    def clear(self, replica: int) -> None:
        self._placed[replica].clear()

    def making_way(self, seq: Sequence) -> list[int]:
        """The replicas that take a waiting sequence: of those that do, the ones where its tenant has least."""
        ahead = [self._ahead(placed, seq) for placed in self._placed]
        takers = [i for i, count in enumerate(ahead) if self._makes_way(self._placed[i].total(), count, seq)]
        least = min((ahead[i] for i in takers), default=0)
        return [i for i in takers if ahead[i] == least]

    @staticmethod
    def _ahead(placed: Counter[tuple[str, int]], seq: Sequence) -> int:
        """Sequences of the same tenant in a replica that do not come after `seq`."""
        return sum(
            count for (name, priority), count in placed.items() if name == seq.tenant and priority <= seq.priority
        )

    def _makes_way(self, total: int, ahead: int, seq: Sequence) -> bool:
        """total: sequences in a replica. ahead: see `_ahead`."""
        if ahead == total:  # there is nobody to make way
            return False
        more = 1 + seq.forks_pending
        part = self._queue.part(self._queue.tenant(seq))
        return not ahead or ahead + more <= part * min(self._max_num_seqs, total + more)
