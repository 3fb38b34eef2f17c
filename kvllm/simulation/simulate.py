"""The real scheduler, block manager and compression policy over a workload, on a simulated clock.

The scheduler is driven without `LLMEngine`, which checks every prompt token and keeps every output: here tokens have no
content, so the prefix cache is off.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator
from collections.abc import Sequence as Sequences
from contextlib import contextmanager
from itertools import accumulate

import msgspec
from msgspec import Struct

from kvllm.config import CompressionConfig, EngineConfig
from kvllm.core.capacity import check_pool
from kvllm.core.protocol import SampledToken
from kvllm.core.sequence import Sequence, ServiceClass
from kvllm.simulation.cost import CostModel
from kvllm.simulation.executor import SimulatedSeconds
from kvllm.simulation.machine import SimulatedMachine, new_sequence
from kvllm.simulation.workload import Lengths


class Distribution(Struct, frozen=True):
    """Median, 99th percentile (nearest rank) and maximum of some numbers; 0 of none."""

    p50: float = 0.0
    p99: float = 0.0
    most: float = 0.0

    @staticmethod
    def of(counts: Counter[float]) -> Distribution:
        """counts: how often there is each number."""
        if not counts:
            return Distribution()
        values = sorted(counts)
        ends = list(accumulate(counts[value] for value in values))
        p50, p99 = (values[bisect_left(ends, share * ends[-1])] for share in (0.5, 0.99))
        return Distribution(p50, p99, values[-1])


class Outcome(Struct, kw_only=True):
    """One simulated run. Concurrency is sequences in a step, as in EngineStats.

    seconds: from the first arrival to the end of the last request; `phases` leaves out when there was nothing to do.
    mean_latency, mean_first_token: seconds from a request's arrival to its last, and to its first token.
    inter_token: seconds from a token of a request to its next.
    first_tokens: the seconds to the first token of each request. preempted: how often each was preempted.
    swapped_out: preempted sequences whose blocks went to the host; tokens_recomputed are of the others.
    stored_bytes, loaded_bytes: of blocks that went to the host, and that came back.
    recalls: how often a sequence's queries scored what it had dropped. recalled_bytes: of KV pairs that came back then,
    and of those that made way, each counted once. lost_pairs: that were dropped and found no room, in each layer.
    host_bytes: the most host memory in use at once. All bytes are those of all devices.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    phases: SimulatedSeconds
    mean_latency: float
    mean_first_token: float
    inter_token: Distribution
    steps: int
    mean_concurrency: float
    peak_concurrency: int
    preemptions: int
    tokens_recomputed: int
    compression_events: int
    windows_compressed: int
    entries_evicted: int
    blocks_released: int
    peak_blocks: int
    num_blocks: int
    first_tokens: list[float]
    preempted: list[int]
    swapped_out: int
    stored_bytes: int
    loaded_bytes: int
    recalls: int
    recalled_bytes: int
    lost_pairs: int
    host_bytes: int

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.seconds

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds


def simulate(
    config: EngineConfig,
    cost: CostModel,
    lengths: Sequences[Lengths],
    arrivals: Sequences[float],
    tenants: Sequences[str] | None = None,
    recalled_pairs: float | None = None,
) -> Outcome:
    """Serve requests of these lengths, arriving at these times (seconds, ascending), of these tenants.

    recalled_pairs: KV pairs that come back at a recall, in each layer and KV head. None: as many as `recall_chunks`
        allows.

    Raises ConfigError if a sequence of `max_model_len` does not fit the pool, RequestError if a request does not.
    """
    config = msgspec.structs.replace(config, enable_prefix_caching=False)
    check_pool(config)
    with no_garbage_collection():
        return _Simulation(config, cost, lengths, arrivals, tenants or [""] * len(lengths), recalled_pairs).run()


