"""The scripts for the paper's tables and figures: run small, and their figures held against the engine's own."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from statistics import mean, median

import msgspec
import pytest
import torch

from benchmarks.common import workloads
from benchmarks.common.jobs import Job, run
from benchmarks.common.measurement import measure
from benchmarks.paper import figure_2, tables_2_3
from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.engine_args import DEFAULT_MODEL
from kvllm.errors import KvLLMError
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.compressions import paper_compression

PNG = b"\x89PNG"
COUNTS = ("steps", "mean_concurrency", "preemptions", "tokens_recomputed", "windows_compressed", "blocks_released")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    make_checkpoint(path, "qwen3", head_dim=16, tie_word_embeddings=True)
    return path


def arguments_of(tiny, tmp_path, *more):
    return ["--model", str(tiny), "--output", str(tmp_path), "--block-size", "8", "--input-len", "20", *more]


def job_of(entry, requests):
    """The job that an entry of a report describes."""
    compression = msgspec.convert(entry["compression"], CompressionConfig | None)
    job = Job(name="", engine=dict(entry["engine"]), model="", compression=compression, requests=requests)
    job.model = job.engine.pop("model")
    return job


# What a run measures


def test_measures_latency_steps_and_phases_of_the_run_alone(tiny):
    config = CompressionConfig(method="h2o", policy="threshold", threshold_tokens=40, budget_tokens=24, buffer=4)
    llm = LLM(tiny, block_size=8, num_gpu_blocks_override=64, max_model_len=128, compression=config)
    prompts = [{"prompt_token_ids": [i + 3] * 20} for i in range(3)]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (20, 30, 50)]
    _, first = measure(llm, prompts, params)
    outputs, second = measure(llm, prompts, params)
    stats = llm.stats()

    latencies = [output.metrics.finished_time - output.metrics.arrival_time for output in outputs]
    assert second.mean_latency == pytest.approx(mean(latencies))
    assert second.p99_latency == max(latencies) <= second.seconds
    for name in ("decode_seconds", "prefill_seconds", "score_seconds", "recompute_seconds", "compact_seconds"):
        assert getattr(first, name) + getattr(second, name) == pytest.approx(stats[name])
    assert first.decode_seconds + first.prefill_seconds < first.seconds
    assert min(first.decode_seconds, first.prefill_seconds, first.score_seconds, first.compact_seconds) > 0
    assert first.windows_compressed == second.windows_compressed > 0
    assert llm.llm_engine.step.__self__ is llm.llm_engine  # the timer is gone


def test_the_mean_over_steps_weighs_steps_and_not_tokens(tiny):
    """Alone, a sequence gets one token a step: the mean of its steps' rates is at least the rate of all of them."""
    llm = LLM(tiny, block_size=8, num_gpu_blocks_override=64, max_model_len=128)
    _, measured = measure(llm, [{"prompt_token_ids": [3] * 4}], SamplingParams(max_tokens=40, ignore_eos=True))
    assert measured.steps == measured.output_tokens == 40
    assert measured.output_tokens_per_s <= measured.step_tokens_per_s < 100 * measured.output_tokens_per_s


# Requests and variants


def test_output_lengths_are_lognormal_with_a_long_tail():
    args = Namespace(num_prompts=4000, output_median=200, output_sigma=0.8, max_output_len=2000)
    lengths, again, other = (tables_2_3.output_lengths(args, random.Random(seed)) for seed in (0, 0, 1))
    assert lengths == again != other
    assert median(lengths) == pytest.approx(200, rel=0.05)
    assert mean(lengths) == pytest.approx(200 * 2.71828**0.32, rel=0.05)
    assert min(lengths) >= 1 and max(lengths) == 2000
    assert 0.008 < sum(length > 1200 for length in lengths) / 4000 < 0.018


def test_blocks_of_256_give_the_settings_of_the_paper():
    variants = {name: variant.compression for name, variant in tables_2_3.paper_variants(256).items()}
    assert variants["vanilla"] is None
    snapkv = CompressionConfig(
        method="snapkv", policy="threshold", threshold_tokens=1280, budget_tokens=1025, query_window=32, buffer=32
    )
    assert variants["snapkv"] == snapkv
    assert variants["periodic"] == paper_compression(method="kara", retain_tokens=257)
    assert variants["periodic-blocks"] == paper_compression(method="kara")
    assert variants["pressure"] == paper_compression(method="kara", policy="pressure")


