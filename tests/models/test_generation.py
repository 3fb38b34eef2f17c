"""Every kind of model in an engine: transformers' greedy tokens under chunks, preemption, prefix cache, compression."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvllm import LLM, CompressionConfig
from kvllm.engine_args import EngineArgs
from kvllm.errors import CheckpointError, ConfigError
from kvllm.models.config import load_model_config
from tests.helpers.checkpoints import add_method_files, make_checkpoint
from tests.helpers.compressions import paper_compression
from tests.helpers.engines import assert_greedy, greedy, make_llm, random_prompts, tokens
from tests.helpers.families import FAMILIES
from tests.helpers.recorder import Recorder, assert_dense
from tests.helpers.thread_executor import ThreadExecutor, shared_memory_shards
from tests.helpers.transformers_decoder import TransformersDecoder

CASES = (
    "llama-yarn",
    "llama-biases",
    "mistral-window",
    "ministral",
    "ministral3",
    "mixtral",
    "qwen2-last-windows",
    "qwen3-named-windows",
    "qwen3-moe",
    "qwen3.5",
    "qwen3-next",
    "lfm2",
    "lfm2-moe",
    "falcon-h1",
    "smollm3",
    "glm4",
    "glm4-moe",
    "deepseek-v3",
    "granite",
    "granite4",
    "cohere2",
    "olmo2",
    "olmo3",
    "phi4-mini",
    "gemma2",
    "gemma3",
    "gemma3-images",
    "gemma4",
    "gemma4-experts",
    "gpt-oss",
)
USUAL = (
    "llama-yarn",
    "mistral-window",
    "qwen3-named-windows",
    "qwen3-moe",
    "qwen3.5",
    "smollm3",
    "phi4-mini",
    "gemma2",
    "gpt-oss",
)
"""Each kind of layer and of attention once. Logits of all families are compared in test_models.py."""
COMPRESSION: dict[str, Any] = {"period": 8, "window_blocks": 3, "retain_blocks": 1, "buffer": 4}


NEW_TOKENS = 64


def families(*usual: str) -> pytest.MarkDecorator:
    """Checkpoints of all families, of which only the `usual` ones are run by default."""
    cases = [pytest.param(name, marks=() if name in usual else pytest.mark.long) for name in CASES]
    return pytest.mark.parametrize("checkpoint", cases, indirect=True, scope="module")


def crowded(checkpoint: Path, new_tokens: int, block_size: int = 16) -> dict[str, Any]:
    """Options with a pool that the longest sequence nearly fills."""
    options: dict[str, Any] = {"block_size": block_size, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    groups = EngineArgs(checkpoint, **options).engine_config.kv_groups
    alone = sum(group.most_blocks(100 + new_tokens, block_size, 64) for group in groups)
    return options | {"num_gpu_blocks_override": alone + 4}


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(path, **FAMILIES[request.param])
    return path


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """The tokens of an engine with too few blocks, which are transformers'."""
    llm, prompts = make_llm(checkpoint, **crowded(checkpoint, NEW_TOKENS)), random_prompts(256)
    found = tokens(llm, prompts, greedy(NEW_TOKENS))
    assert_greedy(checkpoint, prompts, found)
    assert_crowded_and_cached(llm, prompts[-1], found[-1])
    return found


def assert_crowded_and_cached(llm: LLM, prompt: dict, expected: list[int]) -> None:
    """Sequences were preempted, and a prompt's cached blocks give the tokens that it gave before."""
    assert llm.stats().preemptions > 0
    tokens(llm, [prompt], greedy(1))  # the blocks of its last window may have been lost in the crowd
    again = llm.generate([prompt], greedy(len(expected)), use_tqdm=False)[0]
    assert again.outputs[0].token_ids == expected
    assert again.metrics.num_cached_tokens == (96 if llm.config.shares_prefixes else 0)


@families(*USUAL)
def test_greedy_tokens_are_those_of_transformers(expected: list[list[int]]) -> None:
    assert [len(each) for each in expected] == [NEW_TOKENS] * 8


@families("mistral-window", "qwen3-moe", "gemma2")
def test_two_ranks(checkpoint: Path, expected: list[list[int]]) -> None:
    llm, prompts = make_llm(checkpoint, **crowded(checkpoint, 32)), random_prompts(256)
    with shared_memory_shards(2) as shards:
        llm.llm_engine.executor = ThreadExecutor(llm, checkpoint, shards)
        assert tokens(llm, prompts, greedy(32)) == [each[:32] for each in expected]
        assert_crowded_and_cached(llm, prompts[-1], expected[-1][:32])


