"""The simulator: its roofline against figures worked out by hand, its plans against those of the real engine."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections import Counter

import msgspec
import pytest
import torch

from kvllm import LLM, CompressionConfig, ConfigError, RequestError, SamplingParams
from kvllm.config import EngineConfig
from kvllm.core.protocol import CompressionJob, PartJob, PrefillChunk, SequenceStart, StepPlan
from kvllm.entrypoints import cli
from kvllm.entrypoints.engine_flags import parse_compression
from kvllm.entrypoints.simulate import read_model_config
from kvllm.kvcache.cache import CacheShape
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.models.config import load_model_config
from kvllm.simulation.cost import CostModel, QueryBatch, resolve_dtype
from kvllm.simulation.executor import SimulatedExecutor
from kvllm.simulation.hardware import Hardware, load_hardware, shipped_names
from kvllm.simulation.simulate import Distribution, Outcome, simulate
from kvllm.simulation.workload import arrival_times, load_workload, read_timed_trace
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.compressions import other, paper_compression

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
"""Numbers in a layer: q and o 64 each, k and v 64 together, MLP 384; in the head 80. 32 bytes of KV for an entry."""
HARDWARE = Hardware(
    name="slow",
    devices=2,
    memory_bytes=20_000,
    bytes_per_s=1e3,
    flops_per_s={"float32": 1e4},
    step_seconds=1.0,
    sequence_seconds=0.5,
    layer_seconds=0.25,
    score_seconds=0.125,
    select_seconds=0.5,
    link_bytes_per_s=100.0,
    link_seconds=0.1,
)
KARA = paper_compression(method="kara", period=8, window_blocks=3, retain_blocks=1, buffer=4, chunk_budget=2)


@pytest.fixture
def model_file(tmp_path):
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(MODEL))
    return file


@pytest.fixture
def model(model_file):
    return read_model_config(model_file)


@pytest.fixture
def cost(model):
    return CostModel(HARDWARE, model, "float32")


def engine_config(**options) -> EngineConfig:
    return EngineConfig(**{"num_blocks": 64, "max_model_len": 240, "block_size": 4, **options})


# The roofline, by hand


def test_a_decode_reads_weights_and_cache(cost):
    layer = 576 * 4 / 1e3 + 10 * 32 / 1e3 + 0.25
    head = 80 * 4 / 1e3 + 2 * 40 / 1e3  # its weights; 10 logits written and read
    decode, prefill = cost.forward(QueryBatch(1, 1, 10, 10), QueryBatch(), samples=1)
    assert (decode, prefill) == (pytest.approx(2 * layer + head + 1.0 + 0.5), 0.0)


def test_a_prefill_computes(cost):
    rows = QueryBatch()
    rows.add(100, cached=0)
    assert (rows.visible, rows.read) == (5050, 100)
    layer = 2 * 100 * 576 / 1e4 + 4 * 4 * 2 * 5050 / 1e4 + 0.25
    decode, prefill = cost.forward(QueryBatch(), rows, samples=0)
    assert (decode, prefill) == (0.0, pytest.approx(2 * layer + 1.0 + 0.5))


def test_a_mixed_step_divides_what_it_shares_by_rows(cost):
    chunk = QueryBatch()
    chunk.add(3, cached=7)
    assert (chunk.visible, chunk.read) == (8 + 9 + 10, 10)
    decode, prefill = cost.forward(QueryBatch(1, 1, 10, 10), chunk, samples=1)
    shared = 2 * (576 * 4 / 1e3 + 0.25) + 0.4 + 1.0 + 2 * 0.5
    assert decode == pytest.approx(shared / 4 + 2 * 0.32)
    assert prefill == pytest.approx(shared * 3 / 4 + 2 * 0.32)


def test_devices_share_the_work_and_exchange_sums(model):
    cost = CostModel(HARDWARE, model, "float32", tensor_parallel_size=2)
    all_reduce = 2 * 32 / 2 / 100 + 0.1  # 8 numbers in a ring of two
    layer = 288 * 4 / 1e3 + 10 * 16 / 1e3 + 0.25 + 2 * all_reduce
    head = 40 * 4 / 1e3 + (40 / 2 / 100 + 0.1) + 2 * 40 / 1e3
    assert cost.forward(QueryBatch(1, 1, 10, 10), QueryBatch(), samples=1)[0] == pytest.approx(2 * layer + head + 1.5)


def test_a_compression_recomputes_scores_and_moves(cost):
    rows = QueryBatch(1, 100, 5050, 100)
    layer = 2 * 100 * 512 / 1e4 + 4 * 4 * 2 * 5050 / 1e4 + 0.25  # no key and value projection
    last = 2 * 100 * 64 / 1e4 + 0.25  # the queries alone
    assert cost.recompute(rows) == pytest.approx(layer + last)
    products, keys = 2 * 4 * 2 * 100 / 1e4, 1000 * 16 / 1e3
    assert cost.score(100, keys=5, layers=2, at_once=False) == pytest.approx(2 * (products + 0.125 + 0.5))
    assert cost.score(100, keys=5, layers=2, at_once=True) == pytest.approx(2 * (products + 0.125) + 0.5)
    assert cost.score(1, keys=1000, layers=2, at_once=True) == pytest.approx(2 * (keys + 0.125) + 0.5)
    assert cost.compact(3, layers=2) == pytest.approx(2 * 2 * 3 * 32 / 1e3 + 0.25)
    assert cost.compact(3, layers=1) == pytest.approx(2 * 3 * 32 / 1e3 + 0.25)


def test_efficiencies_stretch_what_they_are_of(model):
    shares = {"bandwidth_efficiency": 0.5, "matmul_efficiency": 0.25, "attention_efficiency": 0.2}
    slower = msgspec.structs.replace(HARDWARE, score_efficiency=0.1, **shares)
    costs = [CostModel(hardware, model, "float32") for hardware in (HARDWARE, slower)]
    bare = [2 * 0.25 + 1.0 + 0.5] * 2
    decode = [c.forward(QueryBatch(1, 1, 10, 10), QueryBatch(), 0)[0] - b for c, b in zip(costs, bare, strict=True)]
    prefill = [c.forward(QueryBatch(), QueryBatch(1, 100, 0, 0), 0)[1] - b for c, b in zip(costs, bare, strict=True)]
    score = [c.score(1000, 0, layers=2, at_once=True) - 0.75 for c in costs]
    assert decode[1] == pytest.approx(2 * decode[0])
    assert prefill[1] == pytest.approx(4 * prefill[0])
    assert score[1] == pytest.approx(10 * score[0])


def test_weights_and_pool_fill_the_memory(cost):
    assert cost.weight_bytes == 4 * (2 * 576 + 2 * 80)
    assert cost.pool_blocks(4, 0.5) == (10_000 - 5248) // (4 * 2 * 32)
    with pytest.raises(ConfigError, match="leave no room for a KV pool"):
        cost.pool_blocks(4, 0.1)
    with pytest.raises(ConfigError, match="block_size=0 is not allowed"):
        cost.pool_blocks(0, 0.5)


def test_a_simulated_pool_counts_scales(model):
    model = msgspec.structs.replace(model, head_dim=8)
    plain, quantized = (CostModel(HARDWARE, model, "float32", kv_cache_dtype=dtype) for dtype in ("auto", "int4"))
    shape = CacheShape(1, plain.kv_heads, model.head_dim, 4, torch.float32, kv_format=KV_FORMATS["int4"])
    assert 4 * quantized.kv_pair_bytes == shape.bytes_per_block < 4 * plain.kv_pair_bytes
    assert quantized.pool_blocks(4, 0.9) > plain.pool_blocks(4, 0.9)
    assert quantized.compact(100, layers=2) < plain.compact(100, layers=2)


@pytest.mark.parametrize("tied", [True, False])
def test_weight_bytes_are_those_of_the_matrices(tmp_path, tied):
    weights = make_checkpoint(tmp_path, "qwen3", head_dim=16, tie_word_embeddings=tied)
    matrices = sum(weight.nbytes for _, weight in weights.named_parameters() if weight.dim() == 2)
    assert CostModel(HARDWARE, load_model_config(tmp_path), "float32").weight_bytes == matrices


# The executor


def compression_plan() -> StepPlan:
    """Two windows of 12 entries of one sequence, one of another."""
    sampling = SamplingParams(temperature=0)
    return StepPlan(
        new_seqs=[SequenceStart(i, [0] * 41, 1, 40, sampling, 0) for i in range(2)],
        compressions=[
            CompressionJob(0, [PartJob(1, 2, 12, 4, 12, 6, [0, 1])]),
            CompressionJob(1, [PartJob(4, 1, 12, 4, 12, 3, [2])]),
        ],
        chunks=[PrefillChunk(i, 1, [], True) for i in range(2)],
    )


def test_executor_follows_lengths(cost):
    executor = SimulatedExecutor(cost, engine_config(compression=KARA))
    assert len(executor.execute(compression_plan()).tokens) == 2
    assert executor.cached == {0: 40 - 2 * 8 + 1, 1: 40 - 8 + 1}
    assert executor.seconds.decode == pytest.approx(
        cost.forward(QueryBatch(2, 2, 25 + 33, 25 + 33), QueryBatch(), 2)[0]
    )
    assert executor.seconds.compact == pytest.approx(cost.compact(2 * 4 + 4, layers=2))
    executor.execute(StepPlan(dropped_seq_ids=[0]))
    assert executor.cached == {1: 33}


@pytest.mark.parametrize(("budget", "passes"), [(12, [1, 1, 1]), (24, [2, 1]), (35, [2, 1]), (36, [3]), (5, [1, 1, 1])])
def test_windows_go_through_the_model_in_passes_that_fit_the_budget(cost, budget, passes):
    config = engine_config(compression=KARA, max_num_batched_tokens=budget, max_num_seqs=4)
    executor = SimulatedExecutor(cost, config)
    executor.execute(compression_plan())
    starts = [4, 16, 16]
    expected = scored = 0.0
    for count in passes:
        batch, starts = starts[:count], starts[count:]
        visible = sum(12 * start + 78 for start in batch)
        expected += cost.recompute(QueryBatch(count, 12 * count, visible, sum(start + 12 for start in batch)))
        scored += cost.score(12 * 8 * count, 12 * count, layers=2, at_once=True)
    assert executor.seconds.recompute == pytest.approx(expected)
    assert executor.seconds.score == pytest.approx(scored)


@pytest.mark.parametrize(
    ("method", "query_window", "at_once"), [("snapkv", 4, True), ("rkv", 4, True), ("chunkkv", 4, False)]
)
def test_layers_are_selected_from_at_once_by_methods_that_have_their_scores_apart(cost, method, query_window, at_once):
    compression = paper_compression(
        method=method, period=8, window_blocks=3, retain_blocks=1, buffer=4, query_window=query_window
    )
    executor = SimulatedExecutor(cost, engine_config(compression=compression))
    executor.execute(compression_plan())
    products, keys = 3 * query_window * (12 - 4), 3 * 12
    assert executor.seconds.score == pytest.approx(cost.score(products, keys, layers=2, at_once=at_once))


# Runs


def check_counts(outcome: Outcome, llm: LLM) -> None:
    real = llm.stats()
    counters = ["steps", "output_tokens", "preemptions", "compression_events", "windows_compressed", "entries_evicted"]
    for name in [*counters, "blocks_released", "peak_blocks"]:
        assert getattr(outcome, name) == real[name], name
    assert outcome.mean_concurrency == sum(running for running, _ in real.timeline) / real.steps


def some_lengths(count: int, seed: int = 0) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    return [(rng.randint(1, 60), rng.randint(1, 120)) for _ in range(count)]


@pytest.mark.parametrize(
    "compression",
    [
        None,
        KARA,
        other(KARA, retain_blocks=1, retain_tokens=5),
        other(KARA, compress_prompt=True),
        pytest.param(
            CompressionConfig(
                method="kara", policy="pressure", period=8, window_blocks=3, retain_blocks=1, buffer=4, chunk_budget=2
            ),
            marks=pytest.mark.long,
        ),
        paper_compression(method="mean_attention", policy="pressure", period=8, buffer=4),
        CompressionConfig(method="snapkv", policy="threshold", threshold_tokens=48, budget_tokens=33, query_window=4),
        pytest.param(
            paper_compression(method="keydiff", period=8, window_blocks=3, retain_blocks=1, buffer=4),
            marks=pytest.mark.long,
        ),
        CompressionConfig(method="sliding_window", policy="threshold", threshold_tokens=48, budget_tokens=32),
    ],
)
def test_counts_are_those_of_the_real_engine(tmp_path, compression):
    make_checkpoint(tmp_path, "qwen3", head_dim=16, tie_word_embeddings=True)
    lengths = some_lengths(24)
    options = {"block_size": 4, "max_model_len": 180, "max_num_seqs": 8, "max_num_batched_tokens": 40}
    llm = LLM(tmp_path, num_gpu_blocks_override=110, compression=compression, enable_prefix_caching=False, **options)
    params = [SamplingParams(temperature=0, max_tokens=output, ignore_eos=True) for _, output in lengths]
    llm.generate([{"prompt_token_ids": [5] * prompt} for prompt, _ in lengths], params, use_tqdm=False)

    cost = CostModel(HARDWARE, llm.model_config, "float32")
    config = EngineConfig(num_blocks=110, compression=compression, **options)
    outcome = simulate(config, cost, lengths, arrival_times(len(lengths), None))
    check_counts(outcome, llm)
    assert outcome.preemptions > 0 or compression is not None
    assert (outcome.windows_compressed > 0) == (compression is not None)


def test_planning_ahead_hides_the_host_and_changes_no_plan(model):
    """A single rank is busy for the longer of both; several wait for a launch. Requests that come meanwhile start one
    step later."""
    hardware = msgspec.structs.replace(HARDWARE, launch_seconds=0.25)
    one, two = (CostModel(hardware, model, "float32", size) for size in (1, 2))
    decode = QueryBatch(1, 1, 10, 10)
    assert one.plans_ahead and not CostModel(HARDWARE, model, "float32").plans_ahead
    for cost, launch in ((one, 0.0), (two, 0.25)):
        waiting, _ = cost.forward(decode, QueryBatch(), samples=1)
        ahead, _ = cost.forward(decode, QueryBatch(), samples=1, planned_ahead=True)
        assert ahead == pytest.approx(waiting - 1.5 + launch)
    busy = msgspec.structs.replace(hardware, sequence_seconds=100.0)
    step, _ = CostModel(busy, model, "float32").forward(decode, QueryBatch(), samples=1, planned_ahead=True)
    assert step == pytest.approx(101.0)
    lengths = some_lengths(60)
    runs = [
        simulate(engine_config(num_blocks=100, async_scheduling=ahead), one, lengths, [0.0] * 60)
        for ahead in (False, True)
    ]
    counts = [(run.steps, run.preemptions, run.tokens_recomputed, run.output_tokens) for run in runs]
    assert counts[0] == counts[1] and runs[0].preemptions > 0
    assert runs[1].seconds < runs[0].seconds


def test_all_requests_get_all_of_their_tokens(cost):
    lengths = some_lengths(300)
    outcome = simulate(engine_config(num_blocks=100), cost, lengths, arrival_times(300, 0.01))
    assert outcome.requests == 300
    assert outcome.output_tokens == sum(output for _, output in lengths)
    assert outcome.phases.total <= outcome.seconds
    assert outcome.mean_first_token < outcome.mean_latency < outcome.seconds
    assert outcome.requests_per_s == pytest.approx(300 / outcome.seconds)


def test_compression_saves_blocks_and_preemptions_in_a_tight_pool(cost):
    lengths = [(8, 200)] * 40
    arrivals = arrival_times(40, None)
    full = simulate(engine_config(num_blocks=300, max_num_seqs=16), cost, lengths, arrivals)
    tight = engine_config(num_blocks=300, max_num_seqs=16, compression=KARA)
    compressed = simulate(tight, cost, lengths, arrivals)
    assert full.preemptions >= 2 * compressed.preemptions > 0
    assert compressed.mean_concurrency > 1.2 * full.mean_concurrency
    assert compressed.blocks_released == 2 * compressed.windows_compressed > 0
    assert min(compressed.phases.recompute, compressed.phases.score, compressed.phases.compact) > 0
    assert full.phases.recompute == full.phases.score == full.phases.compact == 0
    roomy = [
        simulate(engine_config(num_blocks=2000, compression=compression), cost, lengths, arrivals).peak_blocks
        for compression in (None, KARA)
    ]
    assert roomy[1] < 0.7 * roomy[0]


def test_runs_repeat_exactly(cost):
    config = engine_config(num_blocks=100, compression=KARA)
    outcomes = [simulate(config, cost, some_lengths(60), arrival_times(60, 0.05)) for _ in range(2)]
    assert outcomes[0] == outcomes[1]


def test_inter_token_latency_is_the_time_between_tokens_of_a_request(cost):
    """One request, then two: the second's prompt falls between two tokens of the first."""
    alone = simulate(engine_config(), cost, [(9, 21)], [0.0])
    decoding = alone.seconds - alone.mean_first_token
    assert 20 * alone.inter_token.p50 == pytest.approx(decoding, rel=0.05)
    assert alone.inter_token.p50 <= alone.inter_token.p99 == alone.inter_token.most
    arrivals = [0.0, alone.mean_first_token + 2.5 * alone.inter_token.p50]
    both = simulate(engine_config(), cost, [(9, 21), (150, 2)], arrivals)
    assert both.inter_token.most > 3 * both.inter_token.p50
    assert Distribution.of(Counter({1.0: 98, 2.0: 1, 5.0: 1})) == Distribution(1.0, 2.0, 5.0)
    assert Distribution.of(Counter()) == Distribution()