# Tables 2 and 3, figures 1 and 9

SHORT = ["--num-prompts", "6", "--output-median", "40", "--output-sigma", "0.5", "--max-output-len", "100"]


@pytest.mark.long
def test_tables_2_3_report_what_the_engine_counts(tiny, tmp_path, capsys):
    chosen = ["--max-num-seqs", "4", "--variants", "vanilla", "periodic", "--repeats", "1", "--pool-fraction", "0.6"]
    arguments = arguments_of(tiny, tmp_path, *SHORT, *chosen)
    tables_2_3.measure_tables(arguments)

    printed = capsys.readouterr().out
    content = json.loads((tmp_path / "tables_2_3.json").read_text())
    assert (tmp_path / "figures_1_9.png").read_bytes().startswith(PNG)
    assert content["command"] in printed and content["machine"]["cores"] and content["versions"]["torch"]
    args = tables_2_3.parse_arguments(arguments)
    rng = random.Random(0)
    lengths = [(20, length) for length in tables_2_3.output_lengths(args, rng)]
    requests = workloads.random_requests(rng, lengths, 256)
    assert len({request.output_length for request in requests}) > 1
    vanilla, periodic = content["tables"]["4"].values()
    assert periodic["compression"]["policy"]["retain_tokens"] == 9 and periodic["engine"]["max_num_seqs"] == 4
    for entry in (vanilla, periodic):
        assert entry["engine"]["kv_cache_memory_bytes"] == vanilla["engine"]["kv_cache_memory_bytes"]
        own = run(job_of(entry, requests))
        (reported,) = entry["runs"]
        assert {count: reported[count] for count in COUNTS} == {count: getattr(own, count) for count in COUNTS}
        assert reported["timeline"] == [list(step) for step in own.timeline]
        assert entry["summary"]["mean_latency"]["median"] == reported["mean_latency"] > 0
        for figure in ("output_tokens_per_s", "step_tokens_per_s"):
            assert f"{reported[figure]:,.0f}" in printed
    assert vanilla["runs"][0]["preemptions"] > 0 and periodic["runs"][0]["windows_compressed"] > 0
    gain = periodic["runs"][0]["output_tokens_per_s"] / vanilla["runs"][0]["output_tokens_per_s"]
    assert f"{gain - 1:+.1%}" in printed and "+12.75%" in printed


# Figure 2

WINDOW = {"policy": "periodic", "period": 4, "buffer": 2, "chunk_budget": 2}
CUT = {"policy": "threshold", "threshold_tokens": 40, "budget_tokens": 25, "buffer": 2}
RECENT = CUT | {"query_window": 2}


@pytest.mark.parametrize(
    "config",
    [
        paper_compression(method="kara", retain_tokens=9, **WINDOW),
        paper_compression(method="kara", **WINDOW),
        paper_compression(method="snapkv", **RECENT),
        paper_compression(method="adakv", **RECENT),
        paper_compression(method="sliding_window", **CUT | {"budget_tokens": 24}),
    ],
    ids=lambda config: f"{config.method}-{config.policy.name}",
)
def test_tracked_positions_are_those_of_the_cached_keys(tiny, config):
    """In the first layer a key is a function of its token and position alone: look it up in an uncompressed cache."""
    llm = LLM(tiny, block_size=8, num_gpu_blocks_override=64, max_model_len=256, compression=config)
    llm.llm_engine.executor = tracker = figure_2.PositionTracker(llm.llm_engine.executor)
    rng = random.Random(0)
    prompts = [rng.choices(range(256), k=length) for length in (13, 30)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=90, ignore_eos=True), use_tqdm=False)

    for seq_id, output in enumerate(outputs):
        text = (output.prompt_token_ids + output.outputs[0].token_ids)[:-1]
        assert tracker.length(seq_id) == len(text) and tracker.events[seq_id] >= 2
        positions = tracker.positions[seq_id]
        keys = keys_of(llm, seq_id, layer=0)
        assert positions.shape == (3, 2, keys.shape[1])
        full = LLM(tiny, block_size=8, num_gpu_blocks_override=64, max_model_len=256)
        full.generate([text], SamplingParams(max_tokens=1), use_tqdm=False)
        expected = keys_of(full, 0, layer=0)
        for head in range(2):
            real = positions[0, head] != figure_2.HOLE
            torch.testing.assert_close(keys[head, real], expected[head, positions[0, head][real]])
        for row in positions.flatten(0, 1):
            kept = row[row != figure_2.HOLE]
            assert (kept.diff() > 0).all()


