"""Log probabilities of prompts, against transformers, however a prompt is computed; requests without any output."""

from __future__ import annotations

import pytest
import torch
import transformers

from kvllm import LLM, RequestError, SamplingParams
from kvllm.engine_args import DEFAULT_MODEL
from kvllm.outputs import Logprob, RequestOutput
from kvllm.worker import prompt_logprobs
from tests.helpers.compressions import paper_compression
from tests.helpers.engines import greedy, make_llm, random_token_ids

PROMPTS = random_token_ids(1, 2, 15, 16, 17, 70, 150)
BIG_POOL = {"num_gpu_blocks_override": 200, "max_num_seqs": 8}


def scored(max_tokens: int = 0, prompt_logprobs: int = 3, **options) -> SamplingParams:
    return greedy(max_tokens, prompt_logprobs=prompt_logprobs, **options)


def values(output: RequestOutput) -> list[dict[int, Logprob] | None]:
    assert output.error is None and output.prompt_logprobs is not None
    return output.prompt_logprobs


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm(DEFAULT_MODEL, max_model_len=512, **BIG_POOL)


@pytest.fixture(scope="module")
def vocabulary_prompts() -> list[list[int]]:
    return [[token_id % 229 for token_id in prompt] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(llm: LLM, vocabulary_prompts: list[list[int]]) -> list[list[dict[int, Logprob] | None]]:
    return [values(output) for output in llm.generate(vocabulary_prompts, scored(), use_tqdm=False)]


def test_they_are_those_of_transformers(
    vocabulary_prompts: list[list[int]], expected: list[list[dict[int, Logprob] | None]]
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL, dtype=torch.float32)
    for prompt, found in zip(vocabulary_prompts, expected, strict=True):
        with torch.inference_mode():
            logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert len(found) == len(prompt) and found[0] is None
        for token_id, row, entry in zip(prompt[1:], logprobs, found[1:], strict=False):
            assert entry is not None
            assert set(entry) == {token_id, *row.topk(3).indices.tolist()}
            above, not_below = ((row > row[token_id] + slack).sum() for slack in (1e-4, -1e-4))
            assert above + 1 <= entry[token_id].rank <= not_below
            for other, logprob in entry.items():
                assert logprob.logprob == pytest.approx(row[other].item(), abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 8},
        {"max_num_batched_tokens": 17},
        {"max_num_seqs": 1},
        {"num_gpu_blocks_override": 12},
        {"enable_prefix_caching": False},
        {"attention_backend": "reference"},
    ],
    ids=str,
)
def test_they_do_not_depend_on_how_they_are_computed(options: dict, vocabulary_prompts, expected) -> None:
    llm = make_llm(DEFAULT_MODEL, **(BIG_POOL | options))
    for output, wanted in zip(llm.generate(vocabulary_prompts, scored(), use_tqdm=False), expected, strict=True):
        assert_close(values(output), wanted)


def assert_close(found: list[dict[int, Logprob] | None], wanted: list[dict[int, Logprob] | None]) -> None:
    """Each may be 1e-4 from those of transformers."""
    assert len(found) == len(wanted)
    for entry, other in zip(found[1:], wanted[1:], strict=True):
        assert entry is not None and other is not None
        assert set(entry) == set(other)
        for token_id, logprob in entry.items():
            assert logprob.logprob == pytest.approx(other[token_id].logprob, abs=2e-4)
            assert logprob.decoded_token == other[token_id].decoded_token


def test_few_logits_are_held_at_once(monkeypatch: pytest.MonkeyPatch, vocabulary_prompts, expected) -> None:
    llm = make_llm(DEFAULT_MODEL, **BIG_POOL)
    model = llm.llm_engine.executor.runner.model
    most, logits = 0, model.logits

    def counted(hidden: torch.Tensor, **options: bool) -> torch.Tensor:
        nonlocal most
        most = max(most, len(hidden))
        return logits(hidden, **options)

    monkeypatch.setattr(model, "logits", counted)
    monkeypatch.setattr(prompt_logprobs, "LOGITS_AT_ONCE", 7 * 229)
    (output,) = llm.generate(vocabulary_prompts[-1:], scored(), use_tqdm=False)
    assert_close(values(output), expected[-1])
    assert most == 7


