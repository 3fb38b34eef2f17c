"""What comes for the first time to an engine on a GPU takes no longer than at any other time: all kernels are there."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from kvllm import LLM, SamplingParams
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.engines import greedy, random_prompts, tokens

MOST_SECONDS = 0.5
"""Of a request of two tokens. To compile a single kernel takes longer."""


def seconds_of(llm: LLM, prompts: list[Any], params: SamplingParams) -> tuple[float, list[list[int]]]:
    begin = time.perf_counter()
    texts = tokens(llm, prompts, params)
    return time.perf_counter() - begin, texts


@pytest.mark.gpu
def test_the_first_request_of_a_kind_waits_for_no_compiler(tmp_path: Path) -> None:
    """Requests that draw and report, and blocks that go to the host and come back."""
    make_checkpoint(tmp_path, "qwen3", head_dim=64, dtype="bfloat16")
    sizes = {"max_model_len": 512, "block_size": 16, "num_gpu_blocks_override": 40}
    llm = LLM(tmp_path, **sizes, kv_offloading_size=0.05, swap="always")
    prompts = random_prompts(256, (100,) * 4)
    alone = [tokens(llm, [prompt], greedy(150))[0] for prompt in prompts]
    for params in (SamplingParams(top_k=20, top_p=0.9, max_tokens=2), SamplingParams(logprobs=2, max_tokens=2)):
        assert seconds_of(llm, prompts[:1], params)[0] < MOST_SECONDS, params
    (first, found), (later, _) = (seconds_of(llm, prompts, greedy(150)) for _ in range(2))
    assert found == alone and llm.stats().swapped_in > 0
    assert first < later + MOST_SECONDS
