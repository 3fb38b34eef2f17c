"""Messages between replicas and the process that uses them."""

from __future__ import annotations

from msgspec import Struct

from kvllm.core.protocol import PromptLogprobs, SampledToken
from kvllm.core.regions import Region
from kvllm.core.snapshot import EngineSnapshot
from kvllm.stats import EngineStats

REPORT_SECONDS = 0.05
"""A replica at work reports so often: its steps never wait for it."""


class ReplicaSpec(Struct, frozen=True):
    """The first message to a replica, before it loads the model.

    max_restarts: of its ranks, if it has several. neighbours: replicas that share the memory of its node.
    """

    max_restarts: int
    num_threads: int
    neighbours: int


class ReplicaReady(Struct, frozen=True):
    """The answer to a ReplicaSpec. available_memory: of each of its ranks, the least over all."""

    pid: int
    node: str
    available_memory: int


class Ended(Struct, array_like=True, frozen=True):
    """Counts of a sequence that has ended in a replica. See Sequence."""

    seq_id: int
    preemptions: int
    windows_compressed: int
    evicted: int
    cache_hits: int
    missing: int


class Sampled(Struct, array_like=True, frozen=True):
    """Tokens of one step of a replica, each with the id of its sequence, the sequences that ended with them, and log
    probabilities of prompts."""

    tokens: list[tuple[int, SampledToken]]
    ended: list[Ended] = []
    prompts: list[PromptLogprobs] = []


class Compressed(Struct, array_like=True, frozen=True):
    """What is new of a sequence's compressions: `regions` follow on the first `known` ones, all in the form of
    `Sequence.compressions`."""

    seq_id: int
    known: int
    regions: list[Region]


class Report(Struct, array_like=True):
    """All that has happened in a replica since its last report.

    room: free blocks, less what the waiting sequences are expected to need.
    busy: whether anything is left to do.
    costs: what tenants were charged in its fair queue, by name.
    compressed: the sequences whose compressions have changed.
    snapshot: of the engine, a fraction of a second old at most; None if there is no newer one than in the last report.
    progress: a number that changes as long as the replica advances; None if it watches its ranks itself.
    """

    steps: list[Sampled]
    stats: EngineStats
    room: int
    busy: bool = False
    progress: int | None = None
    costs: dict[str, float] = {}
    compressed: list[Compressed] = []
    snapshot: EngineSnapshot | None = None
