"""Engines that attend recent KV pairs as they were before a quantized cache rounded them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.core.engine import LLMEngine
from kvllm.core.prefix_cache import root_hash
from kvllm.errors import ConfigError
from kvllm.kvcache.quantize import CODECS
from kvllm.worker.features.residual import KVResidual
from kvllm.worker.inline import InlineExecutor
from kvllm.worker.model_runner import ModelRunner
from kvllm.worker.state import SequenceState
from tests.helpers.checkpoints import checkpoint_fixture, make_checkpoint
from tests.helpers.compressions import fitting, paper_compression
from tests.helpers.engines import greedy, make_llm, random_prompts, tokens
from tests.helpers.families import FAMILIES
from tests.helpers.features import feature_of

DTYPES = pytest.mark.parametrize("name", ["int4", "int6_int4", "int6_int4_hadamard", "fp8_e4m3"])
PROMPTS = random_prompts(256, (5, 33, 64))
PERIODIC = {"policy": "periodic", "period": 8, "window_blocks": 2, "retain_blocks": 1}
THRESHOLD = {"policy": "threshold", "threshold_tokens": 44, "budget_tokens": 25}


checkpoint = checkpoint_fixture("qwen3", head_dim=32, num_hidden_layers=2)


def make(path: Path, name: str = "int4", held: int = 6, **options) -> LLM:
    return make_llm(path, kv_cache_dtype=name, kv_residual_tokens=held, **options)


def runner_of(llm: LLM) -> ModelRunner:
    assert isinstance(llm.llm_engine, LLMEngine) and isinstance(llm.llm_engine.executor, InlineExecutor)
    return llm.llm_engine.executor.runner


@DTYPES
def test_a_residual_of_all_tokens_undoes_the_rounding(checkpoint: Path, name: str) -> None:
    expected = tokens(make_llm(checkpoint), PROMPTS, greedy(40))
    assert tokens(make(checkpoint, name, 128), PROMPTS, greedy(40)) == expected
    assert tokens(make_llm(checkpoint, kv_cache_dtype="int4"), PROMPTS, greedy(40)) != expected


@DTYPES
def test_chunks_and_preemption_do_not_change_tokens(checkpoint: Path, name: str) -> None:
    options: dict[str, Any] = {"enable_prefix_caching": False}
    expected = tokens(make(checkpoint, name, **options), PROMPTS, greedy(24))
    assert expected != tokens(make_llm(checkpoint, kv_cache_dtype=name), PROMPTS, greedy(24)) or name != "int4"
    options |= {"num_gpu_blocks_override": 8, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    small = make(checkpoint, name, **options)
    assert tokens(small, PROMPTS, greedy(24)) == expected
    assert small.stats().preemptions > 0


def test_what_comes_back_from_the_host_is_held_again(checkpoint: Path) -> None:
    expected = tokens(make(checkpoint), PROMPTS, greedy(48))
    options = {"num_gpu_blocks_override": 11, "max_num_seqs": 8, "kv_offloading_size": 0.1, "swap": "always"}
    small = make(checkpoint, **options)
    assert tokens(small, PROMPTS, greedy(48)) == expected
    assert small.stats().swapped_in > 0


def test_a_prefix_that_is_found_is_read_as_it_is_stored(checkpoint: Path) -> None:
    """Nobody else holds its last pairs as they were. A residual of no use is none."""
    llm = make(checkpoint)
    cold = tokens(llm, PROMPTS, greedy(1))
    assert llm.stats().prefix_cache_hits == 0
    warm = tokens(llm, PROMPTS, greedy(1))
    assert llm.stats().prefix_cache_hits > 0
    alone = tokens(make_llm(checkpoint, kv_cache_dtype="int4"), PROMPTS, greedy(1))
    assert [len(each) for each in warm] == [1, 1, 1] and len(alone) == len(cold)
    assert tokens(llm, PROMPTS, greedy(1)) == warm


def test_blocks_with_another_residual_are_other_blocks(checkpoint: Path) -> None:
    """Their keys and values come from another attention to the tokens before."""
    hashes = set()
    for held in (0, 6, 7):
        llm = make(checkpoint, held=held)
        assert isinstance(llm.llm_engine, LLMEngine)
        hashes.add(root_hash(None, llm.llm_engine.scheduler.blocks.kv_cache_dtype))
    assert len(hashes) == 3


def test_completions_of_one_prompt_begin_with_the_same_pairs(checkpoint: Path) -> None:
    llm = make(checkpoint, enable_prefix_caching=False)
    (alone,) = tokens(llm, PROMPTS[1:2], greedy(20))
    (output,) = llm.generate(PROMPTS[1:2], greedy(20, n=3), use_tqdm=False)
    assert [completion.token_ids for completion in output.outputs] == [alone] * 3


@pytest.mark.parametrize(
    "method, policy",
    [
        ("mean_attention", PERIODIC),
        ("kara", PERIODIC),
        ("keydiff", THRESHOLD),
        ("h2o", THRESHOLD),
        ("adakv", THRESHOLD),
    ],
)
def test_the_operator_of_all_layers_computes_the_tokens_of_the_loop(
    checkpoint: Path, method: str, policy: dict[str, Any]
) -> None:
    compression = CompressionConfig(**fitting(method, buffer=6, query_window=6, **policy))
    found = []
    for compiled in (True, False):
        llm = make(checkpoint, compression=compression, block_size=8)
        runner = runner_of(llm)
        assert runner.model._compiled is not None
        if not compiled:
            runner.model._compiled = None
        found.append(tokens(llm, PROMPTS[:2], greedy(40)))
        assert llm.stats().entries_evicted > 0
    assert found[0] == found[1]


@pytest.mark.parametrize("policy", [PERIODIC, THRESHOLD], ids=["windows", "threshold"])
def test_a_compression_drops_nothing_that_is_held(checkpoint: Path, policy: dict[str, Any]) -> None:
    """The last pairs in the cache are those that are held, rounded."""
    compression = paper_compression(method="keydiff", buffer=6, **policy)
    llm = make(checkpoint, compression=compression, block_size=8)
    assert isinstance(llm.llm_engine, LLMEngine)
    llm.llm_engine.add_request("0", PROMPTS[1], greedy(60))
    runner, checked = runner_of(llm), 0
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        for state in runner.states.values():
            assert_held_pairs_are_cached(runner, state)
            checked += state.dropped > 0
    assert checked > 30


def assert_held_pairs_are_cached(runner: ModelRunner, state: SequenceState) -> None:
    residual = feature_of(runner, KVResidual)
    slot, length = state.table_slot, state.cached_length
    rows = torch.arange(state.logical_length - 6, state.logical_length) % 6
    tables = runner.tables.parts[0].table[slot, : runner.tables.parts[0].num_blocks[slot]]
    blocks = torch.from_numpy(tables.copy())[None]
    for layer in range(2):
        gathered = (
            runner.operations.gather_keys([layer], blocks, length),
            runner.operations.gather_values([layer], blocks, length),
        )
        for plane, cached in enumerate(gathered):
            held = residual.pairs[layer, plane, slot][rows].transpose(0, 1)
            codec = CODECS["int4"]
            assert torch.equal(codec.dequantize(*codec.quantize(held)), cached[0, :, -6:])


def test_the_memory_is_counted(checkpoint: Path) -> None:
    """Two layers, keys and values, 16 sequences of 6 tokens, two heads of 32 channels of 4 bytes."""
    taken = 2 * 2 * 16 * 6 * 2 * 32 * 4
    pool: dict[str, Any] = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 16}
    llm, without = make(checkpoint, **pool), make(checkpoint, held=0, **pool)
    assert llm.stats().kv_residual_bytes == taken and without.stats().kv_residual_bytes == 0
    assert llm.stats().num_blocks == ((1 << 20) - taken) // llm.stats().block_bytes < without.stats().num_blocks


@pytest.mark.parametrize(
    "options, message",
    [
        ({"held": -1}, "kv_residual_tokens=-1 is not allowed: between 0 and 512"),
        ({"held": 513}, "kv_residual_tokens=513 is not allowed: between 0 and 512"),
        (
            {"name": "auto"},
            "kv_residual_tokens=6 is not allowed: with a kv_cache_dtype that rounds KV pairs, one of fp8_e4m3",
        ),
        (
            {"compression": paper_compression(method="keydiff", buffer=4, **PERIODIC)},
            "kv_residual_tokens=6 is not allowed: at most the compression's buffer=4, which nothing drops",
        ),
        (
            {"compression": paper_compression(buffer=8, recall_bound=0.3, **PERIODIC), "kv_offloading_size": 0.1},
            "kv_residual_tokens=6 is not allowed: not beside recall_period or recall_bound",
        ),
        ({"attention_backend": "reference"}, "'reference' does not read kv_residual_tokens: use 'cpu'"),
    ],
)
def test_what_does_not_go_together_is_refused(checkpoint: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(checkpoint, **options)


def test_a_residual_longer_than_a_sliding_window_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "mistral", sliding_window=16)
    with pytest.raises(ConfigError, match="kv_residual_tokens=17 is not allowed: at most the model's sliding window"):
        LLM(tmp_path, kv_cache_dtype="int4", kv_residual_tokens=17, max_model_len=64)


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "mistral-window"])
def test_a_residual_as_long_as_a_sliding_window_undoes_its_rounding(tmp_path: Path, name: str) -> None:
    """In layers that attend all tokens, a residual of all of a text does."""
    make_checkpoint(tmp_path, **FAMILIES[name] | {"head_dim": 32, "sliding_window": 64})
    options: dict[str, Any] = {"max_model_len": 64, "enable_prefix_caching": False}
    prompts = random_prompts(256, (5, 33))
    expected = tokens(make_llm(tmp_path, **options), prompts, greedy(24))
    assert tokens(make(tmp_path, held=64, **options), prompts, greedy(24)) == expected


@pytest.mark.parametrize("name, blocks", [("gemma3", 40), ("gpt-oss", 24), ("mistral-window", 12)])
def test_chunks_and_preemption_do_not_change_tokens_beside_sliding_windows(
    tmp_path: Path, name: str, blocks: int
) -> None:
    make_checkpoint(tmp_path, **FAMILIES[name] | {"head_dim": 32})
    options: dict[str, Any] = {"max_model_len": 96, "enable_prefix_caching": False}
    expected = tokens(make(tmp_path, **options), PROMPTS, greedy(24))
    small = make(tmp_path, **options, num_gpu_blocks_override=blocks, max_num_batched_tokens=16, max_num_seqs=8)
    assert tokens(small, PROMPTS, greedy(24)) == expected
    assert small.stats().preemptions > 0 or name != "gemma3"  # of which all layers but one hold 7 tokens


def test_layers_with_shares_of_their_own_have_a_residual(checkpoint: Path) -> None:
    """What is recent is the same in all of them: chunks and preemption do not change a token."""
    groups = ({"layers": [0], "retain_blocks": 1}, {"layers": [1], "retain_blocks": 2})
    compression = paper_compression(method="keydiff", buffer=6, **PERIODIC | {"window_blocks": 3}, layer_groups=groups)
    options: dict[str, Any] = {"block_size": 8, "compression": compression, "enable_prefix_caching": False}
    found = []
    for compiled in (True, False):
        llm = make(checkpoint, **options)
        if not compiled:
            runner_of(llm).model._compiled = None
        found.append(tokens(llm, PROMPTS, greedy(60)))
        assert llm.stats().entries_evicted > 0
    assert found[0] == found[1] != tokens(make(checkpoint, held=0, **options), PROMPTS, greedy(60))


def test_logprobs_of_a_prompt_are_those_of_its_steps(checkpoint: Path) -> None:
    """A prompt that is read at once attends what its tokens would have attended one by one."""
    llm = make(checkpoint, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=0, ignore_eos=True)
    (output,) = llm.generate(PROMPTS[1:2], params, use_tqdm=False)
    completion = output.outputs[0]
    whole = {"prompt_token_ids": [*output.prompt_token_ids, *completion.token_ids]}
    (read,) = llm.generate([whole], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    assert completion.logprobs is not None and read.prompt_logprobs is not None
    for token_id, one, other in zip(
        completion.token_ids, completion.logprobs, read.prompt_logprobs[-len(completion.token_ids) :], strict=True
    ):
        assert one[token_id].logprob == other[token_id].logprob