def test_a_rare_request_finds_nobody_and_waits_for_nobody(cost):
    alone = simulate(engine_config(), cost, [(9, 20)], [0.0])
    arrivals = [10.0, 10.0 + 2 * alone.seconds, 10.0 + 9 * alone.seconds]
    rare = simulate(engine_config(), cost, [(9, 20)] * 3, arrivals)
    assert rare.peak_concurrency == 1
    assert rare.mean_latency == pytest.approx(alone.seconds)
    assert rare.seconds == pytest.approx(10 * alone.seconds)
    assert rare.phases.total == pytest.approx(3 * alone.seconds)


def test_arrivals_come_at_their_rate():
    assert arrival_times(3, None) == [0.0] * 3
    times = arrival_times(20_000, 4.0)
    assert times == sorted(times) == arrival_times(20_000, 4.0)
    assert times[-1] == pytest.approx(5000, rel=0.03)
    with pytest.raises(ConfigError, match=r"rate=0 is not allowed"):
        arrival_times(3, 0)


def test_what_does_not_fit_the_pool_is_refused(cost):
    with pytest.raises(ConfigError, match="lower max_model_len"):
        simulate(engine_config(num_blocks=20), cost, [(9, 20)], [0.0])
    with pytest.raises(RequestError, match="the pool has 20"):
        simulate(engine_config(num_blocks=20, max_model_len=30), cost, [(9, 200)], [0.0])


