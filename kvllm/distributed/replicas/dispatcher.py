"""The scheduler of an engine that is several: it queues sequences, hands them out and takes back their tokens."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct, structs

from kvllm.config import EngineConfig
from kvllm.core.protocol import SampledToken, SequenceStart
from kvllm.core.scheduler import Scheduler
from kvllm.core.sequence import Sequence
from kvllm.distributed.replicas.router import Router
from kvllm.stats import EngineStats


class Ended(Struct, array_like=True, frozen=True):
    """What an engine has counted of a sequence that has ended there. See Sequence."""

    seq_id: int
    preemptions: int
    evicted: int
    cache_hits: int


class Sampled(Struct, array_like=True, frozen=True):
    """What a step of an engine has yielded: tokens, each with the id of its sequence, and what ended with them."""

    tokens: list[tuple[int, SampledToken]]
    ended: list[Ended] = []


class Report(Struct, array_like=True):
    """What an engine says now and then, of all that has happened since its last report.

    room: free blocks, less what the waiting sequences are expected to need.
    busy: whether anything is left to do.
    progress: a number that changes as long as the engine advances; None if it sees to that itself.
    """

    steps: list[Sampled]
    stats: EngineStats
    room: int
    busy: bool = False
    progress: int | None = None


class Dispatcher(Scheduler):
    """A scheduler whose sequences run elsewhere, each in one of several engines, under the ids that they have here.

    Of the Scheduler, requests enter as always (`add`, `finish`); instead of `schedule` and `update` there are
    `dispatch`, `take` and `receive`.
    """

    def __init__(self, config: EngineConfig, stats: EngineStats, num_blocks: list[int]) -> None:
        """num_blocks: of the pool of each engine; of the smallest in `config`, for a request may come to any."""
        super().__init__(config, stats)
        self.spread = Router(
            num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            shares_prefixes=config.shares_prefixes,
        )
        self._placed: list[dict[int, Sequence]] = [{} for _ in num_blocks]
        self._unsent: list[dict[int, Sequence]] = [{} for _ in num_blocks]
        self._engine_of: dict[int, int] = {}

    def finish(self, seq: Sequence) -> None:
        """Drop a sequence that ended or was aborted, wherever it is."""
        if self.waiting.pop(seq.seq_id, None) is None:
            engine = self._engine_of.pop(seq.seq_id)
            del self._placed[engine][seq.seq_id]
            self._unsent[engine].pop(seq.seq_id, None)
            self.spread.finish(engine, 1 + seq.forks_pending)

    def engine_of(self, seq: Sequence) -> int | None:
        """The engine that knows of a sequence."""
        engine = self._engine_of.get(seq.seq_id)
        return None if engine is None or seq.seq_id in self._unsent[engine] else engine

    def dispatch(self) -> None:
        """Choose engines for what waits, in order, as long as there is room."""
        while self.waiting:
            seq = next(iter(self.waiting.values()))
            engine = self.spread.place(seq.token_ids, 1 + seq.forks_pending)
            if engine is None:
                return
            del self.waiting[seq.seq_id]
            self._place(engine, seq)
            self._unsent[engine][seq.seq_id] = seq

    def take(self, engine: int) -> list[SequenceStart] | None:
        """What to send to an engine. None: it has nothing to do."""
        if not self._placed[engine]:
            return None
        starts = [_start(seq) for seq in self._unsent[engine].values()]
        self._unsent[engine] = {}
        return starts

    def receive(self, engine: int, report: Report) -> Iterator[list[tuple[Sequence, SampledToken]]]:
        """Account for an engine's report. For each of its steps comes what `update` returns for one of ours; the caller
        ends what finished before it asks for the next."""
        self.spread.report(engine, report.room)
        for seq in self._unsent[engine].values():  # of which the engine did not know
            self.spread.promise(engine, seq.num_tokens, 1 + seq.forks_pending)
        for step in report.steps:
            yield self._receive_step(engine, step)

    def lose(self, engine: int) -> None:
        """An engine is lost: queue again, in front, what it had. The tokens so far are known."""
        lost, self._placed[engine], self._unsent[engine] = self._placed[engine], {}, {}
        for seq_id in sorted(lost, reverse=True):
            del self._engine_of[seq_id]
            self.waiting[seq_id] = lost[seq_id]
            self.waiting.move_to_end(seq_id, last=False)
        self.spread.lose(engine)

    def _receive_step(self, engine: int, step: Sampled) -> list[tuple[Sequence, SampledToken]]:
        placed = self._placed[engine]
        received = []
        for seq_id, token in step.tokens:
            if seq := placed.get(seq_id):  # else it was aborted
                if seq.forks_pending:
                    self._branch(engine, seq)
                seq.token_ids.append(token.token_id)
                received.append((seq, token))
        for ended in step.ended:
            if seq := placed.get(ended.seq_id):
                seq.preemptions += ended.preemptions
                seq.evicted += ended.evicted
                seq.cache_hits = max(seq.cache_hits, ended.cache_hits)
        return received

    def _place(self, engine: int, seq: Sequence) -> None:
        self._placed[engine][seq.seq_id] = seq
        self._engine_of[seq.seq_id] = engine

    def _branch(self, engine: int, parent: Sequence) -> None:
        """The prompt is computed: the engine has made the other completions."""
        for index, fork in enumerate(self._forks(parent), start=1):
            self._place(engine, parent.fork(fork.seq_id, index, fork.seed))
        parent.forks_pending = 0


def _start(seq: Sequence) -> SequenceStart:
    """With output, a sequence goes on alone. Otherwise the `n` completions of its request branch off from it."""
    sampling = structs.replace(seq.sampling, n=1) if seq.num_generated else seq.sampling
    return SequenceStart(seq.seq_id, seq.token_ids[:], seq.prompt_length, 0, sampling, seq.seed)
