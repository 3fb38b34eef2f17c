"""Preempted sequences whose caches go to the host and come back, in the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvllm import LLM, CompressionConfig, ConfigError, SamplingParams
from kvllm.compression.specs import SPECS
from kvllm.config import LayerGroup
from kvllm.worker.features.offloading import Offloader
from tests.helpers.checkpoints import checkpoint_fixture, make_checkpoint
from tests.helpers.compressions import refusal
from tests.helpers.dense_decoder import DenseDecoder
from tests.helpers.engines import greedy, least_pool, make_llm, random_prompts, random_token_ids, tokens
from tests.helpers.features import feature_of
from tests.helpers.layout_recorder import assert_as_expected, compression_config, run
from tests.helpers.layout_recorder import make_llm as make_recorded
from tests.worker import test_layer_groups as shares
from tests.worker.test_kv_groups import run_poisoned
from tests.worker.test_methods_engine import many_requests

HOST = {"kv_offloading_size": 0.05, "swap": "always"}
SMALL = {"num_gpu_blocks_override": 24, "block_size": 8, "max_num_seqs": 8, "watermark": 0.0}
SMALL |= {"max_num_batched_tokens": 64}
PROMPTS = random_prompts(256, (3, 17, 40, 63, 30))


checkpoint = checkpoint_fixture("qwen3", method_files=True, head_dim=32, num_hidden_layers=2)


@pytest.fixture(scope="module")
def decoder(checkpoint: Path) -> DenseDecoder:
    return DenseDecoder(checkpoint)


def assert_swapped(llm: LLM, *, recomputed: bool = False) -> None:
    """Every preempted sequence came back from the host, and nothing is left there but prefixes."""
    stats = llm.stats()
    assert stats.preemptions > 0 and stats.swapped_in > 0
    if not recomputed:
        assert stats.swapped_out == stats.preemptions and not stats.tokens_recomputed
    llm.llm_engine.scheduler.check()


DTYPES = ("auto", "int8", "int6_int4", "int4", "int6_int4_hadamard", "fp8_e4m3")
USUAL = (("auto", True), ("int6_int4_hadamard", False))


@pytest.mark.parametrize(
    ("dtype", "caching"),
    [
        pytest.param(dtype, caching, marks=() if (dtype, caching) in USUAL else pytest.mark.long)
        for dtype in DTYPES
        for caching in (True, False)
    ],
)
def test_tokens_are_those_of_a_run_without_preemption(checkpoint: Path, dtype: str, caching: bool) -> None:
    options: dict[str, Any] = SMALL | {"kv_cache_dtype": dtype, "enable_prefix_caching": caching}
    options["attention_backend"] = "reference" if dtype == "fp8_e4m3" else "cpu"
    expected = tokens(make_llm(checkpoint, **options | {"num_gpu_blocks_override": 400}), PROMPTS, greedy(60))
    llm = make_llm(checkpoint, **options, **HOST)
    assert tokens(llm, PROMPTS, greedy(60)) == expected
    assert_swapped(llm)
    assert tokens(llm, PROMPTS[::-1], greedy(60)) == expected[::-1]


def test_completions_that_share_a_prompt_with_seeds_and_penalties(checkpoint: Path) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=50, ignore_eos=True, presence_penalty=0.5)
    prompts = PROMPTS[1:4]
    found = []
    for options in ({"num_gpu_blocks_override": 400}, HOST):
        llm = make_llm(checkpoint, **SMALL | options)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append([completion.token_ids for output in outputs for completion in output.outputs])
    assert found[0] == found[1]
    assert_swapped(llm)


def test_windows_come_back(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    options = {"use_sliding_window": True, "sliding_window": 20, "layer_types": types}
    make_checkpoint(tmp_path, "qwen3", head_dim=16, num_hidden_layers=5, **options)
    small = SMALL | {"block_size": 4, "num_gpu_blocks_override": 80}
    expected = tokens(make_llm(tmp_path, **small | {"num_gpu_blocks_override": 800}), PROMPTS, greedy(60))
    llm = make_llm(tmp_path, **small, **HOST)
    assert tokens(llm, PROMPTS, greedy(60)) == expected
    assert_swapped(llm)


def methods() -> list[Any]:
    """By default one method for each kind of state, and each policy."""
    usual = {
        ("h2o", "periodic"),
        ("adakv", "threshold"),
        ("mean_attention", "periodic"),
    }
    cases = []
    for name, spec in SPECS.items():
        policies = ("threshold", "periodic", "standalone")[spec.reselects :]  # prompts here are longer than budgets
        allowed = [policy for policy in policies if not refusal(name, policy)]
        cases += [
            pytest.param(name, policy, marks=() if (name, policy) in usual else pytest.mark.long) for policy in allowed
        ]
    return cases


@pytest.mark.parametrize(("method", "policy"), methods())
def test_a_compressed_cache_goes_on_where_it_was(
    checkpoint: Path, decoder: DenseDecoder, method: str, policy: str
) -> None:
    """Its map in the recorder goes on with it, and all logits, survivors, scores and masses are those of dense
    attention over that map."""
    num_blocks = {"threshold": 11, "standalone": 200}.get(policy, 24)
    llm, _ = make_recorded(checkpoint, compression_config(method, policy), num_gpu_blocks_override=num_blocks, **HOST)
    run(llm, *many_requests())
    assert_swapped(llm, recomputed=True)
    assert_as_expected(decoder, llm)


five_layers = checkpoint_fixture("qwen3", head_dim=16, num_hidden_layers=5)


@pytest.mark.parametrize("method", [pytest.param("keydiff", marks=pytest.mark.long), "kara"])
def test_tokens_with_shares_by_layer_are_those_of_a_run_without_preemption(five_layers: Path, method: str) -> None:
    """A sequence that compresses by its own length alone compresses at the same tokens, wherever it was between."""
    groups = (LayerGroup((0, 2, 3), 8), LayerGroup((1,), 16), LayerGroup((4,), 24))
    chunks = {"chunk_budget": 2} if method == "kara" else {}
    options = {"window_blocks": 24, "layer_groups": groups, "buffer": 4}
    compression = CompressionConfig(method=method, policy="standalone", **options, **chunks)
    options = SMALL | {"block_size": 1, "max_model_len": 128, "compression": compression}
    expected = tokens(make_llm(five_layers, **options | {"num_gpu_blocks_override": 800}), PROMPTS, greedy(60))
    llm = make_llm(five_layers, **options | {"num_gpu_blocks_override": 104}, **HOST)
    assert tokens(llm, PROMPTS, greedy(60)) == expected
    assert_swapped(llm)
    assert llm.stats().windows_compressed >= 5


@pytest.mark.parametrize("name", [pytest.param("keys alone", marks=pytest.mark.long), "observed"])
def test_shares_by_layer_go_on_where_they_were(five_layers: Path, name: str) -> None:
    llm, recorder = shares.recorded(five_layers, compression=shares.METHODS[name], num_gpu_blocks_override=12, **HOST)
    run_poisoned(llm, random_token_ids(5, 50, 34, seed=1), SamplingParams(n=2, seed=3, max_tokens=60, ignore_eos=True))
    assert_swapped(llm, recomputed=True)
    assert llm.stats().windows_compressed >= 5
    assert shares.dropped_by_layer(five_layers, recorder) >= {(32, 16, 32, 32, 0)}


def test_a_sequence_that_cannot_grow_alone_is_computed_again(checkpoint: Path) -> None:
    """From the host it would come back with as many blocks. What its events have left is compressed when it is computed
    again."""
    policy = {"policy": "periodic", "window_blocks": 4, "period": 32, "query_window": 8, "buffer": 2}
    options = {"max_model_len": 400, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 4}
    compression = CompressionConfig(method="snapkv", **policy)
    least = least_pool(checkpoint, compression=compression, **options)
    pool = {"num_gpu_blocks_override": least, "kv_offloading_size": 0.01, "swap": "always"}
    engine = LLM(checkpoint, compression=compression, **pool, **options).llm_engine
    output = engine.add_request("0", [5], greedy(399))
    steps = 0
    while engine.has_unfinished_requests() and (steps := steps + 1) < 1000:
        engine.step()
    assert output.finished and len(output.outputs[0].token_ids) == 399


def test_a_host_without_room_leads_to_computing_again(checkpoint: Path) -> None:
    expected = tokens(make_llm(checkpoint, **SMALL | {"num_gpu_blocks_override": 400}), PROMPTS, greedy(60))
    block = 2 * 2 * 2 * 8 * 32 * 4
    llm = make_llm(checkpoint, **SMALL, **HOST | {"kv_offloading_size": 9 * block / (1 << 30)})
    assert llm.config.num_host_blocks == 9
    assert tokens(llm, PROMPTS, greedy(60)) == expected
    assert 0 < llm.stats().swapped_out < llm.stats().preemptions and llm.stats().tokens_recomputed > 0


@pytest.mark.parametrize("ahead", [False, True])
def test_lost_blocks_are_computed_again(checkpoint: Path, ahead: bool) -> None:
    expected = tokens(make_llm(checkpoint, **SMALL | {"num_gpu_blocks_override": 400}), PROMPTS, greedy(60))
    llm = make_llm(checkpoint, **SMALL, **HOST, async_scheduling=ahead)
    store = feature_of(llm.llm_engine.executor.runner, Offloader).store
    engine = llm.llm_engine
    outputs = [engine.add_request(str(i), prompt, greedy(60)) for i, prompt in enumerate(PROMPTS)]
    while engine.has_unfinished_requests():
        engine.step()
        engine.scheduler.check()
        if engine.stats.steps % 3 == 0:
            store.held.clear()
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert engine.stats.swapped_out > engine.stats.swapped_in and engine.stats.tokens_recomputed > 0


def test_nothing_goes_to_the_host_if_it_never_may(checkpoint: Path) -> None:
    llm = make_llm(checkpoint, **SMALL, **HOST | {"swap": "never"}, enable_prefix_caching=False)
    tokens(llm, PROMPTS, greedy(60))
    stats = llm.stats()
    assert stats.preemptions and stats.tokens_recomputed and not stats.swapped_out and not stats.blocks_stored


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swap": "maybe"}, "swap='maybe' is not allowed: choose one of auto, always, never"),
        ({"kv_offloading_size": 0.0}, "kv_offloading_size=0.0 is not allowed: a number of GiB above 0"),
        ({"kv_offloading_size": 1e-9}, "at least a block of 8 tokens"),
        ({"kv_offloading_size": 1e6}, "GiB of this machine's memory are free"),
        (
            {"kv_offload_dtype": "int3"},
            "choose one of auto, fp8_e4m3, int8, int6_int4, int6_int4_hadamard, int4, int4_hadamard",
        ),
        ({"kv_offload_dtype": "int8", "kv_cache_dtype": "int8"}, "what is quantized already"),
        ({"kv_offloading_backend": "lmcache"}, "kv_offloading_backend='lmcache' is not allowed: choose one of native"),
    ],
)
def test_options_that_cannot_be(checkpoint: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_llm(checkpoint, **SMALL | options)
