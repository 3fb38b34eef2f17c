"""What tenants hold over several replicas, and what is known here of the sequences there: without tensors, in turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvllm.config import EngineConfig, TenantConfig
from kvllm.core.engine import LLMEngine
from kvllm.core.sequence import Sequence, ServiceClass
from kvllm.core.spans import kept_spans
from kvllm.distributed.replicas.dispatcher import Dispatcher
from kvllm.sampling_params import SamplingParams
from tests.helpers.compressions import paper_compression
from tests.helpers.literal_worker import LiteralWorker

pytest.importorskip("ray", reason="needs ray: pip install ray")
from kvllm.distributed.replicas.replica import Reporter

BLOCK = 4


class Replicas:
    """Engines behind one dispatcher, which exchange messages after every step."""

    def __init__(self, config: EngineConfig, count: int) -> None:
        self.dispatcher = Dispatcher(config, [config.num_blocks] * count)
        self.engines = [LLMEngine(config, LiteralWorker(config), vocab_size=100) for _ in range(count)]
        self.reporters = [Reporter(engine, Path()) for engine in self.engines]
        self.num_added = 0

    def add(self, prompt: list[int], max_tokens: int, tenant: str = "", priority: int = 0) -> Sequence:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        seq = Sequence(
            self.num_added,
            str(self.num_added),
            prompt,
            sampling,
            max_length=len(prompt) + max_tokens,
            service_class=ServiceClass(priority, tenant),
        )
        self.dispatcher.add(seq)
        self.num_added += 1
        return seq

    def step(self) -> None:
        self.dispatcher.dispatch()
        for i, (engine, reporter) in enumerate(zip(self.engines, self.reporters, strict=True)):
            starts = self.dispatcher.take(i)
            if starts is None:
                continue
            for start in starts:
                reporter._start(start, engine)
            engine.step()
            reporter._collect([])
            for sampled, _ in self.dispatcher.receive(i, reporter.report(0)):
                for seq, _ in sampled:
                    if seq.num_tokens == seq.max_length:
                        self.dispatcher.finish(seq)

    def running(self) -> list[set[int]]:
        """Ids of the sequences that run in each replica."""
        return [{int(seq.request_id) for seq in engine.scheduler.running} for engine in self.engines]

    def blocks(self) -> list[Counter[str]]:
        """Blocks of each tenant, in each replica."""
        found: list[Counter[str]] = [Counter() for _ in self.engines]
        for held, engine in zip(found, self.engines, strict=True):
            for seq in engine.scheduler.running:
                held[seq.tenant] += seq.num_blocks
        return found


@contextmanager
def replicas(config: EngineConfig, count: int = 2) -> Iterator[Replicas]:
    found = Replicas(config, count)
    try:
        yield found
    finally:
        for reporter in found.reporters:
            reporter._loop.stop()


def config_of(num_blocks: int, **options) -> EngineConfig:
    defaults = {"max_model_len": 256, "block_size": BLOCK, "max_num_seqs": 16, "max_num_batched_tokens": 256}
    return EngineConfig(num_blocks=num_blocks, **(defaults | options))


@pytest.mark.parametrize("beginning", [pytest.param("of its own", marks=pytest.mark.long), "the same"])
def test_a_guaranteed_share_is_had_of_all_pools_together(beginning: str) -> None:
    """Another tenant of the same weight has filled both replicas, and sends more than they can ever serve. Long and
    short requests alternate, so that they would be divided badly if only their number counted."""
    share = 0.6
    tenants = {"sure": TenantConfig(guaranteed_share=share)}
    with replicas(config_of(200, tenants=tenants)) as found:
        for i in range(300):
            found.add([1 + i] * 12, 40 + i % 17, "noisy")
        for _ in range(30):
            found.step()
        assert sum(held["noisy"] for held in found.blocks()) > 340
        for i in range(100):
            prompt = [90] * 8 if beginning == "the same" else [81 + i % 10, i] * 4
            found.add(prompt + [i] * (1 if i % 2 else 72), 40 + i % 17, "sure")
        for _ in range(20):
            found.step()
        held = []
        for _ in range(50):
            found.step()
            held.append([blocks["sure"] for blocks in found.blocks()])
        mean = [sum(of_replica) / len(held) for of_replica in zip(*held, strict=True)]
        assert min(mean) > share * 200, mean


def test_a_priority_is_next_in_its_replica() -> None:
    """Both replicas are full, and requests of the same tenant wait in them and here."""
    with replicas(config_of(400, max_num_seqs=8)) as found:
        for i in range(60):
            found.add([1 + i] * 12, 20 + 7 * (i % 9))
        for _ in range(10):
            found.step()
        assert all(engine.scheduler.waiting for engine in found.engines) and found.dispatcher.waiting
        begun = found.running()
        first = found.add([70] * 12, 20, priority=-1)
        while not first.num_generated:
            found.step()
            replica = found.dispatcher.replica_of(first)
            assert replica is not None
            assert found.running()[replica] <= begun[replica] | {first.seq_id}
        while found.dispatcher.placed:
            found.step()


def test_compressions_of_replicas_are_known_here() -> None:
    """Those of running sequences are as they are there, also after preemptions."""
    compression = paper_compression(method="kara", period=4, window_blocks=4, retain_blocks=1, buffer=4, chunk_budget=4)
    with replicas(config_of(60, compression=compression)) as found:
        added = [found.add([1 + i] * 20, 150) for i in range(12)]
        compared = 0
        while found.dispatcher.placed or found.dispatcher.waiting:
            found.step()
            here = {seq.seq_id: seq for seq in found.dispatcher.placed}
            for engine in found.engines:
                waiting = {int(seq.request_id): seq for seq in engine.scheduler.waiting.values()}
                for seq in [*engine.scheduler.running, *waiting.values()]:
                    known = here[int(seq.request_id)]
                    assert known.compressions == seq.compressions
                    if seq.compressions and not seq.is_prefilling:
                        spans = kept_spans(known.compressions, known.num_tokens - 1)
                        assert sum(span.kept for span in spans) == seq.cached_length
                        compared += 1
        preemptions = sum(seq.preemptions for seq in added)
        assert compared > 300 and preemptions > 0, (compared, preemptions)