# Workloads


def test_reads_workloads_of_each_kind(tmp_path):
    azure, mooncake, synthetic = (tmp_path / name for name in ("a.csv", "m.jsonl", "s.json"))
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,5,6\nx,50,60\nx,7,8\n")
    mooncake.write_text('{"timestamp": 0, "input_length": 3, "output_length": 4, "hash_ids": [1]}\n\n')
    synthetic.write_text('{"num_requests": 50, "input_len": 10, "output_len": 20, "range_ratio": 0.5}')
    assert load_workload(azure, 100).lengths == [(5, 6), (7, 8)]
    assert load_workload(azure, 110).longest == 110
    short = load_workload(azure, 100, 5)
    assert (short.lengths, short.left_out) == ([(5, 6), (7, 8), (5, 6), (7, 8), (5, 6)], 1)
    assert load_workload(mooncake, 100, 2).lengths == [(3, 4)] * 2
    drawn = load_workload(synthetic, 100).lengths
    assert len(drawn) == 50 and drawn == load_workload(synthetic, 100).lengths
    assert all(5 <= prompt <= 15 and 10 <= output <= 30 for prompt, output in drawn)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens\n1,2\n", "no column GeneratedTokens.*TIMESTAMP"),
        ("a.csv", "ContextTokens,GeneratedTokens\n5,1\nfive,1\n", "line 3: .*must be numbers"),
        ("a.csv", "ContextTokens,GeneratedTokens\n500,1\n5,0\n", "no request of at most 100 tokens"),
        ("m.jsonl", '{"input_length": 3}\n', "line 1 must be a JSON object.*output_length"),
        ("s.json", '{"num_requests": 5, "input_len": 1, "output_length": 1}', "unknown field `output_length`; fields"),
        ("s.json", '{"num_requests": 0, "input_len": 1, "output_len": 1}', "num_requests=0 is not allowed"),
        ("s.json", '{"num_requests": 2, "input_len": 99, "output_len": 9}', "no request of at most 100 tokens"),
        ("s.json", "{", "is no workload"),
    ],
)
def test_refuses_a_workload_that_it_cannot_use(tmp_path, name, text, message):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_workload(file, 100)


