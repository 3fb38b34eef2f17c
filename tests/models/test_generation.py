"""Every kind of model in an engine: transformers' greedy tokens under chunks, preemption, prefix cache, compression."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvllm import CompressionConfig
from kvllm.engine_args import EngineArgs
from kvllm.kvcache.groups import UNIFORM
from kvllm.models.config import load_model_config
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import assert_greedy, greedy, make_llm, random_prompts, tokens
from tests.helpers.families import FAMILIES

CASES = (
    "llama-yarn",
    "llama-biases",
    "mistral-window",
    "ministral3",
    "mixtral",
    "qwen3-moe",
    "phi4-mini",
    "gemma2",
    "gemma3",
    "gpt-oss",
)
CROWDED: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
OPTIONS: dict[str, Any] = {"period": 8, "window_blocks": 3, "buffer": 4, "chunk_budget": 4}


def crowded(checkpoint: Path) -> dict[str, Any]:
    """Options with a pool that the longest sequence nearly fills, where layers have windows."""
    groups = EngineArgs(checkpoint, block_size=16, **CROWDED).engine_config.kv_groups
    alone = sum(group.most_blocks(228, 16, 64) for group in groups)
    return CROWDED | {"num_gpu_blocks_override": 40 if groups == UNIFORM else alone + 4}


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(path, **FAMILIES[request.param])
    return path


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """The tokens of an engine with too few blocks, which are transformers'; and the same from cached prefixes."""
    llm, prompts = make_llm(checkpoint, **crowded(checkpoint)), random_prompts(256)
    found = tokens(llm, prompts)
    assert_greedy(checkpoint, prompts, found)
    assert llm.stats().preemptions > 0
    tokens(llm, prompts[-1:], greedy(1))  # the window behind the prompt may have been lost in the crowd
    again = llm.generate(prompts[-1:], greedy(), use_tqdm=False)[0]
    assert again.outputs[0].token_ids == found[-1] and again.metrics.num_cached_tokens == 96
    return found


def test_greedy_tokens_are_those_of_transformers(expected: list[list[int]]) -> None:
    assert [len(each) for each in expected] == [128] * 8


def test_compression(checkpoint: Path, expected: list[list[int]]) -> None:
    """Retention of everything changes no token, and what is kept does not depend on the backend."""
    windows = {layer.window for layer in load_model_config(checkpoint).layers}
    if windows and None not in windows:
        pytest.skip("layers with a window are not compressed")
    prompts, options = random_prompts(256), OPTIONS | ({"method": "keydiff"} if windows else {})
    whole = CompressionConfig(retain_blocks=3, **options)
    assert tokens(make_llm(checkpoint, compression=whole), prompts) == expected
    llm = make_llm(checkpoint, compression=CompressionConfig(retain_blocks=1, **options), **crowded(checkpoint))
    assert [len(each) for each in tokens(llm, prompts)] == [128] * 8
    assert llm.stats().windows_compressed >= 8
