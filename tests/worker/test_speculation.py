"""Speculative decoding with real models: tokens are those without, whatever else a request or an engine asks for, and
what wrong drafts have stored or added up leaves no trace."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kvllm import LLM, CompressionConfig, RequestOutput, SamplingParams
from kvllm.core.drafting.base import Draft
from kvllm.core.drafting.lookup import NgramDrafter
from kvllm.core.drafting.step_cost import StepCost
from kvllm.core.sequence import Sequence
from kvllm.errors import ConfigError
from kvllm.sampling_params import StructuredOutputsParams
from kvllm.worker.features.drafts import Drafts
from tests.helpers.checkpoints import make_checkpoint, make_draft
from tests.helpers.engines import greedy, make_llm
from tests.helpers.thread_executor import ThreadExecutor, shared_memory_shards

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 7}
MODEL = {"method": "draft_model", "num_speculative_tokens": 4}
SELF = {"method": "self", "num_speculative_tokens": 4}
METHODS = pytest.mark.parametrize(
    "method", [NGRAM, SUFFIX, MODEL, SELF], ids=["ngram", "suffix", "draft_model", "self"]
)
KINDS = pytest.mark.parametrize("method", [NGRAM, MODEL, SELF], ids=["ngram", "draft_model", "self"])
LENGTHS = (3, 17, 40, 64)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    make_draft(path, make_checkpoint(path, "qwen3", head_dim=64))
    return path


def repetitive_prompts(seed: int = 0) -> list[dict]:
    """Of five tokens: their last ones stood there before, and what came then is sometimes right."""
    rng = random.Random(seed)
    return [{"prompt_token_ids": [rng.randrange(3, 8) for _ in range(length)]} for length in LENGTHS]


def drafting(path: Path, method: dict[str, Any] = NGRAM, **options: Any) -> LLM:
    """An engine that tries all drafts, whether they pay or not. One that drafts for itself attends few KV pairs."""
    if method["method"] == "draft_model":
        method = {"model": str(path / "draft"), **method}
    llm = make_llm(path, speculative_config=method, **options)
    llm.llm_engine.scheduler.speculation.cost = None
    if method["method"] == "self":
        (drafts,) = (each for each in llm.llm_engine.executor.runner.features if isinstance(each, Drafts))
        drafts.model.first, drafts.model.last = 2, 4
    return llm


def run(llm: LLM, params: SamplingParams, rounds: int = 1) -> list[list[RequestOutput]]:
    found = []
    for i in range(rounds):
        found.append(llm.generate(repetitive_prompts(i), params, use_tqdm=False))
        llm.llm_engine.scheduler.check()
        assert llm.llm_engine.scheduler.blocks.num_owned == 0
    return found


def completions(rounds: list[list[RequestOutput]]) -> list[Any]:
    return [
        (each.token_ids, each.text, each.finish_reason, each.stop_reason, each.logprobs)
        for outputs in rounds
        for output in outputs
        for each in output.outputs
    ]


def assert_same(path: Path, params: SamplingParams, method: dict[str, Any] = NGRAM, **options: Any) -> LLM:
    """The engine that drafts, after it has given the same completions as one that does not."""
    llm = drafting(path, method, **options)
    expected = completions(run(make_llm(path, **options), params, rounds=2))
    assert completions(run(llm, params, rounds=2)) == expected
    counts = llm.stats().drafts
    assert 0 < sum(counts.right) < counts.tokens, "drafts have to be right and wrong"
    return llm


ENGINES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "blocks of 1": {"block_size": 1},
    "short chunks": {"max_num_batched_tokens": 8, "max_num_seqs": 4},
    "no prefixes": {"enable_prefix_caching": False},
    "preemption": {"num_gpu_blocks_override": 14},
    "swap": {"num_gpu_blocks_override": 14, "kv_offloading_size": 0.01, "swap": "always"},
    "planned ahead": {"async_scheduling": True},
    "reference attention": {"attention_backend": "reference"},
    "int8": {"kv_cache_dtype": "int8"},
    "residual": {"kv_cache_dtype": "int4", "kv_residual_tokens": 8},
    "compression that never acts": {
        "compression": CompressionConfig(policy="pressure"),
        "num_gpu_blocks_override": 400,
    },
}


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
@METHODS
def test_greedy_tokens_are_those_without(checkpoint: Path, method: dict[str, Any], options: dict[str, Any]) -> None:
    llm = assert_same(checkpoint, greedy(100), method, **options)
    if options.get("num_gpu_blocks_override") == 14:
        assert llm.stats().preemptions


@METHODS
def test_no_wrong_draft_is_in_a_cached_block(checkpoint: Path, method: dict[str, Any]) -> None:
    """A text that was generated with drafts goes on from its cached blocks as computed anew."""
    llm, without = drafting(checkpoint, method, block_size=4), make_llm(checkpoint, enable_prefix_caching=False)
    texts = [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in run(llm, greedy(60))[0]]
    prompts = [{"prompt_token_ids": text[:-1]} for text in texts]
    found, expected = (each.generate(prompts, greedy(20), use_tqdm=False) for each in (llm, without))
    assert completions([found]) == completions([expected])
    assert all(each.num_cached_tokens > len(text) - 10 for each, text in zip(found, texts, strict=True))
    assert 0 < sum(llm.stats().drafts.right) < llm.stats().drafts.tokens


@pytest.mark.parametrize("pays", [False, True])
def test_steps_are_planned_ahead_where_no_draft_pays(checkpoint: Path, pays: bool) -> None:
    llm, planned = drafting(checkpoint, async_scheduling=True), set[bool]()
    engine = llm.llm_engine
    engine.scheduler.speculation.cost = None if pays else StepCost([1, 2], [1.0, 9.0], [0.0, 0.0])
    plan_ahead = engine._plan_ahead
    engine._plan_ahead = lambda: (planned.add((plan := plan_ahead()) is not None), plan)[1]  # type: ignore[method-assign]
    run(llm, greedy(30))
    assert (True in planned) != pays


@pytest.mark.parametrize(
    "policy",
    [
        {"policy": "standalone", "window_blocks": 24, "retain_blocks": 8},
        {"policy": "threshold", "threshold_tokens": 96, "budget_tokens": 64},
    ],
    ids=["standalone", "threshold"],
)
def test_drafts_end_where_a_compression_is_due(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, policy: dict[str, Any]
) -> None:
    """So right tokens after it attend to what is left, as without drafts."""
    options = {"block_size": 1, "compression": CompressionConfig(method="keydiff", buffer=4, **policy)}
    outputs = run(make_llm(checkpoint, **options), greedy(100))[0]
    texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]

    def propose(_: NgramDrafter, seq: Sequence, most: int) -> Draft:
        [text] = [each for each in texts if each[: seq.prompt_length] == seq.token_ids[: seq.prompt_length]]
        return Draft(text[seq.num_tokens :][:most], 1)

    monkeypatch.setattr(NgramDrafter, "propose", propose)
    llm = drafting(checkpoint, **options)
    assert completions(run(llm, greedy(100))) == completions([outputs])
    counts = llm.stats().drafts
    assert sum(counts.right) == counts.tokens > 200
    assert llm.stats().entries_evicted


REQUESTS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top-k and top-p": {"top_k": 20, "top_p": 0.9},
    "min-p": {"min_p": 0.1},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1},
    "bias and bad words": {"logit_bias": {5: 3.0}, "bad_words_token_ids": [[6], [5, 7]]},
    "log probabilities": {"logprobs": 3},
    "log probabilities of the prompt": {"prompt_logprobs": 1},
    "several completions": {"n": 3},
    "stop tokens": {"stop_token_ids": [4, 9], "min_tokens": 7},
}


@pytest.mark.parametrize("options", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("temperature", [0.0, 0.3])
@KINDS
def test_requests_get_what_they_ask_for(
    checkpoint: Path, method: dict[str, Any], options: dict[str, Any], temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=60, ignore_eos=True, seed=5, **options)
    assert_same(checkpoint, params, method)


@METHODS
def test_each_of_many_seeds_has_its_tokens(checkpoint: Path, method: dict[str, Any]) -> None:
    """So their distribution is the model's."""
    engines, draws = [make_llm(checkpoint, block_size=4), drafting(checkpoint, method, block_size=4)], []
    for llm in engines:
        params = [SamplingParams(temperature=0.5, max_tokens=12, ignore_eos=True, seed=seed) for seed in range(150)]
        outputs = llm.generate([repetitive_prompts()[2]] * len(params), params, use_tqdm=False)
        draws.append([output.outputs[0].token_ids for output in outputs])
    assert draws[0] == draws[1]
    assert len({tuple(each) for each in draws[0]}) > 50
    assert 0 < sum(engines[1].stats().drafts.right) < engines[1].stats().drafts.tokens