def test_files_of_windows_are_read(tmp_path):
    """With a byte order mark and other ends of lines."""
    csv, jsonl = tmp_path / "a.csv", tmp_path / "m.jsonl"
    csv.write_bytes("\ufeffContextTokens,GeneratedTokens\r\n5,6\r\n".encode())
    jsonl.write_bytes('\ufeff{"input_length": 5, "output_length": 6}\r\n'.encode())
    assert load_workload(csv, 100).lengths == load_workload(jsonl, 100).lengths == [(5, 6)]
    csv.write_bytes("ContextTokens,GeneratedTokens\n5,6\n".encode("utf-16"))
    with pytest.raises(ConfigError, match=r"a\.csv is no text in UTF-8"):
        load_workload(csv, 100)


def test_repeats_a_trace_that_is_too_short(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n,396,109\n,879,55\n")
    workload = load_workload(trace, 10**6, 8)
    assert workload.lengths == [(374, 44), (396, 109), (879, 55)] * 2 + [(374, 44), (396, 109)]


# Descriptions


def test_every_description_that_comes_with_the_package_is_valid():
    assert shipped_names() == ["cpu", "h100", "h200", "rtx5090x4"]
    for name in shipped_names():
        hardware = load_hardware(name)
        assert hardware.source and {"bfloat16", "float32"} <= set(hardware.flops_per_s)
    assert load_hardware("rtx5090x4").devices == 4


def test_descriptions_may_be_toml(tmp_path):
    file = tmp_path / "x.toml"
    file.write_text('name = "x"\nmemory_bytes = 8\nbytes_per_s = 2.5e9\n[flops_per_s]\nfloat32 = 1e9\n')
    assert load_hardware(str(file)) == Hardware(
        name="x", memory_bytes=8, bytes_per_s=2.5e9, flops_per_s={"float32": 1e9}
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bandwith": 1}, "unknown field `bandwith`; fields are name, .*bytes_per_s"),
        ({"bytes_per_s": None}, r"bytes_per_s"),
        ({"bytes_per_s": -1.0}, r"bytes_per_s=-1.0 is not allowed: a number above 0"),
        ({"flops_per_s": {"float32": 0}}, r"flops_per_s\[float32\]=0"),
        ({"flops_per_s": {}}, "a rate for at least one dtype"),
        ({"matmul_efficiency": 1.5}, "matmul_efficiency=1.5 is not allowed: a share"),
        ({"step_seconds": -1e-3}, "step_seconds=-0.001 is not allowed: a number, at least 0"),
        ({"devices": 0}, "devices=0"),
        ({"link_bytes_per_s": None}, "link_bytes_per_s"),
        ({"name": 3}, r"Expected `str`, got `int`"),
    ],
)
def test_a_wrong_description_is_refused_by_field(tmp_path, change, message):
    file = tmp_path / "x.json"
    file.write_text(json.dumps(msgspec.to_builtins(HARDWARE) | change))
    with pytest.raises(ConfigError, match=message):
        load_hardware(str(file))


