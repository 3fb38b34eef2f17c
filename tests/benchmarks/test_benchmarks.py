"""The demo and the throughput benchmark, run small; their workloads, variants and arguments."""

from __future__ import annotations

import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import demo, throughput
from benchmarks.common import jobs, limits, report, shapes, workloads
from benchmarks.common.jobs import Job
from benchmarks.common.variants import Variant, parse_variant
from benchmarks.common.workloads import Request
from kvllm import CompressionConfig, Pressure
from kvllm.engine_args import EngineArgs
from kvllm.engine_builder import cache_shape
from kvllm.errors import ConfigError, KvLLMError
from kvllm.models.config import load_model_config
from tests.helpers.checkpoints import checkpoint_fixture, make_checkpoint

KARA = "kara:period=4,window_blocks=3,retain_blocks=1,buffer=4,chunk_budget=2"


tiny = checkpoint_fixture("qwen3", head_dim=16, tie_word_embeddings=True)


# Workloads


def test_named_workloads_have_the_lengths_they_are_named_for():
    a, again, other = (workloads.WORKLOADS["A"](random.Random(seed)) for seed in (0, 0, 1))
    assert a == again != other
    assert len(a) == 16 and all(64 <= prompt <= 256 and 64 <= output <= 192 for prompt, output in a)
    assert workloads.WORKLOADS["B"](random.Random(0)) == [(128, 128)]
    assert workloads.WORKLOADS["C"](random.Random(0)) == [(64, 1024)] * 8


def test_random_requests_share_no_first_token_run():
    requests = workloads.random_requests(random.Random(0), [(64, 8)] * 20, vocab_size=256)
    assert len({tuple(request.prompt_token_ids[:16]) for request in requests}) == 20
    assert all(0 <= token < 256 for request in requests for token in request.prompt_token_ids)
    assert requests[0].kv_pairs == 64 + 8 - 1


def test_demand_is_what_the_running_sequences_end_with():
    assert workloads.demand([16, 17, 32], block_size=16, num_running=3) == 1 + 2 + 2
    assert workloads.demand([16, 17, 32], block_size=16, num_running=6) == 10


# Variants


