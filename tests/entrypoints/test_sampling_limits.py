"""Extreme sampling options: what the door lets in generates, and disturbs nobody else."""

from __future__ import annotations

import functools
import math
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvllm import LLM, CompressionConfig, ConfigError, RequestError, SamplingParams
from kvllm.core.protocol import SequenceStart, StepPlan, decode_plan, encode
from kvllm.outputs import RequestOutput
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.examples import examples

VOCAB = 16
ORDINARY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
INTEGERS = st.one_of(
    st.integers(-2, 30),
    st.integers(1, 80).flatmap(lambda bits: st.sampled_from([2**bits - 1, 2**bits, 2**bits + 1, -(2**bits)])),
)
FLOATS = st.one_of(
    st.sampled_from([0.0, 1.0, 5e-324, 1e-45, 1e-38, 1e-6, 1e-5, 1e6, 3e38, 3.5e38, 1e39, 1e308, math.inf, math.nan]),
    st.floats(),
    st.floats(0, 2),
    INTEGERS,
)
FIELDS = {
    "n": INTEGERS,
    "temperature": FLOATS,
    "top_p": FLOATS,
    "top_k": INTEGERS,
    "min_p": FLOATS,
    "seed": INTEGERS,
    "max_tokens": st.none() | INTEGERS,
    "min_tokens": INTEGERS,
    "stop_token_ids": st.lists(INTEGERS | st.integers(0, VOCAB), max_size=3) | st.just(list(range(VOCAB + 2))),
    "ignore_eos": st.booleans(),
    "repetition_penalty": FLOATS,
    "presence_penalty": FLOATS,
    "frequency_penalty": FLOATS,
    "logprobs": st.none() | INTEGERS,
    "budget_tokens": st.none() | INTEGERS,
    "compress": st.booleans(),
    "retain_blocks": st.none() | INTEGERS,
    "prompt_logprobs": st.none() | INTEGERS,
    "logit_bias": st.none() | st.dictionaries(INTEGERS, FLOATS, max_size=3),
    "allowed_token_ids": st.none() | st.lists(INTEGERS, max_size=3),
    "bad_words_token_ids": st.none() | st.lists(st.lists(INTEGERS, max_size=3), max_size=3),
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    path = tmp_path_factory.mktemp("llama")
    make_checkpoint(path, "llama", vocab_size=VOCAB, num_hidden_layers=1)
    compression = CompressionConfig(
        method="keydiff", policy="threshold", threshold_tokens=20, budget_tokens=10, buffer=2
    )
    return LLM(
        path, block_size=4, num_gpu_blocks_override=400, max_model_len=32, max_num_seqs=30, compression=compression
    )


def serve(llm: LLM, params: SamplingParams) -> RequestOutput:
    """The output with these options, after a check that an ordinary request beside it gets its tokens."""
    served, beside = llm.generate([[1, 2, 3], [5, 6]], [params, ORDINARY], use_tqdm=False)
    assert beside.error is None and beside.outputs[0].token_ids == alone(llm)
    return served


@functools.cache
def alone(llm: LLM) -> list[int]:
    """The tokens of the ordinary request without others."""
    return llm.generate([[5, 6]], ORDINARY, use_tqdm=False)[0].outputs[0].token_ids


def check(llm: LLM, params: SamplingParams) -> None:
    assert (
        decode_plan(encode(StepPlan(new_seqs=[SequenceStart(0, [1], 1, 0, params, 0)]))).new_seqs[0].sampling == params
    )
    served = serve(llm, params)
    assert served.error is None or isinstance(served.error, RequestError)
    for completion in served.outputs:
        assert completion.finish_reason in ("stop", "length")
        assert all(0 <= token_id < VOCAB for token_id in completion.token_ids)
        if completion.logprobs:
            assert all(logprob.logprob <= 0 for position in completion.logprobs for logprob in position.values())


@settings(max_examples=examples(500))
@example(options={"temperature": 1e39, "min_tokens": 2})
@example(options={"temperature": 1e6, "min_tokens": 2})
@example(options={"max_tokens": 2**64})
@example(options={"max_tokens": sys.maxsize, "min_tokens": sys.maxsize})
@example(options={"top_k": 2**70})
@example(options={"stop_token_ids": [2**70]})
@example(options={"budget_tokens": 2**70})
@example(options={"budget_tokens": sys.maxsize})
@example(options={"repetition_penalty": 1e39})
@example(options={"repetition_penalty": 1e-46, "temperature": 0})
@example(options={"stop_token_ids": list(range(VOCAB)), "min_tokens": 8, "max_tokens": 8})
@example(options={"stop_token_ids": list(range(1, VOCAB)), "min_tokens": 8, "temperature": 0, "frequency_penalty": 2.0})
@example(options={"logprobs": 20})
@example(options={"max_tokens": 0, "prompt_logprobs": 2, "n": 3})
@example(options={"n": 3, "temperature": 0})
@example(options={"allowed_token_ids": [3], "bad_words_token_ids": [[3]], "stop_token_ids": [3], "min_tokens": 5})
@example(options={"logit_bias": {1: -100.0, 2: 100.0}, "temperature": 1e6, "repetition_penalty": 1e6})
@given(options=st.fixed_dictionaries({}, optional=FIELDS))
def test_what_is_accepted_generates_and_disturbs_nobody(llm: LLM, options: dict) -> None:
    try:
        params = SamplingParams(**options)
    except ConfigError as error:
        assert any(field in str(error) for field in options)
    else:
        check(llm, params)


def test_when_every_token_would_stop_none_is_forbidden(llm: LLM) -> None:
    """Some token must come: `min_tokens` holds all the same, as nothing stops a completion before it."""
    everything = list(range(VOCAB))
    output = serve(llm, SamplingParams(temperature=0, min_tokens=6, max_tokens=12, stop_token_ids=everything))
    (free,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    assert output.outputs[0].token_ids == free.outputs[0].token_ids
    assert output.outputs[0].finish_reason == "stop"


def test_the_one_token_that_is_not_forbidden_comes(llm: LLM) -> None:
    others = [token_id for token_id in range(VOCAB) if token_id != 7]
    for temperature in (0, 1.0, 1e6):
        params = SamplingParams(temperature=temperature, min_tokens=5, max_tokens=5, stop_token_ids=others)
        assert serve(llm, params).outputs[0].token_ids == [7] * 5


def test_more_logprobs_than_the_vocabulary_has(llm: LLM) -> None:
    output = serve(llm, SamplingParams(logprobs=VOCAB + 1))
    with pytest.raises(RequestError, match="logprobs=17 is not allowed: the vocabulary has 16 tokens"):
        raise output.error
    assert len(serve(llm, SamplingParams(logprobs=VOCAB)).outputs[0].logprobs[0]) == VOCAB