def test_an_absent_or_broken_description_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="'h1000' cannot be read.*give a file or one of cpu, h100, h200, rtx5090x4"):
        load_hardware("h1000")
    file = tmp_path / "x.json"
    file.write_text("{")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        load_hardware(str(file))


@pytest.mark.parametrize(
    ("dtype", "size", "message"),
    [
        ("bfloat16", 1, "dtype='bfloat16' is not allowed: 'slow' has flops_per_s of float32"),
        ("float32", 3, "tensor_parallel_size=3 is not allowed: 1 to 2"),
        ("float8", 1, "dtype='float8'"),
    ],
)
def test_a_model_that_the_machine_cannot_run_is_refused(model, dtype, size, message):
    with pytest.raises(ConfigError, match=message):
        CostModel(HARDWARE, model, dtype, size)


def test_ranks_must_divide_the_heads(model):
    hardware = msgspec.structs.replace(HARDWARE, devices=4)
    with pytest.raises(ConfigError, match="a divisor of the model's 2 KV heads"):
        CostModel(hardware, model, "float32", 4)


def test_dtype_auto_is_the_checkpoints(model):
    assert resolve_dtype("auto", model) == "float32"
    assert resolve_dtype("auto", msgspec.structs.replace(model, dtype="bfloat16")) == "bfloat16"
    half = msgspec.structs.replace(model, dtype="float16")
    assert resolve_dtype("auto", half) == resolve_dtype("half", model) == "float16"
    assert resolve_dtype("auto", half, load_hardware("cpu").flops_per_s) == "float32"  # as the engine on a CPU
    assert resolve_dtype("auto", half, load_hardware("h200").flops_per_s) == "float16"