def keys_of(llm, seq_id, layer):
    """Keys of a sequence that ended last, `[kv_heads, entries, head_dim]`: the worker is told with the next plan."""
    runner = llm.llm_engine.executor.runner
    state = runner.states[seq_id]
    (tables,), slot = runner.tables.parts, state.table_slot
    table = torch.from_numpy(tables.table[[slot], : tables.num_blocks[slot]])
    return runner.operations.gather_keys([layer], table, state.cached_length)[0]


def test_survivors_are_counted_by_region():
    positions = torch.tensor([[[0, 1, 4, 9], [7, 8, 9, figure_2.HOLE]]])
    counts, sizes = figure_2.survivors_of_regions(positions, length=10, regions=3)
    assert sizes.tolist() == [3, 3, 4]
    assert counts.tolist() == [[[2, 1, 1], [0, 0, 3]]]


def test_figure_2_shows_what_each_method_forgets(tiny, tmp_path, capsys):
    methods = ["kara", "streaming", "sliding_window", "pyramidkv"]
    chosen = ["--num-prompts", "2", "--output-len", "100", "--methods", *methods, "--regions", "4"]
    figure_2.draw_figure(arguments_of(tiny, tmp_path, *chosen))

    content = json.loads((tmp_path / "figure_2.json").read_text())
    assert (tmp_path / "figure_2.png").read_bytes().startswith(PNG)
    assert content["command"] in capsys.readouterr().out
    kara, streaming, sliding, pyramid = (content["methods"][name] for name in methods)
    # 119 entries; windows leave the prompt of 20 alone and never come back to what they compressed.
    assert min(kara["survivors"]) > 0 and kara["events_per_sequence"] >= 2
    # 40 entries are cut to 33: the last 33 and up to 6 more, and with streaming 4 of these are the first.
    assert sliding["survivors"][:2] == [0, 0] and sliding["survivors"][3] == 1
    assert streaming["survivors"][0] == pytest.approx(4 / 29) and streaming["survivors"][1] == 0
    assert 33 / 119 <= sliding["kept_of_all"] == streaming["kept_of_all"] <= 39 / 119
    assert pyramid["compression"]["policy"]["budget_tokens"] == 33 and pyramid["events_per_sequence"] > 0


def test_figure_2_takes_all_methods_that_need_no_file():
    args = figure_2.parse_arguments(["--preset", "cpu"])
    made = figure_2.make_jobs(args, DEFAULT_MODEL)
    assert set(figure_2.METHODS) - set(made) == {"expected_attention_calibrated", "triattention", "dms", "trimkv"}


# Wrong arguments

SCRIPTS = {
    "tables_2_3": tables_2_3.measure_tables,
    "figure_2": figure_2.draw_figure,
}


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        *((name, ["--model", "absent"], "absent is not a directory") for name in SCRIPTS),
        *((name, ["--num-prompts", "0"], "--num-prompts=0 is not allowed: at least 1") for name in SCRIPTS),
        ("tables_2_3", ["--max-num-seqs", "16", "0"], "max_num_seqs=0"),
        ("tables_2_3", ["--repeats", "0"], "--repeats=0"),
        ("tables_2_3", ["--block-size", "4"], "--block-size=4 .*at least 8"),
        ("tables_2_3", ["--pool-fraction", "2"], "--pool-fraction=2.0"),
        ("tables_2_3", ["--max-num-seqs", "9999"], "max_num_batched_tokens=2048"),
        ("figure_2", ["--preset", "cpu", "--output-len", "100000"], "max_position_embeddings=4096"),
        ("figure_2", ["--preset", "cpu", "--regions", "0"], "--regions=0"),
        ("figure_2", ["--preset", "cpu", "--regions", "9999"], "--output-len=512 .*at least --regions=9999"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(script, arguments, message, capsys):
    with pytest.raises(KvLLMError, match=message):
        SCRIPTS[script](arguments)
    assert capsys.readouterr().out == ""
