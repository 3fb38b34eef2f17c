"""What replicas and the process that uses them tell each other."""

from __future__ import annotations

from msgspec import Struct

from kvllm.core.protocol import SampledToken
from kvllm.stats import EngineStats


class ReplicaSpec(Struct, frozen=True):
    """What a replica is told before it loads the model. num_ranks, placement, max_restarts: see RayExecutor.

    neighbours: replicas that share the memory of its node.
    """

    num_ranks: int
    placement: str
    max_restarts: int
    device: str
    num_threads: int
    neighbours: int


class ReplicaReady(Struct, frozen=True):
    """What a replica answers. available_memory: of each of its ranks, the least over all."""

    pid: int
    node: str
    available_memory: int


class Ended(Struct, array_like=True, frozen=True):
    """What a replica has counted of a sequence that has ended there. See Sequence."""

    seq_id: int
    preemptions: int
    evicted: int
    cache_hits: int


class Sampled(Struct, array_like=True, frozen=True):
    """What a step of a replica has yielded: tokens, each with the id of its sequence, and what ended with them."""

    tokens: list[tuple[int, SampledToken]]
    ended: list[Ended] = []


class Report(Struct, array_like=True):
    """What a replica says now and then, of all that has happened since its last report.

    room: free blocks, less what the waiting sequences are expected to need.
    busy: whether anything is left to do.
    progress: a number that changes as long as the replica advances; None if it watches its ranks itself.
    """

    steps: list[Sampled]
    stats: EngineStats
    room: int
    busy: bool = False
    progress: int | None = None
