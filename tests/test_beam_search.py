"""Beam search against transformers' on a trained model, and through an event loop."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import pytest
import torch
import transformers

from kvllm import LLM, AsyncLLM, BeamSearchParams, ConfigError, RequestError
from kvllm.engine_args import DEFAULT_MODEL, EngineArgs
from kvllm.outputs import RequestOutput

OPTIONS = {"block_size": 16, "num_gpu_blocks_override": 400, "max_num_seqs": 32}
PROMPTS = [[30, 33, 70], [54, 66, 55, 68], [122, 124], [45, 97]]
SEARCHES = [
    BeamSearchParams(beam_width=1, max_tokens=12),
    BeamSearchParams(beam_width=3, max_tokens=16),
    BeamSearchParams(beam_width=4, max_tokens=24, length_penalty=0.0),
    BeamSearchParams(beam_width=2, max_tokens=40, length_penalty=2.0),
    BeamSearchParams(beam_width=8, max_tokens=6, ignore_eos=True),
    BeamSearchParams(beam_width=5, max_tokens=10, length_penalty=-1.0),
]
EOS = 1


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(**OPTIONS)


@cache
def model() -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL, dtype=torch.float32)


_found: dict[Any, list[tuple[list[int], float]]] = {}


def expected(prompt: list[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
    """As `transformers_beams`, which is asked once."""
    key = (*prompt, str(params))
    if key not in _found:
        _found[key] = transformers_beams(prompt, params)
    return _found[key]


def transformers_beams(prompt: list[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
    """Tokens and score of transformers' beams. It searches on to the longest length where that may help."""
    found = model().generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping="never" if params.beam_width > 1 else False,
        eos_token_id=None if params.ignore_eos else EOS,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequences = [row[len(prompt) :].tolist() for row in found.sequences]
    if not params.ignore_eos:
        sequences = [_without_padding(token_ids) for token_ids in sequences]
    scores = found.sequences_scores.tolist() if params.beam_width > 1 else [score(prompt, sequences[0], params)]
    return list(zip(sequences, scores, strict=True))


def _without_padding(token_ids: list[int]) -> list[int]:
    return token_ids[: token_ids.index(EOS) + 1] if EOS in token_ids else token_ids


def score(prompt: list[int], token_ids: list[int], params: BeamSearchParams) -> float:
    """Of a beam, from a forward pass over all of it."""
    with torch.inference_mode():
        logprobs = model()(torch.tensor([prompt + token_ids])).logits[0].log_softmax(-1)
    rows = logprobs[len(prompt) - 1 : -1]
    total = rows.gather(-1, torch.tensor(token_ids).unsqueeze(-1)).sum().item()
    return total / len(token_ids) ** params.length_penalty


def assert_beams(found: RequestOutput, prompt: list[int], params: BeamSearchParams) -> None:
    wanted = expected(prompt, params)
    assert [completion.index for completion in found.outputs] == list(range(params.beam_width))
    assert [completion.token_ids for completion in found.outputs] == [token_ids for token_ids, _ in wanted]
    for completion, (token_ids, of_beam) in zip(found.outputs, wanted, strict=True):
        length = len(token_ids) ** params.length_penalty
        assert completion.cumulative_logprob / length == pytest.approx(of_beam, abs=1e-3)
        assert completion.finish_reason == ("stop" if token_ids[-1] == EOS and not params.ignore_eos else "length")


@pytest.mark.parametrize("params", SEARCHES, ids=str)
def test_beams_are_those_of_transformers(llm: LLM, params: BeamSearchParams) -> None:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    for found, prompt in zip(llm.beam_search(prompts, params), PROMPTS, strict=True):
        assert_beams(found, prompt, params)
        for completion in found.outputs:
            assert completion.text == llm.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    assert llm.llm_engine.scheduler.blocks.num_owned == 0


def test_what_scripts_for_vllm_read(llm: LLM) -> None:
    """Sequences begin with their prompt, and a limit of concurrency changes nothing."""
    params = SEARCHES[1]
    found = llm.beam_search(PROMPTS, params)
    for output, prompt in zip(found, PROMPTS, strict=True):
        for sequence, completion in zip(output.sequences, output.outputs, strict=True):
            assert sequence.tokens == prompt + completion.token_ids
            assert sequence.text == llm.tokenizer.decode(sequence.tokens, skip_special_tokens=True)
            assert sequence.cum_logprob == completion.cumulative_logprob
            assert sequence.finish_reason == completion.finish_reason
    for limit in (1, 3):
        assert [each.sequences for each in llm.beam_search(PROMPTS, params, concurrency_limit=limit)] == [
            each.sequences for each in found
        ]
    with pytest.raises(RequestError, match="concurrency_limit=0"):
        llm.beam_search(PROMPTS, params, concurrency_limit=0)
    with pytest.raises(RequestError, match="lora_request"):
        llm.beam_search(PROMPTS, params, object())  # type: ignore[arg-type]


