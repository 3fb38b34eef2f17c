"""The draft model: whatever happened to a sequence, its drafts are what this model says after all of the text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvllm import LLM, CompressionConfig, SamplingParams
from kvllm.core.drafting.step_cost import StepCost
from kvllm.errors import CheckpointError, ConfigError
from kvllm.worker.drafter import Text
from kvllm.worker.features.drafts import Drafts
from tests.helpers.checkpoints import make_checkpoint, make_draft
from tests.helpers.engines import greedy, make_llm, random_prompts, records_chunks, tokens
from tests.helpers.families import FAMILIES

COUNT = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a checkpoint in `draft` whose weights have some noise, and which says the same more often than not."""
    path = tmp_path_factory.mktemp("qwen3")
    model = make_checkpoint(path, "qwen3", head_dim=16)
    make_draft(path, model, noise=0.05)
    return path


def drafting(path: Path, draft: Path | None = None, **options: Any) -> tuple[LLM, list[tuple[list[int], list[int]]]]:
    """An engine that tries all drafts, and each text with its draft, as they come."""
    config = {"method": "draft_model", "model": str(draft or path / "draft"), "num_speculative_tokens": COUNT}
    llm, found = make_llm(path, speculative_config=config, **options), []
    llm.llm_engine.scheduler.speculation.cost = None
    (drafts,) = (feature for feature in llm.llm_engine.executor.runner.features if isinstance(feature, Drafts))
    draft_texts = drafts.model.draft

    def recording(texts: list[Text]) -> None:
        draft_texts(texts)
        found.extend(([*text.token_ids, *text.new], text.draft) for text in texts)

    drafts.model.draft = recording
    return llm, found


def assert_drafts(path: Path, found: list[tuple[list[int], list[int]]]) -> None:
    """All drafts are those of the draft model alone, which has computed no draft before."""
    drafted = [(text, draft) for text, draft in found if draft]
    assert len(drafted) > 20
    alone = make_llm(path / "draft", enable_prefix_caching=False)
    prompts = [{"prompt_token_ids": text} for text, _ in drafted]
    expected = tokens(alone, prompts, greedy(COUNT))
    assert [draft for _, draft in drafted] == [
        each[: len(draft)] for each, (_, draft) in zip(expected, drafted, strict=True)
    ]


def assert_right_and_wrong(llm: LLM) -> None:
    counts = llm.stats().drafts
    assert 0 < sum(counts.right) < counts.tokens and 1 < counts.mean_acceptance_length < 1 + len(counts.right)


ENGINES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "blocks of 1": {"block_size": 1, "num_gpu_blocks_override": 1200},
    "short chunks": {"max_num_batched_tokens": 8, "max_num_seqs": 4},
    "preemption": {"num_gpu_blocks_override": 14},
    "swap": {"num_gpu_blocks_override": 14, "kv_offloading_size": 0.01, "swap": "always"},
    "planned ahead": {"async_scheduling": True},
}


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_drafts_are_those_of_the_draft_model_alone(checkpoint: Path, options: dict[str, Any]) -> None:
    """Rejected pairs leave no trace, and chunks, preemptions and prefixes that the model finds cached none either."""
    llm, found = drafting(checkpoint, **options)
    prompts = random_prompts(256, lengths=(2, 17, 40, 63))
    expected = tokens(make_llm(checkpoint), prompts, greedy(60))
    for _ in range(2):  # the second time with cached prefixes
        assert tokens(llm, prompts, greedy(60)) == expected
    assert_drafts(checkpoint, found)
    assert_right_and_wrong(llm)
    if "num_gpu_blocks_override" in options and "block_size" not in options:
        assert llm.stats().preemptions