def test_a_cached_prefix_is_computed_again_for_them(llm: LLM, vocabulary_prompts, expected) -> None:
    prompt = vocabulary_prompts[-1:]
    assert llm.generate(prompt, greedy(2), use_tqdm=False)[0].prompt_logprobs is None
    (output,) = llm.generate(prompt, scored(5), use_tqdm=False)
    assert output.metrics.num_cached_tokens == 0
    assert_close(values(output), expected[-1])
    again = llm.generate(prompt, greedy(2), use_tqdm=False)
    assert again[0].metrics.num_cached_tokens == 144


def test_completions_share_them(llm: LLM, vocabulary_prompts, expected) -> None:
    plain = llm.generate(vocabulary_prompts, greedy(6), use_tqdm=False)
    for n in (1, 3):
        found = llm.generate(vocabulary_prompts, scored(6, n=n), use_tqdm=False)
        for output, wanted, same in zip(found, expected, plain, strict=True):
            assert_close(values(output), wanted)
            assert [completion.token_ids for completion in output.outputs] == [same.outputs[0].token_ids] * n


def test_preemption_changes_none_of_them(vocabulary_prompts, expected) -> None:
    llm = make_llm(DEFAULT_MODEL, num_gpu_blocks_override=14, max_num_seqs=8, enable_prefix_caching=False)
    for _ in range(2):
        outputs = llm.generate(vocabulary_prompts, scored(60), use_tqdm=False)
        for output, wanted in zip(outputs, expected, strict=True):
            assert_close(values(output), wanted)
            assert len(output.outputs[0].token_ids) == 60
    assert llm.stats().preemptions > 0


def test_compression_comes_behind_them(vocabulary_prompts, expected) -> None:
    compression = paper_compression(method="kara", period=8, buffer=4, chunk_budget=4, compress_prompt=True)
    llm = make_llm(DEFAULT_MODEL, compression=compression, **BIG_POOL)
    for output, wanted in zip(llm.generate(vocabulary_prompts, scored(20), use_tqdm=False), expected, strict=True):
        assert_close(values(output), wanted)
    assert llm.stats().windows_compressed > 0


def test_no_token_is_generated_where_none_is_asked_for(llm: LLM) -> None:
    longest = [5] * llm.config.max_model_len
    before = llm.stats().output_tokens
    for prompt, n in ((longest, 1), ([5], 1), ([5, 6, 7], 3)):
        (output,) = llm.generate([prompt], scored(n=n), use_tqdm=False)
        assert len(values(output)) == len(prompt) and output.finished
        for completion in output.outputs:
            assert (completion.token_ids, completion.text, completion.finish_reason) == ([], "", "length")
    assert llm.stats().output_tokens == before
    with pytest.raises(RequestError, match="allows"):
        llm.generate([*longest, 5], scored(), use_tqdm=False)
    with pytest.raises(RequestError, match="allows"):
        llm.generate(longest, scored(1), use_tqdm=False)


def test_tokens_that_the_vocabulary_lacks_are_refused(llm: LLM) -> None:
    for options in (
        {"logit_bias": {229: 1.0}},
        {"allowed_token_ids": [3, 229]},
        {"bad_words_token_ids": [[3], [4, 300]]},
    ):
        with pytest.raises(RequestError, match=next(iter(options))):
            llm.generate([5], greedy(2, **options), use_tqdm=False)
    with pytest.raises(RequestError, match="bad_words"):
        llm.generate([5], greedy(2, bad_words=["\u4f60"]), use_tqdm=False)


def test_bad_words_do_not_come(llm: LLM) -> None:
    prompts = [[30 + i] for i in range(20)]

    def text(**options) -> str:
        params = SamplingParams(max_tokens=60, seed=1, ignore_eos=True, **options)
        return "\0".join(output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False))

    plain = text()
    words = [plain[20:21], plain[90:93]]
    assert all(word.strip() == word for word in words)
    assert not any(word in text(bad_words=words) for word in words)