@pytest.mark.parametrize("option", BeamSearchParams.REFUSED)
def test_options_that_cannot_be_obeyed(option: str) -> None:
    def params(**options: Any) -> BeamSearchParams:
        return BeamSearchParams(beam_width=2, max_tokens=3, **options)

    for value in (None, *BeamSearchParams.REFUSED[option][0]):
        assert params(**{option: value}) == params()
    with pytest.raises(ConfigError, match=f"^{option}='x' is not allowed: .{{12,}}"):
        params(**{option: "x"})


def test_a_search_is_not_bound_by_max_logprobs() -> None:
    params = BeamSearchParams(beam_width=16, max_tokens=3)
    found = [LLM(**{**OPTIONS, "max_logprobs": most}).beam_search(PROMPTS[0], params)[0] for most in (0, 20)]
    assert [[each.token_ids for each in output.outputs] for output in found] == [
        [each.token_ids for each in found[0].outputs]
    ] * 2


def test_some_beams_end_and_others_do_not() -> None:
    """Otherwise the cases above would not show what they are for."""
    lengths = {len(token_ids) for params in SEARCHES for prompt in PROMPTS for token_ids, _ in expected(prompt, params)}
    assert len(lengths) > len(SEARCHES)


def test_the_pool_and_the_block_size_change_no_beam() -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=30)
    tight = LLM(block_size=4, num_gpu_blocks_override=24, max_num_seqs=3, max_num_batched_tokens=16)
    (found,) = tight.beam_search({"prompt_token_ids": PROMPTS[0]}, params)
    assert_beams(found, PROMPTS[0], params)


def test_searches_in_an_event_loop() -> None:
    llm = AsyncLLM.from_engine_args(EngineArgs(**OPTIONS))
    params = SEARCHES[1]

    async def run() -> list[RequestOutput]:
        cancelled = asyncio.create_task(
            llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=8, max_tokens=500), "c")
        )
        await asyncio.sleep(0.05)
        cancelled.cancel()
        found = await asyncio.gather(*(llm.beam_search(prompt, params, str(i)) for i, prompt in enumerate(PROMPTS)))
        with pytest.raises(RequestError, match="empty"):
            await llm.beam_search([], params, "bad")
        while await llm.inspect(lambda engine: engine.has_unfinished_requests()):
            await asyncio.sleep(0.01)
        return found

    try:
        for output, prompt in zip(asyncio.run(run()), PROMPTS, strict=True):
            assert_beams(output, prompt, params)
            assert output.metrics.arrival_time < output.metrics.first_token_time < output.metrics.finished_time
    finally:
        llm.shutdown()


def test_a_search_with_the_id_of_another_one_is_refused_alone() -> None:
    llm = AsyncLLM.from_engine_args(EngineArgs(**OPTIONS))
    params = SEARCHES[1]

    async def run() -> list[RequestOutput | BaseException]:
        searches = [llm.beam_search(PROMPTS[0], params, "search") for _ in range(2)]
        return await asyncio.gather(*searches, return_exceptions=True)

    try:
        found, refusal = asyncio.run(run())
        assert_beams(found, PROMPTS[0], params)
        assert isinstance(refusal, RequestError) and "request_id='search' is in use" in str(refusal)
    finally:
        llm.shutdown()


def test_an_aborted_search_gives_what_it_has() -> None:
    llm = AsyncLLM.from_engine_args(EngineArgs(**OPTIONS))

    async def run() -> RequestOutput:
        params = BeamSearchParams(beam_width=4, max_tokens=500, ignore_eos=True)
        search = asyncio.create_task(llm.beam_search(PROMPTS[0], params, "search"))
        while await llm.inspect(lambda engine: engine.stats.output_tokens < 40):  # all beams have some
            await asyncio.sleep(0.01)
        await llm.abort("search")
        found = await asyncio.wait_for(search, 20)
        while await llm.inspect(lambda engine: engine.has_unfinished_requests()):
            await asyncio.sleep(0.01)
        return found

    try:
        found = asyncio.run(run())
        assert [completion.finish_reason for completion in found.outputs] == ["abort"] * 4
        assert all(0 < len(completion.token_ids) < 500 for completion in found.outputs)
    finally:
        llm.shutdown()


def test_a_bad_prompt_among_others(llm: LLM) -> None:
    params = SEARCHES[1]
    bad, good = llm.beam_search([[], PROMPTS[0]], params)
    assert isinstance(bad.error, RequestError) and not bad.outputs
    assert_beams(good, PROMPTS[0], params)
    with pytest.raises(RequestError, match="empty"):
        llm.beam_search({"prompt_token_ids": []}, params)


def test_beams_end_where_the_model_does() -> None:
    llm = LLM(max_model_len=20, **OPTIONS)
    (found,) = llm.beam_search("AB=", BeamSearchParams(beam_width=2, max_tokens=1000, ignore_eos=True))
    assert [len(completion.token_ids) for completion in found.outputs] == [17, 17] and found.prompt == "AB="


@pytest.mark.parametrize(
    ("field", "value"),
    [("beam_width", 0), ("beam_width", 17), ("max_tokens", 0), ("length_penalty", float("nan")), ("ignore_eos", 1)],
)
def test_a_wrong_value_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 2} | {field: value}))
