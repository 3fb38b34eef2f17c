"""Structured outputs in the engine: samples obey the rule, neighbours stay as they are, bad rules are refused."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken

from kvllm import LLM, ConfigError, RequestError, RequestOutput, SamplingParams, StructuredOutputsParams
from kvllm.async_llm import AsyncLLM
from kvllm.engine_args import DEFAULT_MODEL, EngineArgs
from kvllm.serving.constraint import behind_thought
from kvllm.serving.harmony import TAGS
from kvllm.serving.reasoning import HARMONY
from kvllm.structured.compile import Grammars
from kvllm.structured.grammar import to_grammar
from kvllm.structured.token_sets import unpack
from kvllm.structured.vocabulary import read_vocabulary
from kvllm.tokenizer import Tokenizer
from tests.helpers.tokenizers import byte_level

pytest.importorskip("llguidance", reason="needs llguidance: pip install llguidance")

from llguidance import LLMatcher, LLTokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["new", "old"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GBNF = 'root ::= item ("," item)*\nitem ::= "a" | "b" [0-9]'
EXPLODING = "(((a?){30}){30}){30}"


@pytest.fixture(scope="module")
def stories(shared_dir: Path) -> LLM:
    """A model whose vocabulary has all bytes, and so every text."""
    return LLM(shared_dir / "data" / "models" / "stories260K-fp32", block_size=16, num_gpu_blocks_override=3000)


@pytest.fixture(scope="module")
def reasoner() -> LLM:
    """A model whose tokens are words, digits and letters, without quotes and braces."""
    return LLM(DEFAULT_MODEL, block_size=16, num_gpu_blocks_override=3000)


def generate(llm: LLM, rules: list[Any], prompt: str = "ten", **options: Any) -> list[RequestOutput]:
    """One completion for each rule, with seeds 0, 1, 2 ... unless options say else."""
    options = {"max_tokens": 120} | options
    params = [
        SamplingParams(
            seed=options.get("seed", seed), structured_outputs=rule, **{k: v for k, v in options.items() if k != "seed"}
        )
        for seed, rule in enumerate(rules)
    ]
    return llm.generate([prompt] * len(rules), params, use_tqdm=False)


def test_the_answer_of_gpt_oss_has_its_header() -> None:
    """A rule holds for what is in the final message, with or without a thought before it."""
    hf = byte_level("chat").hf
    hf.add_tokens([AddedToken(text, normalized=False, special=True) for text in TAGS], special_tokens=True)
    byte_level.cache_clear()  # others get it without these tokens
    tokenizer = Tokenizer(hf, ["<|im_end|>"])
    vocabulary = read_vocabulary(tokenizer, len(hf), tokenizer.eos_token_ids)
    grammars = Grammars(lambda: vocabulary, vocabulary.eos_token_ids)
    prompt = "<|start|>user<|message|>hi<|end|><|start|>assistant"
    rule = behind_thought(StructuredOutputsParams(json_object=True), HARMONY, prompt, "", must_call=False)
    thought, final = "<|channel|>analysis<|message|>hm<|end|>", "<|channel|>final<|message|>"
    for text in (f'{thought}<|start|>assistant{final}{{"a": 1}}', f'{final}{{"a": 1}}', '{"a": 1}'):
        matcher, found = grammars.matcher(rule), list[int]()
        for token_id in tokenizer.encode(text, False):
            assert unpack(matcher.allowed(found))[token_id], (text, tokenizer.decode(found))
            found.append(token_id)
        assert any(unpack(matcher.allowed(found))[token_id] for token_id in vocabulary.eos_token_ids)


def texts(outputs: list[RequestOutput]) -> list[str]:
    """Texts of completions, all of which ended by themselves."""
    assert [output.error for output in outputs if output.error] == []
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
    return [output.outputs[0].text for output in outputs]


# What is sampled obeys


def test_samples_match_a_schema(stories: LLM) -> None:
    found = texts(generate(stories, [StructuredOutputsParams(json=SCHEMA)] * 60, temperature=1.5, max_tokens=400))
    for text in found:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(found)) > 45  # of which none was forced


@pytest.mark.parametrize("pattern", [r"[0-9]{2,4}(x|yz)?", r"^(so|we|[a-f]{1,5}){3}$"])
@pytest.mark.parametrize("model", ["reasoner", "stories"])
def test_200_samples_match_a_regular_expression(model: str, pattern: str, request: pytest.FixtureRequest) -> None:
    llm = request.getfixturevalue(model)
    found = texts(generate(llm, [StructuredOutputsParams(regex=pattern)] * 200, temperature=5))
    assert all(re.fullmatch(pattern, text) for text in found)
    assert len(set(found)) > 20


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"\d+", "3", "٣"),
        (r"[\d.]+", "3.1", "٣"),
        (r"[^\d]", "٣", "3"),
        (r"\D", "٣", "3"),
        (r"\w+", "a_9", "é"),
        (r"[\W]", "é", "a"),
        (r"[+-\d]+", "-3+", ","),
        (r"[\w-.]+", "a-.", "/"),
        (r"[\w--\d]+", "a", "3"),
        (r"\\d", r"\d", "3"),
        (r"[\-\d]", "-", "٣"),
        (r"\s", "\u00a0", "_"),
        (r"[\s\S]", "\u3000", ""),
    ],
)
def test_classes_of_regular_expressions(pattern: str, good: str, bad: str) -> None:
    """Digits and letters are those of ASCII, white space is any, as in JSON schemas."""
    assert follows(StructuredOutputsParams(regex=pattern), good)
    assert not follows(StructuredOutputsParams(regex=pattern), bad)


def follows(rule: StructuredOutputsParams, text: str) -> bool:
    """Whether a text, as bytes, is one that a rule allows."""
    matcher = LLMatcher(LLTokenizer("byte"), to_grammar(rule, lambda _: None).text)
    tokens = list(text.encode())
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("rule", [{"json": SCHEMA}, {"json_object": True}])
def test_white_space_in_json(rule: dict[str, Any]) -> None:
    free, dense = (StructuredOutputsParams(**rule, disable_any_whitespace=flag) for flag in (False, True))
    value = {"name": "a b", "age": 3, "tags": ["new", "old"]}
    texts = [json.dumps(value, indent=indent) for indent in (None, 4)]
    assert [follows(free, text) for text in texts] == [True, True]
    assert [follows(dense, text) for text in texts] == [False, False]
    assert follows(dense, json.dumps(value, separators=(",", ":")))


def test_200_samples_are_choices(reasoner: LLM) -> None:
    """One choice begins with another, and one has characters that mean something in a regular expression."""
    choices = ["red", "re", "a.c+", "ten times", "9"]
    found = texts(generate(reasoner, [StructuredOutputsParams(choice=choices)] * 200, temperature=30))
    assert set(found) == set(choices)


@pytest.mark.parametrize("grammar", [GBNF, 'start: item ("," item)*\nitem: "a" | "b" /[0-9]/'])
def test_grammars_of_both_kinds(reasoner: LLM, grammar: str) -> None:
    found = texts(generate(reasoner, [StructuredOutputsParams(grammar=grammar)] * 20, temperature=5, max_tokens=2000))
    assert all(re.fullmatch("(a|b[0-9])(,(a|b[0-9]))*", text) for text in found)


def test_json_object(stories: LLM) -> None:
    outputs = generate(stories, [StructuredOutputsParams(json_object=True)] * 40, temperature=30, max_tokens=60)
    ended = [output.outputs[0].text for output in outputs if output.outputs[0].finish_reason == "stop"]
    assert ended and all(isinstance(json.loads(text), dict) for text in ended)
    assert all(output.outputs[0].text.startswith("{") for output in outputs)


@pytest.mark.parametrize("options", [
    {"temperature": 0},
    {"repetition_penalty": 1.7, "presence_penalty": 1.5, "frequency_penalty": -2.0},
    {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"logprobs": 3}, {"temperature": 0, "logprobs": 2},
])  # fmt: skip
def test_every_kind_of_sampling_obeys(reasoner: LLM, options: dict[str, Any]) -> None:
    outputs = generate(reasoner, [StructuredOutputsParams(regex="[xyz]{3}[0-9]{3}")] * 10, **options)
    assert all(re.fullmatch("[xyz]{3}[0-9]{3}", text) for text in texts(outputs))
    for output in outputs if "logprobs" in options else []:
        completion = output.outputs[0]
        assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)


def test_completions_of_one_prompt_follow_the_rule_one_by_one(reasoner: LLM) -> None:
    params = SamplingParams(n=8, seed=3, temperature=9, structured_outputs=StructuredOutputsParams(regex="[a-z]{6}"))
    (output,) = reasoner.generate("ten", params, use_tqdm=False)
    found = [completion.text for completion in output.outputs]
    assert all(re.fullmatch("[a-z]{6}", text) for text in found)
    assert len(set(found)) == 8


# The end of the text


def test_the_text_does_not_end_early_nor_late(reasoner: LLM) -> None:
    """A greedy model that would end at once must go on, and one that would go on must end."""
    rules = [StructuredOutputsParams(regex="[0-9]{30}"), StructuredOutputsParams(regex="[0-9]")]
    long, short = texts(generate(reasoner, rules, temperature=0))
    assert (len(long), len(short)) == (30, 1)


def test_min_tokens_is_kept_where_the_rule_lets_the_text_go_on(reasoner: LLM) -> None:
    rules = [StructuredOutputsParams(regex="[0-9]{2,40}"), StructuredOutputsParams(regex="[0-9]{2}")]
    free, forced = generate(reasoner, rules, temperature=0, min_tokens=20)
    assert 20 <= len(free.outputs[0].token_ids) <= 41
    assert re.fullmatch("[0-9]{2}", forced.outputs[0].text)  # the rule comes first


def test_ignore_eos_adds_no_text(reasoner: LLM) -> None:
    (output,) = generate(reasoner, [StructuredOutputsParams(regex="[0-9]{3}")], ignore_eos=True, max_tokens=12)
    assert re.fullmatch("[0-9]{3}", output.outputs[0].text)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (12, "length")


def test_a_stop_string_ends_the_text_inside_the_rule(reasoner: LLM) -> None:
    (output,) = generate(reasoner, [StructuredOutputsParams(regex="[0-9]{3}x[0-9]{3}")], stop=["x"])
    assert re.fullmatch("[0-9]{3}", output.outputs[0].text) and output.outputs[0].stop_reason == "x"


# Nothing else changes


def test_a_rule_that_allows_all_changes_no_token(reasoner: LLM) -> None:
    for temperature in (0, 1.0):
        with_rule = generate(reasoner, [StructuredOutputsParams(regex=r"(?s:.*)")] * 10, temperature=temperature)
        without = generate(reasoner, [None] * 10, temperature=temperature)
        assert [o.outputs[0].token_ids for o in with_rule] == [o.outputs[0].token_ids for o in without]


def test_batch_mates_are_the_same_bit_for_bit(reasoner: LLM) -> None:
    """With logprobs, so that more than tokens is compared."""
    alone = generate(reasoner, [None] * 16, logprobs=5)
    rules = [None] * 16 + [StructuredOutputsParams(regex="[0-9]{30,60}"), StructuredOutputsParams(choice=["so"])] * 8
    beside = generate(reasoner, rules, logprobs=5)[:16]
    assert [o.outputs[0].token_ids for o in alone] == [o.outputs[0].token_ids for o in beside]
    assert [o.outputs[0].logprobs for o in alone] == [o.outputs[0].logprobs for o in beside]


def test_the_rule_survives_preemptions(reasoner: LLM) -> None:
    small = LLM(DEFAULT_MODEL, block_size=16, num_gpu_blocks_override=12, max_model_len=160)
    rules = [StructuredOutputsParams(regex="([0-9]{4}[a-f]{2}){12,20}")] * 6
    expected, found = (texts(generate(llm, rules, seed=5, temperature=3, max_tokens=140)) for llm in (reasoner, small))
    assert small.stats().preemptions > 0
    assert found == expected
    assert all(re.fullmatch("([0-9]{4}[a-f]{2}){12,20}", text) for text in found)


def test_the_rule_survives_a_failed_step(reasoner: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sequences are dropped, and go on from the tokens that they had."""
    engine, rule = reasoner.llm_engine, StructuredOutputsParams(regex="([0-9]{4}[a-f]{2}){5}")
    params = SamplingParams(seed=0, max_tokens=100, temperature=3, structured_outputs=rule)
    (expected,) = reasoner.generate("ten", params, use_tqdm=False)
    output = engine.add_request("x", "ten", params)
    for _ in range(7):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "launch", lambda plan: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    while engine.has_unfinished_requests():
        engine.step()
    assert output.outputs[0].text == expected.outputs[0].text


