"""Scores that are added up while sequences decode, in the engine. That survivors are those of dense attention, also
after a preemption, is a part of `test_methods_engine.py`; the kernels' sums are in `tests/attention`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.errors import ConfigError
from tests.helpers.checkpoints import checkpoint_fixture, make_checkpoint
from tests.helpers.compressions import paper_compression
from tests.helpers.engines import greedy, least_pool, make_llm, random_prompts, tokens

WINDOWS: dict[str, dict[str, Any]] = {
    "blocks": {"window_blocks": 3, "period": 8},
    "exact": {"window_blocks": 3, "period": 8, "retain_tokens": 17},
}


checkpoint = checkpoint_fixture("qwen3", head_dim=16)


def observing(**options: Any) -> CompressionConfig:
    return paper_compression(method="mean_attention", **{"buffer": 8} | options)


def test_no_query_is_recomputed(checkpoint: Path) -> None:
    llm = make_llm(checkpoint, compression=observing(**WINDOWS["blocks"]))
    llm.llm_engine.executor.runner.model.recompute_queries = None  # a call would raise
    tokens(llm, random_prompts(256, (21, 40)), greedy(90))
    assert llm.stats().compression_events > 0


@pytest.mark.parametrize("missing_blocks", [0, 1])
def test_nothing_is_scored_while_there_is_room_for_all(checkpoint: Path, missing_blocks: int) -> None:
    """By pressure nothing is compressed then, and scores would be added up for nothing. Outputs fill 7 and 9 blocks."""
    compression = observing(policy="pressure", window_blocks=3, period=8)
    llm = make_llm(checkpoint, compression=compression, num_gpu_blocks_override=16 - missing_blocks, max_model_len=130)
    scores = llm.llm_engine.executor.runner.cache.scores
    assert scores is not None
    scores.fill_(torch.nan)
    prompts = random_prompts(256, (21, 40))
    found = tokens(llm, prompts, greedy(90))
    assert bool(scores.isnan().all()) == (missing_blocks == 0)
    if not missing_blocks:
        assert llm.stats().compression_events == 0
        assert found == tokens(make_llm(checkpoint), prompts, greedy(90))


@pytest.mark.parametrize("swap", ["never", "always"])
def test_scoring_begins_in_time_beside_sliding_windows(tmp_path: Path, swap: str) -> None:
    """Their blocks come out of the same pool. Scored from the beginning, a sequence alone is never preempted."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    make_checkpoint(tmp_path, "ministral", head_dim=16, sliding_window=40, layer_types=kinds)
    options = {"block_size": 4, "max_model_len": 97, "max_num_seqs": 1, "max_num_batched_tokens": 1, "swap": swap}
    compression = CompressionConfig(window_blocks=8, retain_blocks=6)
    least = least_pool(tmp_path, compression=compression, **options)
    pool = {"num_gpu_blocks_override": least, "kv_offloading_size": 0.01}
    llm = LLM(tmp_path, compression=compression, **pool, **options)
    [output] = llm.generate([[5]], greedy(96), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 96
    assert llm.stats().preemptions == 0 and llm.stats().windows_compressed > 0


@pytest.mark.parametrize("windows", WINDOWS)
def test_chunks_and_batch_mates_do_not_change_tokens(checkpoint: Path, windows: str) -> None:
    prompts = random_prompts(256, (21, 40, 3, 77))
    options = {"compression": observing(**WINDOWS[windows]), "num_gpu_blocks_override": 400}
    options["enable_prefix_caching"] = False
    together = tokens(make_llm(checkpoint, **options), prompts, greedy(120))
    assert together == tokens(make_llm(checkpoint, max_num_batched_tokens=256, **options), prompts, greedy(120))
    assert tokens(make_llm(checkpoint, **options), prompts[::-1], greedy(120)) == together[::-1]


def test_a_prompt_that_shares_the_blocks_of_an_output(checkpoint: Path) -> None:
    """Scores belong to the sequence that decodes: one whose prompt is another's output shares its blocks while that one
    scores in them, and both get the tokens that they get with prompts of their own."""
    prompt = random_prompts(256, (40,))[0]
    options = {"compression": observing(**WINDOWS["blocks"]), "num_gpu_blocks_override": 200}
    [whole] = tokens(make_llm(checkpoint, enable_prefix_caching=False, **options), [prompt], greedy(120))
    longer = {"prompt_token_ids": prompt["prompt_token_ids"] + whole[:25]}

    def run(**caching: bool) -> tuple[list[list[int]], int]:
        llm = make_llm(checkpoint, **options, **caching)
        engine, found = llm.llm_engine, {}
        engine.add_request("first", prompt, greedy(120))
        for _ in range(30):
            engine.step()
        engine.add_request("second", longer, greedy(120))
        while engine.has_unfinished_requests():
            found |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
        assert llm.stats().compression_events > 0
        return [found["first"], found["second"]], llm.stats().prefix_cache_hits

    expected, _ = run(enable_prefix_caching=False)
    assert run() == (expected, 64)


def test_completions_that_share_a_prompt(checkpoint: Path) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=100, ignore_eos=True)
    options = {"compression": observing(**WINDOWS["blocks"]), "num_gpu_blocks_override": 200}
    runs = []
    for backend in ("cpu", "reference"):
        llm = make_llm(checkpoint, attention_backend=backend, **options)
        output = llm.generate(random_prompts(256, (21,)), params, use_tqdm=False)[0]
        runs.append([completion.token_ids for completion in output.outputs])
        assert llm.stats().compression_events > 0
    assert runs[0] == runs[1] and len({tuple(token_ids) for token_ids in runs[0]}) == 3


def test_the_pool_has_room_for_scores(checkpoint: Path) -> None:
    """They count among the bytes of a block: 4 for each KV pair and head, in each layer."""
    options: dict[str, Any] = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 4 << 20}
    plain = make_llm(checkpoint, compression=paper_compression(method="kara", buffer=8), **options)
    scored = make_llm(checkpoint, compression=observing(), **options)
    shape = scored.cache_shape
    more = scored.cache_shape.bytes_per_block - plain.cache_shape.bytes_per_block
    assert more == 4 * shape.num_layers * shape.num_kv_heads * shape.block_size
    scores = scored.llm_engine.executor.runner.cache.scores
    assert scores is not None and scores.nbytes == more * scored.config.num_blocks
    assert plain.llm_engine.executor.runner.cache.scores is None


def test_prompts_have_no_scores() -> None:
    with pytest.raises(ConfigError, match="compress_prompt=True is not allowed: only without it: .* adds its scores"):
        observing(compress_prompt=True)