@KINDS
def test_drafts_follow_a_grammar_and_stop_strings(shared_dir: Path, method: dict[str, Any]) -> None:
    path = shared_dir / "data" / "models" / "stories260K-fp32"
    if method is MODEL:
        method = {**MODEL, "model": str(path), "quantization": "int4"}
    rule = StructuredOutputsParams(regex="(the dog |a cat ){3,30}")
    engines = [make_llm(path), drafting(path, method)]
    for options in (
        {"structured_outputs": rule},
        {"stop": ["og a", "dog."]},
        {"structured_outputs": rule, "stop": ["at a"]},
    ):
        params = SamplingParams(temperature=0.9, max_tokens=90, seed=2, **options)
        prompts = ["a cat the dog a cat the dog the dog ", "Once upon a time, the dog saw a cat. The dog"]
        found = [completions([llm.generate(prompts, params, use_tqdm=False)]) for llm in engines]
        assert found[0] == found[1]
    counts = engines[1].stats().drafts
    assert 0 < sum(counts.right) < counts.tokens


@pytest.mark.parametrize("window", [1, 6, 40])
@KINDS
def test_windows_slide_over_right_tokens_alone(tmp_path: Path, method: dict[str, Any], window: int) -> None:
    options = {"head_dim": 16, "sliding_window": window, "layer_types": LAYERS}
    make_draft(tmp_path, make_checkpoint(tmp_path, "ministral", **options))
    assert_same(tmp_path, greedy(80), method, block_size=4, num_gpu_blocks_override=400)


LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize("method", [NGRAM, MODEL], ids=["ngram", "draft_model"])
def test_all_ranks_count_the_right_tokens(checkpoint: Path, method: dict[str, Any]) -> None:
    """Only the first one samples, and has the draft model; the others are told by the next plan."""
    expected = completions(run(make_llm(checkpoint), greedy(60), rounds=2))
    llm = drafting(checkpoint, method)
    with shared_memory_shards(2) as shards:
        llm.llm_engine.executor = executor = ThreadExecutor(llm, checkpoint, shards)
        found = completions(run(llm, greedy(60), rounds=2))
        first, second = (runner.tables.logical for runner in executor.runners)
        assert (first == second).all()
    assert found == expected and sum(llm.stats().drafts.right)


def test_a_residual_keeps_what_wrong_drafts_have_overwritten(checkpoint: Path) -> None:
    """In int4 a lost pair of the residual is another number of the next logits."""
    options = {"kv_cache_dtype": "int4", "kv_residual_tokens": 8}
    engines = make_llm(checkpoint, **options), drafting(checkpoint, **options)
    found = [completions(run(llm, greedy(60, logprobs=1), rounds=2)) for llm in engines]
    for without, other in zip(*found, strict=True):
        assert without[0] == other[0]
        for mine, theirs in zip(without[4], other[4], strict=True):
            assert mine.keys() == theirs.keys()
            for token_id in mine:
                assert mine[token_id].logprob == pytest.approx(theirs[token_id].logprob, abs=1e-4)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_scores_are_those_of_right_queries(checkpoint: Path, backend: str) -> None:
    """After as many tokens, with drafts and without; nothing is dropped on the way."""
    compression = CompressionConfig(method="mean_attention", policy="periodic", period=1000)
    found = []
    for make in (make_llm, drafting):
        llm = make(checkpoint, compression=compression, attention_backend=backend, num_gpu_blocks_override=60)
        engine = llm.llm_engine
        engine.add_request("0", repetitive_prompts()[2], greedy(400))
        while True:
            engine.step()
            (seq,) = engine.scheduler.running
            if seq.num_generated >= 120:
                break
        runner = engine.executor.runner
        if engine.scheduler._accepted:  # the scores of the last step's queries come with the next plan
            runner._accept([each for _, each in engine.scheduler._accepted])
        slots = torch.tensor(seq.tables[0].blocks)
        scores = runner.cache.scores[:, slots].permute(0, 2, 1, 3).flatten(2)
        found.append((seq.token_ids, seq.scored_from, scores))
    (mine, first, without), (theirs, other_first, with_drafts) = found
    count = min(len(mine), len(theirs)) - 1
    assert mine[: count + 1] == theirs[: count + 1] and first == other_first is not None
    index = torch.arange(first, count)
    assert len(index) > 40 and (without[..., index] > 0).all()
    # Queries beyond `count` are those of one engine alone: it has stopped at the end of a longer draft.
    if len(mine) == len(theirs):
        torch.testing.assert_close(with_drafts[..., index], without[..., index], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_config": {"method": "eagle"}}, "method='eagle' is not allowed: choose one of ngram, suffix"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 0}}, "between 1 and 64"),
        (
            {"speculative_config": {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}},
            "prompt_lookup_max=3",
        ),
        ({"speculative_config": {"method": "suffix", "prompt_lookup_max": 3}}, "prompt_lookup_max=3 is not allowed"),
        ({"speculative_config": {"method": "ngram", "model": "a"}}, 'it is an option of method="draft_model"'),
        ({"speculative_config": {"method": "ngram", "tokens": 3}}, "has no option 'tokens'"),
        ({"speculative_config": {"num_speculative_tokens": 3}}, "Missing required argument 'method'"),
        (
            {"speculative_config": NGRAM, "kv_cache_dtype": "int4", "kv_residual_tokens": 5},
            "less than kv_residual_tokens=5",
        ),
        ({"speculative_config": NGRAM, "compression": CompressionConfig(method="h2o")}, "adds up attention"),
    ],
)
def test_what_does_not_go_together_is_refused(checkpoint: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        LLM(checkpoint, **options)