def test_recorded_passes_draft_the_same(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both models: texts are read, drafted after and verified in them."""
    records_chunks(monkeypatch)
    llm, found = drafting(checkpoint, attention_backend="reference")
    runner, replayed = llm.llm_engine.executor.runner, list[int]()
    runner.use_graphs(lambda step: lambda: replayed.append(1) or step(), runner.cache.num_blocks)
    prompts = random_prompts(256, lengths=(2, 17, 40, 63))
    assert tokens(llm, prompts, greedy(60)) == tokens(make_llm(checkpoint), prompts, greedy(60))
    assert_drafts(checkpoint, found)
    assert_right_and_wrong(llm)
    assert len(replayed) > llm.stats().steps + COUNT * 10


def test_forks_and_aborts(checkpoint: Path) -> None:
    llm, found = drafting(checkpoint)
    engine, (prompt, other) = llm.llm_engine, random_prompts(256, lengths=(30, 40))
    engine.add_request("0", prompt, greedy(60, n=3))
    engine.add_request("1", other, greedy(60))
    for _ in range(9):
        engine.step()
    engine.abort("1")
    while engine.has_unfinished_requests():
        engine.step()
    assert_drafts(checkpoint, found)
    assert not engine.scheduler.speculation.drafter._drafts
    engine.add_request("2", other, greedy(4))
    while engine.has_unfinished_requests():
        engine.step()
    (drafts,) = (feature for feature in engine.executor.runner.features if isinstance(feature, Drafts))
    assert drafts.model._cached.keys() <= {4}, "the others have ended"


POLICIES = {
    "standalone": {"policy": "standalone", "window_blocks": 24, "retain_blocks": 8},
    "threshold": {"policy": "threshold", "threshold_tokens": 96, "budget_tokens": 64},
    "periodic": {"policy": "periodic", "period": 16, "window_blocks": 6, "retain_blocks": 2},
    "pressure": {"policy": "pressure", "window_blocks": 6, "retain_blocks": 2},
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_compressed_sequence_is_drafted_for_as_any_other(checkpoint: Path, policy: dict[str, Any]) -> None:
    """The cache of the draft model is never compressed."""
    options = {"block_size": 1 if policy["policy"] == "standalone" else 4}
    if policy["policy"] == "pressure":
        options["num_gpu_blocks_override"] = 100
    llm, found = drafting(checkpoint, compression=CompressionConfig(method="keydiff", buffer=4, **policy), **options)
    tokens(llm, random_prompts(256, lengths=(20, 33, 40)), greedy(150))
    llm.llm_engine.scheduler.check()
    assert_drafts(checkpoint, found)
    assert_right_and_wrong(llm)
    assert llm.stats().entries_evicted


def test_equal_models_draw_equal_tokens_at_any_temperature(checkpoint: Path) -> None:
    llm, _ = drafting(checkpoint, checkpoint)
    params = SamplingParams(temperature=1.0, top_p=0.9, frequency_penalty=0.5, seed=3, max_tokens=40, ignore_eos=True)
    prompts = random_prompts(256, lengths=(5, 30))
    llm.generate(prompts, params, use_tqdm=False)
    counts = llm.stats().drafts
    assert sum(counts.right) == counts.tokens > 40


def test_weights_of_integers_draft(checkpoint: Path) -> None:
    """Of the draft model alone, or of both."""
    prompts = random_prompts(256, lengths=(5, 30, 60))
    for quantization in (None, "int8"):
        config = {"method": "draft_model", "model": str(checkpoint), "quantization": "int4"}
        expected = tokens(make_llm(checkpoint, quantization=quantization), prompts)
        llm = make_llm(checkpoint, quantization=quantization, speculative_config=config)
        llm.llm_engine.scheduler.speculation.cost = None
        assert tokens(llm, prompts) == expected
        assert_right_and_wrong(llm)


def test_where_the_pool_is_full_sequences_get_no_drafts(tmp_path: Path, checkpoint: Path) -> None:
    """The pool of the model holds the same texts after their windows: more of them."""
    layers = {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3}
    make_checkpoint(tmp_path, "ministral", head_dim=16, **layers)
    options = {"num_gpu_blocks_override": 16, "block_size": 8, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    prompts = random_prompts(256, lengths=(20, 30, 40))
    llm, found = drafting(tmp_path, checkpoint / "draft", **options)
    assert tokens(llm, prompts) == tokens(make_llm(tmp_path, **options), prompts)
    assert {bool(draft) for text, draft in found if len(text) > 100} == {True, False}


def test_a_pool_as_long_as_the_other_is_counted(checkpoint: Path) -> None:
    llm, _ = drafting(checkpoint, num_gpu_blocks_override=50)
    alone = make_llm(checkpoint, num_gpu_blocks_override=50)
    assert llm.stats().draft_pool_bytes == alone.stats().block_bytes * 50
    memory = alone.stats().block_bytes * 40
    config = llm.engine_args.speculative_config
    half = LLM(checkpoint, kv_cache_memory_bytes=memory, speculative_config=config, max_model_len=64)
    assert half.stats().num_blocks == 20


def test_no_draft_is_ordered_where_none_pays(checkpoint: Path) -> None:
    """The steps of these are the same as without, and planned ahead as without."""
    llm, found = drafting(checkpoint, async_scheduling=True)
    speculation = llm.llm_engine.scheduler.speculation
    speculation.cost = StepCost([1, 2, 4], [1.0, 1.1, 1.3], [0.0, 0.0, 0.0], [0.9, 0.9])
    tokens(llm, random_prompts(256, lengths=(5, 30)), greedy(40))
    assert not found and not llm.stats().drafts.tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, 'model=None is not allowed: method="draft_model" needs the directory'),
        ({"model": "missing/path/to"}, "missing/path/to"),
        ({"model": "DRAFT", "quantization": "int3"}, "quantization='int3' is not allowed"),
        (
            {"model": "DRAFT", "num_speculative_tokens": 65},
            "num_speculative_tokens=65 is not allowed: between 1 and 64",
        ),
        ({"model": "DRAFT", "draft_tensor_parallel_size": 2}, "the first rank computes all of the draft model"),
        ({"model": "OTHER"}, "it has 300 tokens, and"),
        ({"model": "RECURRENT"}, "it has recurrent layers, whose states take back no token"),
    ],
)
def test_what_cannot_draft_is_refused_before_weights_are_read(
    checkpoint: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    for file in ("config.json", "generation_config.json"):
        (tmp_path / file).write_bytes((checkpoint / file).read_bytes())  # there are no weights
    if options.get("model") == "OTHER":
        make_checkpoint(tmp_path / "OTHER", "qwen3", vocab_size=300)
    if options.get("model") == "RECURRENT":
        make_checkpoint(tmp_path / "RECURRENT", **FAMILIES["qwen3.5"])
    if options.get("model") in ("OTHER", "RECURRENT"):
        options = {**options, "model": str(tmp_path / options["model"])}
    if options.get("model") == "DRAFT":
        options = {**options, "model": str(checkpoint / "draft")}
    with pytest.raises((ConfigError, CheckpointError), match=re.escape(message)):
        LLM(tmp_path, speculative_config={"method": "draft_model", **options})
