"""Snapshots of an engine: blocks by kind add up, rows tell how far the sequences are."""

from __future__ import annotations

import time

import pytest

from kvllm import SamplingParams
from kvllm.core.engine import LLMEngine
from kvllm.core.snapshot import MOST_ROWS, EngineSnapshot
from kvllm.engine_args import EngineArgs
from kvllm.engine_builder import build_engine
from tests.helpers.compressions import other, paper_compression

KARA = paper_compression(method="kara", period=4, window_blocks=4, retain_blocks=1, buffer=4, chunk_budget=4)
LONG = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)


def make_engine(num_blocks: int = 400, **options) -> LLMEngine:
    defaults = {"block_size": 4, "num_gpu_blocks_override": num_blocks, "max_num_seqs": 8, "max_model_len": 512}
    engine = build_engine(EngineArgs(**(defaults | options)))
    assert isinstance(engine, LLMEngine)
    return engine


def snapshot(engine: LLMEngine) -> EngineSnapshot:
    found = engine.snapshot(time.monotonic())
    pool = found.pool
    assert pool.total == pool.prompt + pool.compressed + pool.tail + pool.reusable + pool.free
    assert pool.total - pool.reusable - pool.free == engine.scheduler.blocks.num_owned
    return found


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("compress_prompt", [False, True])
def test_blocks_of_all_kinds_add_up_at_every_step(n: int, compress_prompt: bool) -> None:
    engine = make_engine(compression=other(KARA, compress_prompt=compress_prompt))
    for number in range(3):
        engine.add_request(str(number), [5 + number] * 40, SamplingParams(max_tokens=100, seed=1, n=n, ignore_eos=True))
    saved = []
    while engine.has_unfinished_requests():
        engine.step()
        pool = snapshot(engine).pool
        assert pool.without_compression >= pool.total - pool.reusable - pool.free
        saved.append(pool.compressed)
    assert max(saved) > 0


def test_a_row_tells_how_far_a_sequence_is() -> None:
    engine = make_engine(compression=KARA)
    engine.add_request("a", [7] * 21, LONG, tenant="alice")
    for _ in range(101):
        engine.step()
    (row,) = snapshot(engine).rows
    (seq,) = engine.outputs.sequences("a")
    assert (row.id, row.tenant, row.state, row.prompt_tokens, row.output_tokens) == ("a", "alice", "running", 21, 101)
    assert row.tokens == 121 and row.blocks == len(seq.tables[0].blocks)
    assert row.windows > 0 and row.tokens - row.kept == 12 * row.windows == seq.evicted
    assert not engine.outputs.sequences("b")


def test_the_line_without_compression_is_what_an_engine_without_it_owns() -> None:
    compressed, whole = make_engine(compression=KARA), make_engine()
    for engine in (compressed, whole):
        engine.add_request("a", [7] * 21, LONG)
        for _ in range(150):
            engine.step()
    pool = snapshot(compressed).pool
    assert pool.without_compression == whole.scheduler.blocks.num_owned > compressed.scheduler.blocks.num_owned


def test_a_waiting_sequence_has_a_reason() -> None:
    for options, reason in (({"max_num_seqs": 2}, "a place: 2 sequences"), ({"num_blocks": 130}, "blocks: ")):
        engine = make_engine(**options)
        for number in range(4):
            engine.add_request(str(number), [7 + number] * 200, LONG, tenant=f"t{number % 2}")
        for _ in range(5):
            engine.step()
        found = snapshot(engine)
        assert found.running == 2 and found.waiting == 2 and found.waiting_for.startswith(reason)
        assert sum(found.waiting_of.values()) == 2
        assert [row.state for row in found.rows] == ["running", "running", "waiting", "waiting"]


def test_rows_are_bounded() -> None:
    engine = make_engine()
    for number in range(2 * MOST_ROWS):
        engine.add_request(str(number), [7], LONG)
    engine.step()
    found = snapshot(engine)
    assert len(found.rows) == MOST_ROWS and found.running == 8 and found.waiting == 2 * MOST_ROWS - 8