def test_variants_carry_settings_of_compression_and_engine():
    variant = parse_variant("kara:period=32,window_blocks=6,retain_blocks=2,compress_prompt=true,block_size=16")
    assert variant.compression is not None
    assert variant.compression.policy == Pressure(period=32, window_blocks=6, retain_blocks=2, compress_prompt=True)
    assert variant.engine == {"block_size": 16}
    assert parse_variant("vanilla").compression is None
    recalling = parse_variant("kara:policy=pressure,recall_bound=0.05,kv_offloading_size=0.5")
    assert recalling.compression is not None and recalling.compression.recall_bound == 0.05
    assert recalling.engine == {"kv_offloading_size": 0.5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("karo", "'karo' is no variant: choose one of vanilla, auto, kara"),
        ("kara:perod=3", "perod.*period"),
        ("vanilla:period=3", "'period=3' is no setting.*block_size"),
        ("kara:period", "period"),
        ("kara:period=many", "Expected `int"),
        ("kara:period=0", "period=0 is not allowed: at least 1"),
    ],
)
def test_refuses_unknown_variants_and_settings(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_variant(text)


# Reports


def test_table_aligns_its_columns():
    assert report.table(["", "a\nlong", "b"], [["x", "1", "22"], ["yy", "333", "4"]]).splitlines() == [
        "        a    b",
        "     long",
        "--------------",
        "x       1   22",
        "yy    333    4",
    ]


def test_numbers_are_those_of_the_matrices_that_a_step_reads(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny)
    numbers = sum(weight.numel() for name, weight in model.named_parameters() if weight.dim() == 2)
    assert limits.matrix_numbers(load_model_config(tiny)) == numbers


@pytest.mark.parametrize(("name", "parameters"), [("50m", 40.4e6), ("0.6b", 596e6)])
def test_built_in_shapes_have_the_size_they_are_named_for(tmp_path, name, parameters):
    model = load_model_config(shapes.find_model(name, tmp_path))
    assert limits.matrix_numbers(model) == pytest.approx(parameters, rel=2e-3)


# The benchmark


def test_variants_have_pools_of_the_same_bytes(tmp_path):
    make_checkpoint(tmp_path, "qwen3", head_dim=32)
    args = throughput.parse_arguments(["--model", str(tmp_path), "--block-size", "16", "--pool-fraction", "0.5"])
    requests = [Request([1] * 30, 19)] * 10  # 48 KV pairs each
    plain = cache_shape(EngineArgs(tmp_path, block_size=16)).bytes_per_block
    for text in ("vanilla", "vanilla:kv_cache_dtype=int8", "auto"):
        job = jobs.make_job(args, parse_variant(text), tmp_path, requests, 8, 4)
        assert job.engine["kv_cache_memory_bytes"] == 6 * plain, text
    job = jobs.make_job(args, parse_variant("vanilla:num_gpu_blocks_override=9"), tmp_path, requests, 8, 4)
    assert job.engine["num_gpu_blocks_override"] == 9 and "kv_cache_memory_bytes" not in job.engine


def test_throughput_runs_variants_side_by_side(tiny, tmp_path, capfd):
    arguments = ["--model", str(tiny), "--num-prompts", "6", "--input-len", "40", "--output-len", "48"]
    arguments += ["--random-range-ratio", "0.2", "--block-size", "4", "--pool-fraction", "0.5", "--repeats", "1"]
    throughput.benchmark([*arguments, "--variants", "vanilla", KARA, "--output", str(tmp_path)])

    printed = capfd.readouterr().out
    content = json.loads((tmp_path / "throughput.json").read_text())
    assert content["command"] in printed and "--pool-fraction 0.5" in content["command"]
    assert content["machine"]["cores"] >= 1 and content["versions"]["torch"]
    assert content["workload"]["requests"] == 6

    vanilla, kara = (content["variants"][name]["runs"][0] for name in ("vanilla", KARA))
    for run in (vanilla, kara):
        assert run["output_tokens"] == content["workload"]["output_tokens"]
        assert run["output_tokens_per_s"] == pytest.approx(run["output_tokens"] / run["seconds"])
        assert run["steps"] == len(run["timeline"])
        assert run["mean_concurrency"] == pytest.approx(sum(step[0] for step in run["timeline"]) / run["steps"])
        assert run["peak_blocks"] == max(step[1] for step in run["timeline"]) <= run["num_blocks"]
        assert run["peak_kv_bytes"] == run["peak_blocks"] * 4 * (2 * 3 * 2 * 16 * 4)  # K and V, layers, heads, dim, f32
        assert f"{run['output_tokens_per_s']:.1f}" in printed
    assert vanilla["compression_events"] == vanilla["blocks_released"] == 0
    assert kara["blocks_released"] == 2 * kara["windows_compressed"] > 0
    assert kara["entries_evicted"] == 8 * kara["windows_compressed"]
    ratio = kara["output_tokens_per_s"] / vanilla["output_tokens_per_s"]
    assert content["ratios"].keys() == {KARA}
    assert content["ratios"][KARA] == pytest.approx({"median": ratio, "min": ratio, "max": ratio})


def test_a_failed_run_is_reported_with_its_reason(tmp_path):
    job = Job(name="vanilla", model=str(tmp_path), engine={}, compression=None, requests=[Request([1], 1)])
    with pytest.raises(KvLLMError, match=r"variant vanilla failed: .*has no config.json"):
        jobs.run_all({"vanilla": job}, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "absent"], "absent is not a directory"),
        (["--workload", "A", "--input-len", "4", "--output-len", "4"], "give --workload, or both"),
        (["--input-len", "4"], "give --workload, or both --input-len and --output-len"),
        (["--input-len", "4", "--output-len", "0"], "--output-len=0 is not allowed: at least 1"),
        (["--input-len", "4", "--output-len", "4", "--random-range-ratio", "1"], "--random-range-ratio=1.0"),
        (["--pool-fraction", "1.5"], "--pool-fraction=1.5"),
        (["--workload", "B", "--num-blocks", "0"], "num_gpu_blocks_override=0 is not allowed: at least 1"),
        (["--input-len", "50000", "--output-len", "4"], "max_position_embeddings=40960"),
        (["--block-size", "0"], "block_size=0"),
        (["--repeats", "0"], "--repeats=0"),
        (["--block-size", "16", "--variants", "vanilla", "kara:buffer=40"], "buffer=40.*lower buffer"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(arguments, message, capsys):
    with pytest.raises(KvLLMError, match=message):
        throughput.benchmark(arguments)
    assert capsys.readouterr().out == ""


# The demo


@pytest.fixture
def threads():
    """`--short` computes on one thread: give the others back to the tests that follow."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.long
@pytest.mark.usefixtures("threads")
def test_demo_solves_problems_in_a_small_pool(tmp_path, capsys, monkeypatch):
    compression = CompressionConfig(
        method="kara", policy=Pressure(period=8, window_blocks=4, retain_blocks=3), buffer=8, chunk_budget=0
    )
    monkeypatch.setattr(demo, "VARIANTS", (Variant("full"), Variant("kara, keeps 3/4", compression)))
    demo.run_demo(["--short", "--problems", "6", "--output", str(tmp_path)])

    printed = capsys.readouterr().out
    content = json.loads((tmp_path / "demo.json").read_text())
    problem_set = demo.ProblemSet(6, 16, seed=1)
    assert problem_set.problems[0].working.splitlines()[-1] in printed
    full, compressed = content["runs"].values()
    assert full["grades"] == [[True, True]] * 6
    (of_full,), (of_compressed,) = full["measurements"], compressed["measurements"]
    assert of_full["output_tokens"] == sum(tokens + 1 for tokens in problem_set.working_tokens)
    assert of_full["num_blocks"] == of_compressed["num_blocks"] == problem_set.wanted // 4
    assert of_compressed["blocks_released"] == of_compressed["windows_compressed"] > 0
    # A block of bfloat16 has 4 layers, 2 heads, 16 slots, keys and values, 64 channels of 2 bytes.
    pool_bytes = problem_set.wanted // 4 * 4 * 2 * 16 * 2 * 64 * 2
    assert problem_set.engine["kv_cache_memory_bytes"] == full["engine"]["kv_cache_memory_bytes"] == pool_bytes
    for title in ("exact workings", "right answers", "output tokens/s", "preemptions"):
        assert title in printed