# The command


def arguments(tmp_path, model_file, *more: str) -> list[str]:
    hardware, workload = tmp_path / "slow.json", tmp_path / "w.json"
    hardware.write_text(msgspec.json.encode(HARDWARE).decode())
    workload.write_text('{"num_requests": 30, "input_len": 8, "output_len": 200}')
    files = ["--model-config", str(model_file), "--hardware", str(hardware), "--workload", str(workload)]
    return ["simulate", *files, "--block-size", "4", "--num-blocks", "200", "--max-num-seqs", "16", *more]


def test_traces_tell_when_requests_arrive(tmp_path):
    azure, mooncake = tmp_path / "a.csv", tmp_path / "m.jsonl"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,3,1\n"
        "2023-11-16 18:15:47,9,9\n2023-11-16 18:15:46.1805900,5,2\n"
    )
    times = read_timed_trace(azure, None, 10)
    assert times[0] == [(5, 2), (3, 1)] and times[1] == pytest.approx([0, 0.5])  # in order, without the longest
    mooncake.write_text('{"timestamp": 3000, "input_length": 3, "output_length": 1}\n' * 2)
    assert read_timed_trace(mooncake, None, 10) == ([(3, 1), (3, 1)], [0.0, 0.0])
    mooncake.write_text('{"input_length": 3, "output_length": 1}\n')
    with pytest.raises(ConfigError, match="without the time of their arrival"):
        read_timed_trace(mooncake, None, 10)