# A free part in front


@pytest.mark.parametrize("end", ["</think>", "END"])  # one token, and several
@pytest.mark.parametrize("start", [None, "<think>", "BEGIN"])
def test_the_rule_begins_after_a_free_part(start: str | None, end: str) -> None:
    tokenizer = byte_level("chat")
    eos = tokenizer.hf.convert_tokens_to_ids("<|im_end|>")
    assert isinstance(eos, int)
    grammars = Grammars(lambda: read_vocabulary(tokenizer, len(tokenizer.hf), (eos,)), (eos,))
    matcher = grammars.matcher(StructuredOutputsParams(regex="[0-9]+", free_end=end, free_start=start))
    written: list[int] = []
    for token_id in tokenizer.encode((start or "") + 'It is {"a" 中 <\n' + end + "\n\n42"):
        allowed = unpack(matcher.allowed(written))
        assert allowed[token_id]
        assert not allowed[eos] or tokenizer.decode(written).endswith("\n4")
        written.append(token_id)
    allowed = np.flatnonzero(unpack(matcher.allowed(written)))
    assert set(tokenizer.decode(allowed.tolist())) <= set("0123456789" + "<|im_end|>") and eos in allowed


def test_a_free_part_may_be_left_out() -> None:
    tokenizer = byte_level("chat")
    grammars = Grammars(lambda: read_vocabulary(tokenizer, len(tokenizer.hf), (2,)), (2,))
    rule = StructuredOutputsParams(regex="[0-9]+", free_end="</think>", free_start="<think>")
    allowed = np.flatnonzero(unpack(grammars.matcher(rule).allowed([]))).tolist()
    assert {tokenizer.decode_token(token_id) for token_id in allowed} == {"<think>", *"0123456789"}


