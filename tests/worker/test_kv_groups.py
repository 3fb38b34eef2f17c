"""KV groups in the engine: layers with a sliding window keep what it reaches, and only the others are compressed.

Between steps all memory that no table reaches any more is NaN, so a result that reads a released slot shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvllm import LLM, ConfigError, SamplingParams
from kvllm.core.sequence import Sequence
from kvllm.kvcache.groups import KVGroup
from kvllm.outputs import RequestOutput
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.compressions import paper_compression
from tests.helpers.dense_decoder import DenseDecoder
from tests.helpers.engines import greedy, make_llm, random_token_ids
from tests.helpers.recorder import Recorder, poison

WINDOW = 20
KEPT = {"disable_hybrid_kv_cache_manager": True}
SLIDING = (0, 2, 3)
"""The layers with a window, of five: those are two parts of the two layers that a block holds."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixed")
    types = ["sliding_attention" if layer in SLIDING else "full_attention" for layer in range(5)]
    options: dict[str, Any] = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": types}
    make_checkpoint(path, "qwen3", head_dim=16, num_hidden_layers=5, **options)
    return path


def run_poisoned(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    engine = llm.llm_engine
    outputs = [engine.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    while engine.has_unfinished_requests():
        poison(engine.scheduler, engine.executor.runner.cache)
        engine.step()
        engine.scheduler.check()
    return outputs


def texts(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


def test_groups_of_a_mixed_model(checkpoint: Path) -> None:
    llm = make_llm(checkpoint)
    assert llm.config.kv_groups == (KVGroup(None, ((1, 4),)), KVGroup(WINDOW, ((0, 2), (3,))))
    cache = llm.llm_engine.executor.runner.cache
    assert cache.data.shape[0] == 2 and cache.shape.places == (0, 0, 1, 0, 1)
    assert make_llm(checkpoint, max_model_len=WINDOW).config.kv_groups == (KVGroup(None),)  # no text is longer
    assert make_llm(checkpoint, **KEPT).config.kv_groups == (KVGroup(None, ((),)),)


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.long), {"num_gpu_blocks_override": 60}, {"block_size": 7}],
    ids=str,
)
def test_no_released_slot_is_read(checkpoint: Path, options: dict) -> None:
    """Prompts in chunks, branches that share blocks, a common beginning, and a pool that is too small."""
    options = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 8, "watermark": 0.0} | options
    params = SamplingParams(n=2, seed=3, max_tokens=30, ignore_eos=True)
    common = random_token_ids(45)[0]
    prompts = [*random_token_ids(3, 17, 40, 63, seed=1), *([*common, number] for number in (5, 6))]
    expected = make_llm(checkpoint, **(options | KEPT | {"num_gpu_blocks_override": 400}))
    expected = texts(run_poisoned(expected, prompts, params))
    llm = make_llm(checkpoint, **options)
    assert texts(run_poisoned(llm, prompts, params)) == expected
    assert texts(run_poisoned(llm, prompts, params)) == expected  # from cached prefixes
    assert llm.stats().prefix_cache_hits > 0
    assert (llm.stats().preemptions > 0) == ("num_gpu_blocks_override" in options)
    assert llm.llm_engine.scheduler.blocks.num_owned == 0


@pytest.mark.parametrize(("window", "block_size", "most"), [(WINDOW, 16, 3), (WINDOW, 4, 6)])
def test_a_sequence_holds_its_windows(checkpoint: Path, window: int, block_size: int, most: int) -> None:
    """At most ceil(window / block) + 1 blocks of each part while it decodes, and the text in the full layers."""
    llm = make_llm(checkpoint, block_size=block_size)
    engine = llm.llm_engine
    engine.add_request("0", random_token_ids(100)[0], greedy(100))
    held = set()
    while engine.has_unfinished_requests():
        engine.step()
        for seq in engine.scheduler.running:
            full, *sliding = seq.tables
            held |= {len(table.blocks) for table in sliding}
            assert len(full.blocks) == -(-seq.logical_length // block_size)
            assert len(sliding) == 2 and llm.stats().blocks_in_use == seq.num_blocks
    assert max(held) in (most - 1, most)  # the bound holds wherever the window begins in a block
    assert -(-window // block_size) + 1 == most


def test_a_prefix_hit_needs_the_window_alone(checkpoint: Path) -> None:
    """Of sliding groups only what the next token attends: five blocks in each part. One that is missing makes the hit
    shorter."""
    llm, prompt = make_llm(checkpoint, block_size=4), random_token_ids(101)[0]
    expected = texts(run_poisoned(llm, [prompt], greedy(1)))
    blocks = llm.llm_engine.scheduler.blocks
    hit = blocks.match_prefix(sequence_of(prompt), 100)
    assert hit.num_blocks == 25 and list(map(len, hit.tables)) == [25, 5, 5]
    lost = hit.tables[1][-2]
    blocks.prefix_cache.remove(lost)
    blocks.pool.own([lost])
    blocks.pool.release([lost])
    shorter = blocks.match_prefix(sequence_of(prompt), 100)
    assert shorter.num_blocks == len(shorter.tables[0]) == 23 and lost not in shorter.tables[1]
    assert texts(run_poisoned(llm, [prompt], greedy(1))) == expected


def sequence_of(prompt: list[int]) -> Sequence:
    return Sequence(99, "99", prompt, greedy(1), max_length=200)


METHODS = {
    "keydiff": paper_compression(method="keydiff", period=4, window_blocks=3, buffer=4),
    "mean_attention": paper_compression(method="mean_attention", period=4, window_blocks=3, buffer=4),
}


@pytest.mark.parametrize("name", METHODS)
def test_full_layers_are_compressed_and_the_others_not(checkpoint: Path, name: str) -> None:
    """Against dense attention: of full layers over what survived, of the others over the window."""
    compression = METHODS[name]
    llm = make_llm(checkpoint, compression=compression, block_size=8, max_num_batched_tokens=64, max_num_seqs=8)
    recorder = Recorder(llm.llm_engine.executor.runner, llm.config)
    llm.llm_engine.executor = recorder
    run_poisoned(llm, random_token_ids(5, 30, 70), greedy(90))
    assert llm.stats().windows_compressed >= 3 and llm.stats().entries_evicted > 0
    decoder, rows = DenseDecoder(checkpoint), torch.arange(512)
    for text in recorder.texts:
        visible = ((rows <= rows[:, None]) & (rows > rows[:, None] - WINDOW)).expand(5, 2, -1, -1).clone()
        visible[[1, 4]] = text.visible
        dense = decoder.forward(text.tokens[: text.length], visible[..., : text.length, : text.length])
        found = torch.stack(list(text.logits.values())).double()
        expected = dense.logits[list(text.logits)]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def test_what_needs_queries_again_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="method='kara' is not allowed: the model has layers with a sliding window"):
        make_llm(checkpoint, compression=paper_compression(method="kara", buffer=4))
    for method in ("h2o", "kvzip"):
        with pytest.raises(ConfigError, match=f"method='{method}' is not allowed"):
            make_llm(checkpoint, compression=paper_compression(method=method, buffer=4))