SETTINGS = "method=kara,period=8,buffer=4,chunk_budget=2"


def test_command_shows_both_runs_and_their_ratio(tmp_path, model_file):
    command = [sys.executable, "-m", "kvllm.entrypoints.cli"]
    command += arguments(tmp_path, model_file, "--compression", SETTINGS, "--requests", "40")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    rows = {line[:28].strip(): line[28:].split() for line in done.stdout.splitlines()}
    assert rows[""] == ["without", "compressed", "ratio"]
    assert "40 requests, all at once, mean 8 + 200 tokens" in done.stdout
    cost = CostModel(HARDWARE, read_model_config(model_file), "float32")
    config = engine_config(num_blocks=200, max_model_len=208, max_num_seqs=16, enable_prefix_caching=False)
    for column, compression in enumerate([None, parse_compression(SETTINGS)]):
        each = msgspec.structs.replace(config, compression=compression)
        outcome = simulate(each, cost, [(8, 200)] * 40, [0.0] * 40)
        assert rows["preemptions"][column] == str(outcome.preemptions)
        assert rows["mean concurrency"][column] == f"{outcome.mean_concurrency:.1f}"
        assert rows["decode, s"][column] == f"{outcome.phases.decode:,.1f}"
    full, compressed, ratio = (float(cell) for cell in rows["mean concurrency"])
    assert ratio == pytest.approx(compressed / full, rel=0.01)


