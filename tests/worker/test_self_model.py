"""A model that drafts for itself: its drafts are what it says of some KV pairs, and leave no trace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvllm import LLM, CompressionConfig
from kvllm.config import engine as engine_config
from kvllm.engine_args import EngineArgs
from kvllm.engine_builder import runner_settings
from kvllm.errors import ConfigError
from kvllm.worker.build import check_device
from kvllm.worker.drafter import Text
from kvllm.worker.features.drafts import Drafts
from kvllm.worker.features.offloading import Offloader
from kvllm.worker.features.residual import KVResidual
from kvllm.worker.model_runner import ModelRunner
from kvllm.worker.self_model import SelfModel
from tests.helpers.checkpoints import checkpoint_fixture, make_checkpoint
from tests.helpers.engines import greedy, make_llm, random_prompts, tokens
from tests.helpers.families import FAMILIES

COUNT, FIRST, LAST = 3, 3, 30
CONFIG = {"method": "self", "num_speculative_tokens": COUNT}
WINDOW = 40
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


checkpoint = checkpoint_fixture("qwen3", head_dim=64)


sliding = checkpoint_fixture("ministral", head_dim=16, **SLIDING)


@pytest.fixture(autouse=True)
def short_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SelfModel, "first", FIRST)
    monkeypatch.setattr(SelfModel, "last", LAST)


def drafting(path: Path, num_drafts: int = COUNT, **options: Any) -> tuple[LLM, list[tuple[list[int], list[int]]]]:
    """An engine that tries all drafts and finds no trace of any, and each text with its draft, as they come."""
    config = {"method": "self", "num_speculative_tokens": num_drafts}
    llm, found = make_llm(path, speculative_config=config, **({"block_size": 4} | options)), []
    llm.llm_engine.scheduler.speculation.cost = None
    runner = llm.llm_engine.executor.runner
    runner.cache.data.zero_()  # what was never written may be no number
    (drafts,) = (feature for feature in runner.features if isinstance(feature, Drafts))
    draft_texts = drafts.model.draft

    def recording(texts: list[Text]) -> None:
        before = [each.clone() for each in held(runner)]
        draft_texts(texts)
        assert all(map(torch.equal, held(runner), before))
        found.extend(([*text.token_ids, *text.new], text.draft) for text in texts)

    drafts.model.draft = recording
    return llm, found


def held(runner: ModelRunner) -> list[torch.Tensor]:
    """All that a worker holds of its sequences, as integers, when no block is being loaded any more."""
    for each in runner.features:
        if isinstance(each, Offloader):
            each.store._queue.submit(lambda: None).wait()
    count = runner.cache.num_blocks - runner.forward_pass.config.num_draft_blocks
    parts = [part[:, :, :count].contiguous().view(torch.uint8) for part in runner.cache.parts]
    if runner.cache.scores is not None:
        parts.append(runner.cache.scores[:, :count].contiguous().view(torch.int32))
    parts += [each.pairs.view(torch.int32) for each in runner.features if isinstance(each, KVResidual)]
    tables = runner.tables
    return [*parts, *map(torch.from_numpy, (tables.logical, tables.table, tables.num_blocks, tables.dropped))]


def assert_drafts(path: Path, found: list[tuple[list[int], list[int]]], size: int, window: int | None = None) -> None:
    """All drafts are those of transformers' model, whose queries after a text's last but one see no more than the
    first and the last blocks of `size`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    drafted = [(text, draft) for text, draft in found if draft]
    assert len(drafted) > 20 and any(len(text) > 100 for text, _ in drafted)
    for text, draft in drafted[::3]:
        begin, length = len(text) - 1, len(text) + len(draft) - 1
        end = max(0, begin // size - -(-LAST // size)) * size
        first = min(-(-FIRST // size) * size, end)
        keys, queries = torch.arange(length), torch.arange(length)[:, None]
        causal, late = keys <= queries, queries >= begin
        full = causal & ~(late & (keys >= first) & (keys < end))
        masks = {"full_attention": full}
        if window:
            masks["sliding_attention"] = causal & (keys > queries - window) & ~(late & (keys < end))
        for kind, mask in masks.items():
            masks[kind] = torch.zeros(length, length).masked_fill_(~mask, -torch.inf)[None, None]
        with torch.inference_mode():
            ids = torch.tensor([[*text, *draft[:-1]]])
            logits = model(ids, attention_mask=masks if window else masks["full_attention"], use_cache=False).logits[0]
        assert logits[begin:].argmax(-1).tolist() == draft


ENGINES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "blocks of 1": {"block_size": 1, "num_gpu_blocks_override": 1200},
    "blocks of 16": {"block_size": 16},
    "short chunks": {"max_num_batched_tokens": 8, "max_num_seqs": 4},
    "preemption": {"num_gpu_blocks_override": 56},
    "swap": {"num_gpu_blocks_override": 56, "kv_offloading_size": 0.01, "swap": "always"},
    "planned ahead": {"async_scheduling": True},
}


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_drafts_are_what_the_model_says_of_a_view(checkpoint: Path, options: dict[str, Any]) -> None:
    llm, found = drafting(checkpoint, **options)
    prompts = random_prompts(256, lengths=(2, 17, 40, 63))
    expected = tokens(make_llm(checkpoint), prompts, greedy(60))
    for _ in range(2):  # the second time with cached prefixes
        assert tokens(llm, prompts, greedy(60)) == expected
    assert_drafts(checkpoint, found, llm.engine_args.block_size)
    counts = llm.stats().drafts
    assert 0 < sum(counts.right) < counts.tokens
    if "num_gpu_blocks_override" in options and "block_size" not in options:
        assert llm.stats().preemptions


def test_layers_with_a_window_attend_what_is_in_both(sliding: Path) -> None:
    llm, found = drafting(sliding)
    prompts = random_prompts(256, lengths=(2, 17, 40, 63))
    assert tokens(llm, prompts, greedy(60)) == tokens(make_llm(sliding), prompts, greedy(60))
    assert_drafts(sliding, found, 4, WINDOW)


def test_a_draft_is_no_longer_than_a_step(sliding: Path) -> None:
    """Of which alone there is room after a window."""
    options = {"block_size": 1, "max_num_batched_tokens": 4, "max_num_seqs": 2}
    llm, found = drafting(sliding, num_drafts=12, **options)
    prompts = random_prompts(256, lengths=(17, 40))
    assert tokens(llm, prompts, greedy(60)) == tokens(make_llm(sliding, **options), prompts, greedy(60))
    assert max(len(draft) for _, draft in found) == 4


@pytest.mark.parametrize(("block_size", "num_drafts", "step"), [(1, 5, 6), (4, 8, 8), (16, 16, 8)])
def test_room_after_a_window_is_shared_with_new_tokens(
    sliding: Path, block_size: int, num_drafts: int, step: int
) -> None:
    """Those of the last draft have come, and the window has not moved yet."""
    options = {"block_size": block_size, "max_num_batched_tokens": step, "max_num_seqs": 2}
    llm, found = drafting(sliding, num_drafts=num_drafts, **options)
    prompts = [[5, 6, 7] * 3]
    assert tokens(llm, prompts, greedy(100)) == tokens(make_llm(sliding, **options), prompts, greedy(100))
    assert max(len(draft) for _, draft in found) == min(num_drafts, step)


def test_drafts_end_with_the_longest_text(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a step brings more tokens than were certain when it was planned: here all are right."""
    monkeypatch.setattr(SelfModel, "last", 512)
    options = {"max_model_len": 103}
    llm, _ = drafting(checkpoint, num_drafts=5, **options)
    prompts = random_prompts(256, lengths=(61, 62, 63))
    assert tokens(llm, prompts, greedy(50)) == tokens(make_llm(checkpoint, **options), prompts, greedy(50))
    assert sum(llm.stats().drafts.right) == llm.stats().drafts.tokens


def test_many_sequences_take_turns(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_config, "MOST_SELF_DRAFTS", 2)
    llm, found = drafting(checkpoint)
    tokens(llm, random_prompts(256, lengths=(60, 70, 61, 62, 63)), greedy(45))
    assert_drafts(checkpoint, found, 4)


TRACES: dict[str, dict[str, Any]] = {
    "int8": {"kv_cache_dtype": "int8"},
    "residual": {"kv_cache_dtype": "int4", "kv_residual_tokens": 8},
    "integer weights": {"quantization": "int8"},
    "standalone": {
        "compression": CompressionConfig(
            method="keydiff", policy="standalone", window_blocks=24, retain_blocks=8, buffer=4
        ),
        "block_size": 1,
    },
    "threshold": {
        "compression": CompressionConfig(
            method="keydiff", policy="threshold", threshold_tokens=96, budget_tokens=64, buffer=4
        )
    },
}


@pytest.mark.parametrize("options", TRACES.values(), ids=TRACES)
def test_nothing_is_left_of_a_draft(checkpoint: Path, options: dict[str, Any]) -> None:
    """Neither in what is compressed, rounded or held beside the pool, nor in tokens."""
    llm, found = drafting(checkpoint, **options)
    prompts = random_prompts(256, lengths=(20, 33, 40))
    expected = tokens(make_llm(checkpoint, **({"block_size": 4} | options)), prompts, greedy(100))
    assert tokens(llm, prompts, greedy(100)) == expected
    assert any(draft for text, draft in found if len(text) > 100)
    assert "compression" not in options or llm.stats().entries_evicted


def test_room_for_drafts_is_counted(checkpoint: Path) -> None:
    options = {"max_num_seqs": 2, "max_model_len": 64}
    llm = LLM(checkpoint, speculative_config=CONFIG, kv_cache_memory_bytes=1 << 20, **options)
    stats = LLM(checkpoint, kv_cache_memory_bytes=1 << 20, **options).stats()
    assert llm.stats().draft_pool_bytes == 4 * stats.block_bytes, "a block that is not full and 3 tokens, of two"
    assert llm.stats().num_blocks == stats.num_blocks - 4
    for block_size, num_drafts in ((1, 1), (1, 2), (4, 1)):  # fewer than are timed when it starts
        config = {"method": "self", "num_speculative_tokens": num_drafts}
        LLM(checkpoint, speculative_config=config, block_size=block_size, num_gpu_blocks_override=600)


RAGGED = CompressionConfig(method="adakv", policy="threshold", threshold_tokens=960, budget_tokens=640, buffer=32)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("qwen3", {"tensor_parallel_size": 2}, "tensor_parallel_size=2 is not allowed: 1 with speculative_config"),
        ("qwen3.5", {}, "not with recurrent layers"),
        ("qwen3", {"compression": RAGGED}, "keeps different numbers of KV pairs"),
    ],
)
def test_what_cannot_draft_is_refused(tmp_path: Path, family: str, options: dict[str, Any], message: str) -> None:
    make_checkpoint(tmp_path, **FAMILIES[family])
    with pytest.raises(ConfigError, match=re.escape(message)):
        LLM(tmp_path, speculative_config=CONFIG, **options)


def test_gpus_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="drafts on a CPU only"):
        check_device(runner_settings(EngineArgs(checkpoint, speculative_config=CONFIG)), "cuda")
