"""Engines with a quantized KV pool: what does not change tokens, and what a block takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.core.engine import LLMEngine
from kvllm.errors import ConfigError
from kvllm.kvcache.cache import PagedKVCache
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.kvcache.ops.plain import TorchOperations
from kvllm.kvcache.quantize import CODECS
from kvllm.worker.inline import InlineExecutor
from kvllm.worker.model_runner import ModelRunner
from tests.helpers.checkpoints import checkpoint_fixture, make_checkpoint
from tests.helpers.compressions import fitting, paper_compression
from tests.helpers.engines import greedy, make_llm, random_prompts, tokens

FORMATS = pytest.mark.parametrize("name", list(KV_FORMATS))
PROMPTS = random_prompts(256, (5, 33, 64))
PERIODIC = {"policy": "periodic", "period": 8, "window_blocks": 2, "retain_blocks": 1}
THRESHOLD = {"policy": "threshold", "threshold_tokens": 44, "budget_tokens": 25}


checkpoint = checkpoint_fixture("qwen3", head_dim=32, num_hidden_layers=2)


def make(path: Path, name: str, **options) -> LLM:
    return make_llm(path, kv_cache_dtype=name, **options)


def assert_pool(llm: LLM) -> None:
    assert isinstance(llm.llm_engine, LLMEngine)
    blocks = llm.llm_engine.scheduler.blocks
    assert blocks.num_owned == 0 and blocks.num_available == blocks.num_blocks


@FORMATS
def test_chunks_preemption_and_shared_prefixes_do_not_change_tokens(checkpoint: Path, name: str) -> None:
    expected = tokens(make(checkpoint, name), PROMPTS, greedy(24))
    small = make(checkpoint, name, num_gpu_blocks_override=8, max_num_batched_tokens=16, max_num_seqs=8)
    assert tokens(small, PROMPTS, greedy(24)) == expected
    assert small.stats().preemptions > 0
    assert tokens(small, PROMPTS[::-1], greedy(24)) == expected[::-1]
    assert small.stats().prefix_cache_hits > 0
    assert_pool(small)


@FORMATS
def test_the_operator_of_all_layers_computes_the_tokens_of_the_loop(checkpoint: Path, name: str) -> None:
    """Scores that a method observes among them: they are added up by the operator as well."""
    compression = paper_compression(method="mean_attention", buffer=4, **PERIODIC)
    found = []
    for compiled in (True, False):
        llm = make(checkpoint, name, compression=compression, block_size=8)
        runner = runner_of(llm)
        assert runner.model._compiled is not None
        if not compiled:
            runner.model._compiled = None
        found.append(tokens(llm, PROMPTS[:2], greedy(40)))
        assert llm.stats().entries_evicted > 0
    assert found[0] == found[1]


@FORMATS
def test_completions_of_one_prompt_copy_their_block(checkpoint: Path, name: str) -> None:
    """Greedy completions are all the same, whoever copied the block that they shared."""
    llm = make(checkpoint, name)
    (alone,) = tokens(llm, PROMPTS[1:2], greedy(12))
    (output,) = llm.generate(PROMPTS[1:2], greedy(12, n=3), use_tqdm=False)
    assert [completion.token_ids for completion in output.outputs] == [alone] * 3
    assert_pool(llm)


@pytest.mark.parametrize(
    "method, policy, name",
    [
        ("mean_attention", PERIODIC, "int4"),
        pytest.param("kara", PERIODIC, "int8", marks=pytest.mark.long),
        ("keydiff", PERIODIC, "fp8_e4m3"),
        ("h2o", THRESHOLD, "int8"),
        pytest.param("adakv", THRESHOLD, "int4", marks=pytest.mark.long),
        pytest.param("mean_attention", PERIODIC, "int4_hadamard", marks=pytest.mark.long),
        ("kara", PERIODIC, "int6_int4"),
        pytest.param("h2o", THRESHOLD, "int6_int4", marks=pytest.mark.long),
        pytest.param("mean_attention", PERIODIC, "int6_int4_hadamard", marks=pytest.mark.long),
        pytest.param("h2o", THRESHOLD, "int6_int4_hadamard", marks=pytest.mark.long),
    ],
)
def test_methods_see_what_attention_sees(checkpoint: Path, name: str, method: str, policy: dict[str, Any]) -> None:
    """An engine with rounded pairs in float32 samples the same tokens, and drops as many pairs."""
    compression = CompressionConfig(**fitting(method, buffer=4, query_window=6, **policy))
    options = {"compression": compression, "block_size": 8, "attention_backend": "reference"}
    quantized = make_llm(checkpoint, kv_cache_dtype=name, **options)
    rounded = make_llm(checkpoint, **options)
    round_what_is_stored(rounded, name)
    assert tokens(quantized, PROMPTS[:2], greedy(32)) == tokens(rounded, PROMPTS[:2], greedy(32))
    assert quantized.stats().entries_evicted == rounded.stats().entries_evicted > 0
    assert_pool(quantized)


class RoundingOperations(TorchOperations):
    """Store what a format makes of keys and values in a cache that is not quantized."""

    def __init__(self, cache: PagedKVCache, name: str) -> None:
        super().__init__(cache)
        self.codecs = CODECS[KV_FORMATS[name].keys.name], CODECS[KV_FORMATS[name].values.name]

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        pairs = zip(self.codecs, (keys, values), strict=True)
        keys, values = (codec.dequantize(*codec.quantize(vectors)) for codec, vectors in pairs)
        super().store(layer, keys, values, slot_mapping)


def runner_of(llm: LLM) -> ModelRunner:
    assert isinstance(llm.llm_engine, LLMEngine) and isinstance(llm.llm_engine.executor, InlineExecutor)
    return llm.llm_engine.executor.runner


def round_what_is_stored(llm: LLM, name: str) -> None:
    runner = runner_of(llm)
    runner.operations = runner.forward_pass.operations = RoundingOperations(runner.cache, name)


def test_the_pool_counts_scales(checkpoint: Path) -> None:
    """Two layers of two heads of 32 channels, blocks of 16 tokens; scores of 4 bytes where the method observes."""
    sizes = {
        "int8": 2 * 36,
        "fp8_e4m3": 2 * 36,
        "int4_hadamard": 20 + 20,
        "int6_int4": 28 + 20,
        "int4": 2 * 20,
        "int6_int4_hadamard": 28 + 20,
        "auto": 2 * 128,
    }
    for name, pair in sizes.items():
        llm = make_llm(
            checkpoint,
            kv_cache_dtype=name,
            num_gpu_blocks_override=None,
            kv_cache_memory_bytes=1 << 20,
            max_model_len=500,
        )
        of_block = 2 * 2 * 16 * pair
        assert llm.stats().block_bytes == of_block == llm.cache_shape.bytes_per_block
        assert llm.llm_engine.config.num_blocks == (1 << 20) // of_block


def test_what_cannot_be_stored_is_refused_before_weights_are_read(checkpoint: Path, tmp_path: Path) -> None:
    for weights in checkpoint.glob("*.json"):
        (tmp_path / weights.name).symlink_to(weights)
    with pytest.raises(ConfigError, match="kv_cache_dtype='bfloat16' with activations of float32"):
        make_llm(tmp_path, kv_cache_dtype="bfloat16")
    with pytest.raises(ConfigError, match="'flash_attn' does not read a KV cache of int8"):
        make_llm(tmp_path, kv_cache_dtype="int8", attention_backend="flash_attn")
    with pytest.raises(
        ConfigError,
        match="kv_cache_dtype='int3' is not allowed: choose one of auto, bfloat16, fp8_e4m3, int8, "
        "int6_int4, int6_int4_hadamard, int4",
    ):
        make_llm(tmp_path, kv_cache_dtype="int3")


def test_a_rotation_needs_a_power_of_two(tmp_path: Path) -> None:
    """In the pool and in the tiers below it, before weights are read: there are none here."""
    make_checkpoint(tmp_path, "qwen3", head_dim=96)
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    rotated = "int6_int4_hadamard"
    recall = paper_compression(method="keydiff", recall_period=1, recall_dtype=rotated, buffer=4, **THRESHOLD)
    for option, options in (
        ("kv_cache_dtype", {"kv_cache_dtype": rotated}),
        ("kv_offload_dtype", {"kv_offload_dtype": rotated, "kv_offloading_size": 0.01}),
        ("recall_dtype", {"compression": recall, "kv_offloading_size": 0.01}),
    ):
        message = f"{option}='{rotated}' needs a head_dim that is a power of two, the model has 96: give 'int6_int4'"
        with pytest.raises(ConfigError, match=message):
            make_llm(tmp_path, **options)


def test_bfloat16_activations_may_name_their_dtype(checkpoint: Path) -> None:
    prompts, params = PROMPTS[:1], SamplingParams(temperature=0, max_tokens=8)
    named = make_llm(checkpoint, dtype="bfloat16", kv_cache_dtype="bfloat16")
    assert tokens(named, prompts, params) == tokens(make_llm(checkpoint, dtype="bfloat16"), prompts, params)