def test_command_needs_no_torch():
    code = "import sys, kvllm.entrypoints.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_command_without_compression(tmp_path, model_file, capsys):
    cli.main(arguments(tmp_path, model_file, "--compression", "none", "--rate", "0.5"))
    printed = capsys.readouterr().out
    assert "ratio" not in printed and "0.5 a second" in printed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--compression", "perod=4"], "error: CompressionConfig has no option 'perod'.*period"),
        (["--compression", "period=often"], "'period=often': Expected `int`"),
        (["--compression", "period=0"], "period=0 is not allowed"),
        (["--hardware", "h1000"], "'h1000' cannot be read"),
        (["--workload", "absent.csv"], "absent.csv cannot be read"),
        (["--requests", "0"], "requests=0 is not allowed"),
        (["--rate", "-1"], "rate=-1.0 is not allowed"),
        (["--num-blocks", "9"], "lower max_model_len"),
        (["--max-model-len", "90"], "no request of at most 90 tokens"),
        (["--max-model-len", "0"], "max_model_len=0 is not allowed"),
        (["--replicas", "0"], "replicas=0 is not allowed"),
        (["--tensor-parallel-size", "8"], "tensor_parallel_size=8"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, model_file, more, message, capsys):
    given = arguments(tmp_path, model_file, "--compression", SETTINGS)
    with pytest.raises(SystemExit) as ended:
        cli.main([*given, *more])
    printed = capsys.readouterr()
    assert printed.out == "" and re.search(message, printed.err)
    assert ended.value.code == 2


def test_an_absent_model_is_no_wrong_option(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments(tmp_path, "absent.json"))
    assert ended.value.code == 1 and "absent.json does not exist" in capsys.readouterr().err


def test_a_refused_model_is_named_by_its_own_file(tmp_path, capsys):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(MODEL | {"hidden_act": "gelu"}))
    with pytest.raises(SystemExit, match="1"):
        cli.main(arguments(tmp_path, file))
    assert f"error: {file}: hidden_act is 'gelu'" in capsys.readouterr().err