class _Simulation:
    def __init__(
        self,
        config: EngineConfig,
        cost: CostModel,
        lengths: Sequences[Lengths],
        arrivals: Sequences[float],
        tenants: Sequences[str],
        recalled_pairs: float | None,
    ) -> None:
        self.config = config
        self.cost = cost
        self.lengths = lengths
        self.arrivals = arrivals
        self.machine = SimulatedMachine(config, cost, recalled_pairs)
        self.service_classes = {tenant: ServiceClass(tenant=tenant) for tenant in tenants}
        self.coming = {tenant: deque[int]() for tenant in tenants}
        for index, tenant in enumerate(tenants):
            self.coming[tenant].append(index)
        self.left = len(lengths)  # requests that have not arrived
        self.now = arrivals[0]
        self.output_tokens = 0
        self.latency = 0.0
        self.first_tokens = [0.0] * len(lengths)
        self.last_tokens = [0.0] * len(lengths)  # when each request got its last token
        self.inter_token = Counter[float]()  # how often so many seconds lie between two
        self.preempted = [0] * len(lengths)
        self.peak_host_blocks = 0

    def run(self) -> Outcome:
        while self.left or self.machine.has_work:
            if not self.machine.has_work:
                self.now = max(self.now, min(self.arrivals[coming[0]] for coming in self.coming.values() if coming))
            self._add_arrived()
            self.now += self.machine.begin_step()
            self._receive(self.machine.end_step())
        return self._outcome()

    def _add_arrived(self) -> None:
        """Queue what has arrived; of each tenant no more than a step can admit, so that few prompts are in memory at a
        time."""
        for tenant, coming in self.coming.items():
            while coming and self.arrivals[coming[0]] <= self.now:
                if self.machine.scheduler.waiting.num_waiting(tenant) >= self.config.max_num_seqs:
                    break
                self.left -= 1
                self._add(coming.popleft(), self.service_classes[tenant])

    def _add(self, index: int, service_class: ServiceClass) -> None:
        lengths = self.lengths[index]
        self.machine.add(new_sequence(self.config, index, [0] * lengths[0], lengths, service_class))

    def _receive(self, sampled: Sequences[tuple[Sequence, SampledToken]]) -> None:
        """Account for the tokens of a step."""
        self.output_tokens += len(sampled)
        self.peak_host_blocks = max(self.peak_host_blocks, self.machine.stats.host_blocks_in_use)
        for seq, _ in sampled:
            num_tokens = len(seq.token_ids)
            if num_tokens == seq.prompt_length + 1:
                self.first_tokens[seq.seq_id] = self.now - self.arrivals[seq.seq_id]
            else:
                self.inter_token[self.now - self.last_tokens[seq.seq_id]] += 1
            self.last_tokens[seq.seq_id] = self.now
            if num_tokens == seq.max_length:
                self.latency += self.now - self.arrivals[seq.seq_id]
                self.preempted[seq.seq_id] = seq.preemptions

    def _outcome(self) -> Outcome:
        stats, executor = self.machine.stats, self.machine.executor
        running = [running for running, _ in stats.timeline]
        recall, devices = executor.recall, self.cost.devices
        block_bytes = devices * self.cost.host_block_bytes(self.config)
        host_bytes = block_bytes * self.peak_host_blocks
        if recall:
            host_bytes += devices * recall.peak_chunks * self.cost.host_chunk_bytes(self.config)
        return Outcome(
            requests=len(self.lengths),
            prompt_tokens=sum(prompt for prompt, _ in self.lengths),
            output_tokens=self.output_tokens,
            seconds=self.now - self.arrivals[0],
            phases=executor.seconds,
            mean_latency=self.latency / len(self.lengths),
            mean_first_token=sum(self.first_tokens) / len(self.lengths),
            inter_token=Distribution.of(self.inter_token),
            steps=stats.steps,
            mean_concurrency=sum(running) / len(running),
            peak_concurrency=max(running),
            preemptions=stats.preemptions,
            tokens_recomputed=stats.tokens_recomputed,
            compression_events=stats.compression_events,
            windows_compressed=stats.windows_compressed,
            entries_evicted=stats.entries_evicted,
            blocks_released=stats.blocks_released,
            peak_blocks=stats.peak_blocks,
            num_blocks=stats.num_blocks,
            first_tokens=self.first_tokens,
            preempted=self.preempted,
            swapped_out=stats.swapped_out,
            stored_bytes=block_bytes * stats.blocks_stored,
            loaded_bytes=block_bytes * stats.blocks_loaded,
            recalls=recall.recalls if recall else 0,
            recalled_bytes=round(recall.recalled * self._exchange_bytes(recall.config)) if recall else 0,
            lost_pairs=recall.lost if recall else 0,
            host_bytes=host_bytes,
        )

    def _exchange_bytes(self, compression: CompressionConfig) -> int:
        """Bytes of a KV pair that comes back and of one that makes way, in all layers."""
        both = self.cost.kv_pair_bytes + self.cost.pair_bytes(compression.recall_dtype)
        return self.cost.devices * self.machine.executor.layers * both


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Plans are made of many small objects and no cycles: the collector would walk them again and again for nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