def compressed_tokens(llm: LLM) -> list[list[int]]:
    found = tokens(llm, random_prompts(256, lengths=(1, 17, 40, 63, 100)), greedy(40))
    assert llm.stats().windows_compressed >= 5
    return found


@families("llama-yarn", "qwen3-named-windows", "gemma2", "gpt-oss")
def test_compression(checkpoint: Path) -> None:
    """Logits are those of transformers, whose full layers attend what survived; two ranks give the same tokens."""
    model = load_model_config(checkpoint)
    windows = list(model.windows)
    if None not in windows:
        pytest.skip("layers with a window are not compressed")
    again = set(windows) == {None} and not model.recurrent
    method = "kara" if again else "keydiff"  # which needs no queries again
    options = crowded(checkpoint, 40, block_size=8)
    chunks = {"chunk_budget": 4} if method == "kara" else {}
    options["compression"] = paper_compression(method=method, **COMPRESSION, **chunks)
    llm = make_llm(checkpoint, **options)
    recorder = llm.llm_engine.executor = Recorder(llm.llm_engine.executor.runner, llm.config)
    found = compressed_tokens(llm)
    decoder = TransformersDecoder(checkpoint)
    sources = list(model.two_sizes.sources if model.two_sizes else range(model.num_layers))
    for text in recorder.texts:
        if text.logits:  # else it was preempted before it was back
            text.visible = with_windows(text.visible, windows)[sources]
            assert_dense(decoder, text, tolerance=1e-4)  # transformers rotates in 32 bits
    llm = make_llm(checkpoint, **options)
    with shared_memory_shards(2) as shards:
        llm.llm_engine.executor = ThreadExecutor(llm, checkpoint, shards)
        assert compressed_tokens(llm) == found


def test_methods_that_reckon_with_one_rotation_refuse_two(tmp_path: Path) -> None:
    """Of layers that are compressed: with short texts, Gemma 3's layers with a window are among them."""
    options: dict[str, Any] = {"block_size": 8}
    options["compression"] = paper_compression(method="expected_attention", **COMPRESSION)
    make_checkpoint(tmp_path, **FAMILIES["smollm3"])
    with pytest.raises(ConfigError, match="layers 3 of the model rotate keys in another way .* such as mean_attention"):
        make_llm(tmp_path, **options)
    with pytest.raises(ConfigError, match="layers 3 of the model"):
        add_method_files(tmp_path)
    options["compression"] = paper_compression(method="triattention", **COMPRESSION)
    make_checkpoint(tmp_path, **FAMILIES["gemma3"] | {"sliding_window": 100})
    add_method_files(tmp_path)
    tokens(make_llm(tmp_path, **options, max_model_len=128), random_prompts(256, (40,)), greedy(40))
    with pytest.raises(ConfigError, match="layers 0, 1, 2, 3, 4, 6 of the model rotate keys"):
        make_llm(tmp_path, **options, max_model_len=100)


def test_layers_that_share_kv_pairs_have_methods_that_read_no_queries(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **FAMILIES["gemma4"])
    assert make_llm(tmp_path, compression=CompressionConfig()).config.compression.method == "streaming"
    with pytest.raises(ConfigError, match="layers of the model attend KV pairs of others, .*: use one of keydiff"):
        make_llm(tmp_path, compression=CompressionConfig(method="mean_attention"))
    with pytest.raises(ConfigError, match="kv_residual_tokens=4 .* not where layers of the model attend"):
        make_llm(tmp_path, kv_cache_dtype="int8", kv_residual_tokens=4)
    with pytest.raises(ConfigError, match="layers that attend KV pairs of others, which are computed for text alone"):
        LLM(tmp_path, runner="pooling", convert="embed")
    with pytest.raises(CheckpointError, match="heads of two sizes, of which nothing is calibrated"):
        add_method_files(tmp_path)


def with_windows(visible: torch.Tensor, windows: Sequence[int | None]) -> torch.Tensor:
    """What full layers see -> what all see: `[layers, kv_heads, tokens, positions]`."""
    full, rows = iter(visible), torch.arange(visible.shape[-1])
    seen = [rows > rows[:, None] - window if window else next(full) for window in windows]
    return torch.stack([(each & (rows <= rows[:, None])).expand_as(visible[0]) for each in seen])