# Refusals


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"regex": EXPLODING}, "too many expressions"),
        ({"json": {"type": "string", "pattern": EXPLODING}}, None),
        ({"regex": "(a{1000}){1000}"}, None),
        ({"regex": "(a{1000}){1000}", "free_end": "."}, None),
        ({"regex": "(" * 200 + ")" * 200}, "deeper than 100"),
        ({"regex": "("}, "invalid regex"),
        ({"regex": "(?=a)"}, "look-around"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": "[" * 100_000}, "deeper than 100"),
        ({"json": "7"}, "so an object"),
        ({"json": {"type": "nope"}}, "nope"),
        ({"json": {"$ref": "#"}}, None),
        ({"json": {"enum": [f"value {i}" for i in range(100_000)]}}, "characters"),
        ({"grammar": "start: x"}, 'unknown name: "x"'),
        ({"grammar": "root ::= ("}, "GBNF"),
        ({"choice": ["中文"]}, "no token"),
        ({"json": {"type": "string"}}, "no token"),  # the vocabulary has no quotation mark
    ],
)  # fmt: skip
def test_bad_rules_are_refused_before_they_start(reasoner: LLM, rule: dict[str, Any], said: str | None) -> None:
    begin = time.process_time()
    with pytest.raises(RequestError, match=said):
        reasoner.llm_engine.add_request("x", "ten", SamplingParams(structured_outputs=StructuredOutputsParams(**rule)))
    assert time.process_time() - begin < 0.5  # of this process, where steps run
    assert not reasoner.llm_engine.has_unfinished_requests()


