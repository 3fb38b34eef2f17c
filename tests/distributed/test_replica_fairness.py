"""Fairness and snapshots over several replicas, in real Ray actors."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvllm import LLM, SamplingParams
from kvllm.core.snapshot import EngineSnapshot
from kvllm.core.spans import kept_spans
from kvllm.distributed.replicas.engine import DataParallelEngine
from kvllm.engine_args import DEFAULT_MODEL
from tests.helpers.compressions import paper_compression
from tests.helpers.engines import greedy

pytest.importorskip("ray", reason="needs ray: pip install ray")

pytestmark = pytest.mark.xdist_group("ray")

BLOCKS = 120
KARA = paper_compression(method="kara", period=4, window_blocks=4, retain_blocks=1, buffer=4, chunk_budget=4)
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def replicas(ray_cluster: None) -> Iterator[DataParallelEngine]:
    llm = LLM(
        DEFAULT_MODEL,
        data_parallel_size=2,
        block_size=4,
        num_gpu_blocks_override=BLOCKS,
        max_num_seqs=8,
        max_model_len=256,
        compression=KARA,
    )
    engine = llm.llm_engine
    assert isinstance(engine, DataParallelEngine)
    yield engine
    engine.close()


@pytest.fixture
def engine(replicas: DataParallelEngine) -> Iterator[DataParallelEngine]:
    """With nothing to do, before and after each test."""
    yield replicas
    abort_all(replicas)


def flood(engine: DataParallelEngine, count: int, tokens: int) -> None:
    """Long requests of one tenant, of which some run everywhere, and most wait here."""
    for i in range(count):
        engine.add_request(f"noisy {i}", {"prompt_token_ids": [5 + i % 60] * 30}, greedy(tokens), tenant="noisy")
    before = engine.stats.output_tokens
    while engine.stats.output_tokens < before + 100:
        engine.step()
    assert engine.dispatcher.waiting


def tokens_before(engine: DataParallelEngine, **origin) -> int:
    """Tokens of other requests until one that is added now has its first."""
    output = engine.add_request("quiet", {"prompt_token_ids": [7, 9] * 20}, SHORT, **origin)
    before = engine.stats.output_tokens
    while not output.outputs[0].token_ids:
        engine.step()
    return engine.stats.output_tokens - before


def abort_all(engine: DataParallelEngine) -> None:
    for request_id in list(engine.outputs.requests):
        engine.abort(request_id)


def test_a_quiet_tenant_comes_early_beside_a_flood(engine: DataParallelEngine) -> None:
    """Both replicas are full, and many requests wait for them."""
    found = {}
    for name, origin in {"in turn": {"tenant": "noisy"}, "quiet": {"tenant": "quiet"}}.items():
        flood(engine, 60, 80)
        found[name] = tokens_before(engine, **origin)
        abort_all(engine)
    assert found["in turn"] > 60 * 80 * 0.5, found
    assert found["quiet"] < found["in turn"] / 4, found


def test_two_tenants_share_all_replicas(engine: DataParallelEngine) -> None:
    """One has sent all of its requests before the other has sent its first."""
    flood(engine, 40, 120)
    outputs = [engine.outputs.requests[f"noisy {i}"].output for i in range(40)]
    for i in range(40):
        outputs.append(engine.add_request(f"b {i}", {"prompt_token_ids": [9] * 30}, greedy(120), tenant="b"))
    while sum(output.finished for output in outputs[40:]) < 20:
        engine.step()
    finished = sum(output.finished for output in outputs[:40])
    assert 10 <= finished <= 36, finished


def snapshot(engine: DataParallelEngine) -> EngineSnapshot:
    found = engine.snapshot(time.monotonic())
    pool = found.pool
    assert pool.total == 2 * BLOCKS == pool.prompt + pool.compressed + pool.tail + pool.reusable + pool.free
    return found


def test_a_snapshot_tells_of_all_replicas(engine: DataParallelEngine) -> None:
    outputs = {}
    for i in range(20):
        name = f"request {i}"
        outputs[name] = engine.add_request(name, {"prompt_token_ids": [5 + i] * 21}, greedy(200), tenant=f"t{i % 2}")
    kept, rows, compressed, most = {snapshot(engine).pool.compressed > 0}, [], 0, 0
    # Replicas take a snapshot a few times in a second, in which so many tokens may be done.
    while True not in kept or sum(len(output.outputs[0].token_ids) for output in outputs.values()) < 20 * 100:
        engine.step()
        found = snapshot(engine)
        kept.add(found.pool.compressed > 0)
        rows, most = found.rows, max(most, found.running)
        assert found.running + found.waiting == len(engine.outputs.requests) == len(rows)
        assert len({row.id for row in rows}) == len(rows) and {row.id for row in rows} <= set(outputs)
    assert kept == {False, True}
    computed = [row for row in rows if row.state == "running"]
    assert most > 8  # of more than one replica; later on, each has blocks for less than 8
    assert computed and all(row.blocks for row in computed)
    for row in computed:  # one that has just been computed again has lost no window yet
        assert (row.kept < row.tokens) == (row.windows > 0)
    for row in computed:
        assert row.tenant == f"t{int(row.id.split()[1]) % 2}" and row.prompt_tokens == 21
        assert row.output_tokens == len(outputs[row.id].outputs[0].token_ids)
        (seq,) = engine.outputs.sequences(row.id)
        spans = kept_spans(seq.compressions, engine.num_computed(seq))
        assert spans[-1].end == engine.num_computed(seq) == 20 + row.output_tokens
        compressed += any((span.end - span.start, span.kept) == (16, 4) for span in spans)
    assert compressed  # one that was preempted since has none
    engine.abort(computed[0].id)
    assert computed[0].id not in {row.id for row in snapshot(engine).rows}
    abort_all(engine)
    found = snapshot(engine)
    assert (found.running, found.waiting, found.rows) == (0, 0, [])
    assert found.pool.prompt == found.pool.tail == found.pool.compressed == 0 == engine.stats.blocks_in_use
