"""Models whose layers attend only the last tokens: transformers' tokens, however the engine computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvllm.errors import ConfigError
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.compressions import paper_compression
from tests.helpers.engines import assert_greedy, greedy, make_llm, random_prompts, tokens

WINDOW = 20
FAMILIES: dict[str, dict[str, Any]] = {
    "every layer": {"family": "mistral", "sliding_window": WINDOW},
    "the last layers": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "named layers": {
        "family": "qwen3",
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
SMALL_POOL = {"every layer": 6, "the last layers": 20, "named layers": 20}
"""Blocks of the size that each model's groups have."""
MODES: dict[str, dict[str, Any]] = {
    "prompts in chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 8},
    "preemption": {"max_num_batched_tokens": 24, "max_num_seqs": 8, "watermark": 0.0},
    "blocks kept": {"disable_hybrid_kv_cache_manager": True},
    "blocks kept, preemption": {"disable_hybrid_kv_cache_manager": True, "num_gpu_blocks_override": 24},
    "large blocks": {"block_size": 64, "num_gpu_blocks_override": 60},
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sliding")
    make_checkpoint(path, **FAMILIES[family])
    return path


def test_tokens_equal_transformers(checkpoint: Path, family: str) -> None:
    prompts, params = random_prompts(256), greedy(64)
    expected = tokens(make_llm(checkpoint), prompts, params)
    assert_greedy(checkpoint, prompts, expected)
    for name, options in MODES.items():
        pool = {"num_gpu_blocks_override": SMALL_POOL[family]} if name == "preemption" else {}
        llm = make_llm(checkpoint, **pool, **options)
        assert tokens(llm, prompts, params) == expected, name
        assert (llm.stats().preemptions > 0) == ("preemption" in name)


def test_a_shared_prefix_longer_than_the_window(checkpoint: Path) -> None:
    llm, params = make_llm(checkpoint), greedy(16)
    (long,) = random_prompts(256, (100,))
    other = {"prompt_token_ids": [*long["prompt_token_ids"][:90], 7, 8, 9]}
    for prompt, cached in ((long, 0), (other, 80), (long, 96)):
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert output.metrics.num_cached_tokens == cached
        assert_greedy(checkpoint, [prompt], [output.outputs[0].token_ids])


def test_compression_is_refused(checkpoint: Path) -> None:
    compression = paper_compression(method="kara", period=8, window_blocks=3, retain_blocks=1, buffer=4, chunk_budget=4)
    with pytest.raises(ConfigError, match="layers attend only a sliding window.*all layers share their blocks"):
        make_llm(checkpoint, compression=compression, disable_hybrid_kv_cache_manager=True)
