"""The state of several replicas as that of one engine, from what each has reported last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from msgspec import structs

from kvllm.core.request import Request
from kvllm.core.sequence import Sequence
from kvllm.core.snapshot import MOST_ROWS, EngineSnapshot, PoolUse, SequenceRow, counters, make_row
from kvllm.distributed.replicas.dispatcher import Dispatcher
from kvllm.stats import EngineStats


class Snapshots:
    """The last snapshot of each replica. One that has not reported yet, or was lost, has an empty pool.

    num_blocks: of the pool of each.
    """

    def __init__(self, num_blocks: list[int]) -> None:
        self._of_replica = [_empty(blocks) for blocks in num_blocks]

    def receive(self, replica: int, snapshot: EngineSnapshot | None) -> None:
        """None: there is no newer one."""
        if snapshot is not None:
            self._of_replica[replica] = snapshot

    def lose(self, replica: int) -> None:
        self._of_replica[replica] = _empty(self._of_replica[replica].pool.total)

    def rest(self, replica: int) -> None:
        """A replica has lost its last sequences to an abort, after which it reports nothing."""
        known = self._of_replica[replica]
        if known.running or known.waiting:
            self._of_replica[replica] = _at_rest(known.pool)

    def merge(
        self, dispatcher: Dispatcher, requests: Mapping[str, Request], stats: EngineStats, now: float
    ) -> EngineSnapshot:
        """See `LLMEngine.snapshot`. requests: by their ids. stats: of all replicas."""
        placed = {seq.seq_id: seq for seq in dispatcher.placed}
        waiting = sorted(dispatcher.waiting.values(), key=lambda seq: seq.seq_id)
        num_placed = len(placed)
        waiting_there = min(num_placed, sum(each.waiting for each in self._of_replica))  # or some have ended since
        rows = self._rows(placed, requests, now)
        for seq in [*placed.values(), *waiting][: MOST_ROWS - len(rows)]:
            rows.append(make_row(seq, requests[seq.request_id], now, "waiting"))
        waiting_of = Counter(seq.tenant for seq in waiting)
        for each in self._of_replica:
            waiting_of.update(each.waiting_of)
        reasons = [each.waiting_for for each in self._of_replica if each.waiting_for]
        return EngineSnapshot(
            _sum([each.pool for each in self._of_replica]),
            counters(stats),
            num_placed - waiting_there,
            len(waiting) + waiting_there,
            "a replica with room for it" if waiting else next(iter(reasons), ""),
            dict(waiting_of),
            rows,
        )

    def _rows(self, placed: dict[int, Sequence], requests: Mapping[str, Request], now: float) -> list[SequenceRow]:
        """Rows of the sequences that replicas know, which are taken out of `placed`."""
        rows = []
        for each in self._of_replica:
            for row in each.rows:
                seq = placed.pop(int(row.id) + row.index, None)  # their ids here, see Reporter
                if seq is not None:  # else it has ended meanwhile
                    rows.append(_here(row, make_row(seq, requests[seq.request_id], now, row.state)))
        rows.sort(key=lambda row: (row.state == "waiting", -row.blocks))
        return rows[:MOST_ROWS]


def _here(there: SequenceRow, here: SequenceRow) -> SequenceRow:
    """What a replica tells of its cache, and what is known here of the request."""
    return structs.replace(
        here,
        blocks=there.blocks,
        tokens=there.tokens,
        kept=there.kept,
        windows=there.windows,
        preemptions=here.preemptions + there.preemptions,
        cached_tokens=max(here.cached_tokens, there.cached_tokens),
    )


def _empty(num_blocks: int) -> EngineSnapshot:
    return _of_pool(PoolUse(num_blocks, free=num_blocks))


def _at_rest(pool: PoolUse) -> EngineSnapshot:
    """Sequences own nothing any more. How much of what they had is reusable, the next report tells."""
    return _of_pool(PoolUse(pool.total, reusable=pool.reusable, free=pool.total - pool.reusable))


def _of_pool(pool: PoolUse) -> EngineSnapshot:
    return EngineSnapshot(pool, EngineStats(pool.total), 0, 0, "", {}, [])


def _sum(pools: list[PoolUse]) -> PoolUse:
    return PoolUse(**{name: sum(getattr(pool, name) for pool in pools) for name in PoolUse.__struct_fields__})