def test_a_slow_rule_ends_its_own_request(reasoner: LLM) -> None:
    """It is ambiguous: every token has more ways to be read than the one before."""
    slow = StructuredOutputsParams(grammar='start: e\ne: e e | "a" | e e e')
    bad, good = generate(reasoner, [slow, StructuredOutputsParams(regex="[0-9]{100}")], max_tokens=1000)
    assert bad.error is not None and "structured_outputs" in str(bad.error)
    assert re.fullmatch("[0-9]{100}", good.outputs[0].text)


def test_a_rule_that_explodes_holds_up_nobody() -> None:
    """It is tried for a second of computing time, during which another request gets its tokens."""
    args = EngineArgs(DEFAULT_MODEL, block_size=16, num_gpu_blocks_override=600)
    llm = AsyncLLM.from_engine_args(args)
    rule = StructuredOutputsParams(regex="(a{1000}){1000}")

    async def refused() -> None:
        with pytest.raises(RequestError):
            await anext(llm.generate("ten", SamplingParams(structured_outputs=rule), "bad"))

    async def run() -> int:
        items = llm.generate("ten", SamplingParams(max_tokens=4000, ignore_eos=True), "good")
        await anext(items)
        attempt, tokens = asyncio.create_task(refused()), 0
        async for item in items:
            tokens += len(item.outputs[0].token_ids)
            if attempt.done():
                break
        await attempt
        await items.aclose()
        return tokens

    try:
        assert asyncio.run(run()) > 50
    finally:
        llm.shutdown()


@pytest.mark.parametrize(
    "fields",
    [{}, {"regex": "a", "choice": ["b"]}, {"choice": []}, {"json_object": False}, {"regex": 5}, {"json": {1: {2}}},
     {"regex": "a", "free_end": ""}, {"regex": "a", "free_start": "<think>"}],
)  # fmt: skip
def test_fields_are_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        StructuredOutputsParams(**fields)


def test_options_of_vllm_that_ask_for_nothing_are_taken() -> None:
    neutral = {name: values[0] for name, (values, _) in StructuredOutputsParams.REFUSED.items() if values}
    assert StructuredOutputsParams(regex="a", **neutral) == StructuredOutputsParams(regex="a")
    with pytest.raises(ConfigError, match="backend='outlines' is not allowed: llguidance"):
        StructuredOutputsParams(regex="a", backend="outlines")


def test_a_schema_may_be_a_dict_or_text() -> None:
    assert StructuredOutputsParams(json={"type": "null"}) == StructuredOutputsParams(json='{"type": "null"}')


def test_missing_library(reasoner: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"kvllm\[serve\]"):
        reasoner.generate("ten", SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")), use_tqdm=False)
