"""Scores that are added up while sequences decode, in the engine. That survivors are those of dense attention, also
behind a preemption, is a part of `test_methods_engine.py`; the kernels' sums are in `tests/attention`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.compression.methods import kara_sharp
from kvllm.errors import ConfigError
from tests.helpers.checkpoints import checkpoint_fixture
from tests.helpers.compressions import paper_compression
from tests.helpers.engines import greedy, make_llm, random_prompts, tokens

WINDOWS: dict[str, dict[str, Any]] = {
    "periodic": {"window_blocks": 3, "period": 8},
    "exact": {"window_blocks": 3, "period": 8, "retain_tokens": 17},
    "standalone": {"policy": "standalone", "window_blocks": 48, "retain_blocks": 24},
}


checkpoint = checkpoint_fixture("qwen3", head_dim=16)


def sharp(**options: Any) -> CompressionConfig:
    return paper_compression(method="kara_sharp", buffer=8, chunk_budget=4, **options)


def scores_of_events(llm: LLM, prompts: list[dict], max_tokens: int) -> list[torch.Tensor]:
    """The scores that selections were made from, in order, and of all layers."""
    selector, found = llm.llm_engine.executor.runner.compressor.selector, []
    select, score = selector.select, selector.score

    def recomputed(queries: torch.Tensor, keys: torch.Tensor, **offered: Any) -> torch.Tensor:
        found.append(kara_sharp.scores(queries, keys, 8, offered["query_offsets"]))
        return score(queries, keys, **offered)

    def observed(queries: torch.Tensor | None, keys: torch.Tensor, **offered: Any) -> torch.Tensor:
        found.extend(offered["observed"].chunk(len(offered["layers"])))
        return select(queries, keys, **offered)

    selector.select, selector.score = observed, recomputed
    tokens(llm, prompts, greedy(max_tokens))
    return found


@pytest.mark.parametrize(
    ("windows", "backend"),
    [(windows, "cpu") for windows in WINDOWS]
    + [pytest.param(windows, "reference", marks=() if windows == "exact" else pytest.mark.long) for windows in WINDOWS],
)
def test_scores_of_a_first_window_are_those_of_recomputed_queries(checkpoint: Path, windows: str, backend: str) -> None:
    """Until something is dropped, a recomputed query is what it was when it passed by."""
    block_size = 1 if windows == "standalone" else 16
    of_sources = []
    for source in ("observed", "recomputed"):
        compression = sharp(score_source=source, **WINDOWS[windows])
        options = {"compression": compression, "block_size": block_size, "num_gpu_blocks_override": 800 // block_size}
        llm = make_llm(checkpoint, attention_backend=backend, max_num_seqs=4, **options)
        of_sources.append(scores_of_events(llm, random_prompts(256, (21, 40)), 90))
    layers = llm.model_config.num_layers
    observed, recomputed = of_sources
    assert len(observed) == len(recomputed) >= layers
    for found, expected in zip(observed[:layers], recomputed[:layers], strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_no_query_is_recomputed(checkpoint: Path) -> None:
    llm = make_llm(checkpoint, compression=sharp(**WINDOWS["periodic"]))
    llm.llm_engine.executor.runner.model.recompute_queries = None  # a call would raise
    tokens(llm, random_prompts(256, (21, 40)), greedy(90))
    assert llm.stats().compression_events > 0


@pytest.mark.parametrize("missing_blocks", [0, 1])
def test_nothing_is_scored_while_there_is_room_for_all(checkpoint: Path, missing_blocks: int) -> None:
    """By pressure nothing is compressed then, and scores would be added up for nothing. Outputs fill 7 and 9 blocks."""
    compression = sharp(policy="pressure", window_blocks=3, period=8)
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


@pytest.mark.parametrize("windows", WINDOWS)
def test_batch_mates_do_not_change_tokens(checkpoint: Path, windows: str) -> None:
    block_size = 1 if windows == "standalone" else 16
    prompts = random_prompts(256, (21, 40, 3, 77))
    options = {"compression": sharp(**WINDOWS[windows]), "block_size": block_size}
    options |= {"num_gpu_blocks_override": 6400 // block_size, "enable_prefix_caching": False}
    together = tokens(make_llm(checkpoint, **options), prompts, greedy(120))
    if windows == "standalone":  # the engine's clock does not matter there
        alone = make_llm(checkpoint, **options)
        assert together == [tokens(alone, [prompt], greedy(120))[0] for prompt in prompts]
    assert together == tokens(make_llm(checkpoint, max_num_batched_tokens=256, **options), prompts, greedy(120))


def test_a_prompt_that_shares_the_blocks_of_an_output(checkpoint: Path) -> None:
    """Scores belong to the sequence that decodes: one whose prompt is another's output shares its blocks while that one
    scores in them, and both get the tokens that they get alone."""
    prompt = random_prompts(256, (40,))[0]
    options = {"compression": sharp(**WINDOWS["standalone"]), "block_size": 1, "num_gpu_blocks_override": 2000}
    alone = make_llm(checkpoint, enable_prefix_caching=False, **options)
    [whole] = tokens(alone, [prompt], greedy(120))
    longer = {"prompt_token_ids": prompt["prompt_token_ids"] + whole[:25]}
    expected = [whole, *tokens(alone, [longer], greedy(120))]

    llm = make_llm(checkpoint, **options)
    engine, found = llm.llm_engine, {}
    engine.add_request("first", prompt, greedy(120))
    for _ in range(30):
        engine.step()
    engine.add_request("second", longer, greedy(120))
    while engine.has_unfinished_requests():
        found |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
    assert llm.stats().prefix_cache_hits > 40
    assert [found["first"], found["second"]] == expected


def test_completions_that_share_a_prompt(checkpoint: Path) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=100, ignore_eos=True)
    options = {"compression": sharp(policy="standalone", window_blocks=48, retain_blocks=24), "block_size": 1}
    runs = []
    for backend in ("cpu", "reference"):
        llm = make_llm(checkpoint, attention_backend=backend, **options | {"num_gpu_blocks_override": 2000})
        output = llm.generate(random_prompts(256, (21,)), params, use_tqdm=False)[0]
        runs.append([completion.token_ids for completion in output.outputs])
    assert runs[0] == runs[1] and len({tuple(token_ids) for token_ids in runs[0]}) == 3


def test_the_pool_has_room_for_scores(checkpoint: Path) -> None:
    """They count among the bytes of a block: 4 for each KV pair and head, in each layer."""
    plain = make_llm(
        checkpoint,
        compression=sharp(score_source="recomputed"),
        num_gpu_blocks_override=None,
        kv_cache_memory_bytes=4 << 20,
    )
    scored = make_llm(checkpoint, compression=sharp(), num_gpu_blocks_override=None, kv_cache_memory_bytes=4 << 20)
    shape = scored.cache_shape
    more = scored.cache_shape.bytes_per_block - plain.cache_shape.bytes_per_block
    assert more == 4 * shape.num_layers * shape.num_kv_heads * shape.block_size
    scores = scored.llm_engine.executor.runner.cache.scores
    assert scores is not None and scores.nbytes == more * scored.config.num_blocks
    assert plain.llm_engine.executor.runner.cache.scores is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score_source": "seen"}, "score_source='seen' is not allowed: choose one of observed, recomputed"),
        ({"method": "kara", "score_source": "observed"}, "only with method one of kara_causal, kara_sharp"),
        ({"score_source": "observed", "compress_prompt": True}, "only without compress_prompt: a cached prefix"),
    ],
)
def test_a_score_source_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        paper_compression(**({"method": "kara_sharp"} | options))


def test_the_source_of_scores_where_none_is_named() -> None:
    assert sharp().observes_scores and paper_compression(method="kara_causal").observes_scores
    assert not paper_compression(method="kara").observes_scores
    assert not sharp(compress_prompt=True).observes_scores
    assert not sharp(score_source="recomputed").observes_scores
