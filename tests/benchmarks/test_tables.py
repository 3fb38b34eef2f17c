"""The scripts for the paper's tables and figures: run small, and their figures held against the engine's own."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from statistics import mean, median

import msgspec
import pytest

from benchmarks.common import workloads
from benchmarks.common.jobs import Job, run
from benchmarks.common.measurement import measure
from benchmarks.paper import figure_2, tables_2_3
from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.core.protocol import KeptPairs
from kvllm.engine_args import DEFAULT_MODEL
from kvllm.errors import KvLLMError
from tests.helpers.checkpoints import checkpoint_fixture
from tests.helpers.compressions import paper_compression

PNG = b"\x89PNG"
COUNTS = ("steps", "mean_concurrency", "preemptions", "tokens_recomputed", "windows_compressed", "blocks_released")


tiny = checkpoint_fixture("qwen3", head_dim=16, tie_word_embeddings=True)


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


def test_what_is_left_after_two_compressions():
    first = KeptPairs(0, 0, 4, [0, 1], [[b"\x05"], [b"\x0f"]])
    second = KeptPairs(0, 2, 5, [1], [[b"\x02"]])
    left = figure_2.left_of([first, second], (2, 1, 6))
    assert left.int().tolist() == [[[1, 0, 1, 0, 1, 1]], [[1, 1, 0, 1, 0, 1]]]


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
