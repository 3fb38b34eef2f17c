"""Drafts under several engines on Ray, each with two ranks: steps that bring several tokens of a sequence."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvllm import LLM, SamplingParams
from tests.helpers.checkpoints import make_checkpoint

pytest.importorskip("ray", reason="needs ray: pip install ray")
pytestmark = pytest.mark.xdist_group("ray")


@pytest.mark.parametrize("method", [pytest.param("ngram", marks=pytest.mark.long), "draft_model"])
def test_replicas_of_ranks_give_the_tokens_of_one_engine_without_drafts(
    ray_cluster, tmp_path: Path, method: str
) -> None:
    make_checkpoint(tmp_path, "qwen3", head_dim=16)
    rng = random.Random(0)
    prompts = [{"prompt_token_ids": rng.choices(range(3, 8), k=40)} for _ in range(6)]
    params = SamplingParams(
        temperature=0.4, seed=3, max_tokens=60, ignore_eos=True, n=2, stop_token_ids=[4], min_tokens=9
    )
    options = {"block_size": 16, "num_gpu_blocks_override": 100, "max_num_seqs": 8}
    expected = LLM(tmp_path, **options).generate(prompts, params, use_tqdm=False)
    options_of = {"ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3}, "draft_model": {"model": str(tmp_path)}}
    drafts = {"method": method, "num_speculative_tokens": 5, **options_of[method]}
    llm = LLM(tmp_path, tensor_parallel_size=2, data_parallel_size=2, speculative_config=drafts, **options)
    try:
        found = llm.generate(prompts, params, use_tqdm=False)
        for mine, theirs in zip(expected, found, strict=True):
            pairs = zip(mine.outputs, theirs.outputs, strict=True)
            assert all((a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason) for a, b in pairs)
        stats = llm.stats()
        assert stats.output_tokens == sum(len(each.token_ids) for output in found for each in output.outputs)
        assert stats.drafts.drafts > 0
    finally:
        llm.llm_engine.close()
