"""Which replicas make way for a request although they are full: those where others have more than their part."""

from __future__ import annotations

from collections import Counter

from kvllm.core.queue import FairQueue
from kvllm.core.sequence import Sequence


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
