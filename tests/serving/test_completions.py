"""/v1/completions as the openai package and a plain client see it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from kvllm import LLM, SamplingParams
from kvllm.async_llm import AsyncLLM
from kvllm.engine_args import EngineArgs
from kvllm.serving.app import make_app
from kvllm.serving.state import ServerOptions, ServerState
from tests.helpers.asgi import ask
from tests.helpers.checkpoints import make_parrot
from tests.helpers.server import ServerProcess
from tests.helpers.tokenizers import byte_level
from tests.serving.conftest import PROMPT, SERVERS

pytestmark = SERVERS

GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def expected() -> str:
    """What the engine itself writes."""
    llm = LLM(block_size=16, kv_cache_memory_bytes=64 << 20)
    params = SamplingParams(temperature=0, max_tokens=24)
    return llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text


def test_text_and_usage(client: Any, expected: str) -> None:
    answer = client.completions.create(model="reasoner", prompt=PROMPT, **GREEDY)
    assert answer.choices[0].text == expected
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (40, 24, 64)
    again = client.completions.create(model="reasoner", prompt=PROMPT, **GREEDY)
    assert again.usage.prompt_tokens_details.cached_tokens == 32  # two blocks of 16
    assert again.usage.kvllm == {"kept_share": 1.0, "windows": 0, "evicted_pairs": 0, "preemptions": 0}


def test_stream_adds_up(client: Any, expected: str) -> None:
    options = {"include_usage": True}
    chunks = list(
        client.completions.create(model="reasoner", prompt=PROMPT, stream=True, stream_options=options, **GREEDY)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == expected
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_continuous_usage(client: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.completions.create(model="reasoner", prompt=PROMPT, stream=True, stream_options=options, **GREEDY)
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 24 and counts[0] >= 1


def test_choices_of_several_prompts(client: Any, expected: str) -> None:
    """Choice i * n + j is completion j of prompt i."""
    prompts = [PROMPT, "words: a1,b2\n"]
    second = client.completions.create(model="reasoner", prompt=prompts[1], **GREEDY)
    alone = second.choices[0].text
    answer = client.completions.create(model="reasoner", prompt=prompts, n=2, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [expected, expected, alone, alone]
    assert answer.usage.completion_tokens == 2 * 24 + 2 * second.usage.completion_tokens
    texts = ["", "", "", ""]
    for chunk in client.completions.create(model="reasoner", prompt=prompts, n=2, stream=True, **GREEDY):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]


def test_token_ids(server: ServerProcess, client: Any, expected: str) -> None:
    _, encoded = server.json("/tokenize", {"prompt": PROMPT, "return_token_strs": True})
    assert encoded["count"] == 40 and encoded["max_model_len"] == 4096
    assert "".join(encoded["token_strs"]) == PROMPT
    assert server.json("/detokenize", {"tokens": encoded["tokens"]}) == (200, {"prompt": PROMPT})
    ids = encoded["tokens"]
    assert client.completions.create(model="reasoner", prompt=ids, **GREEDY).choices[0].text == expected
    both = client.completions.create(model="reasoner", prompt=[ids, ids], **GREEDY)
    assert [choice.text for choice in both.choices] == [expected, expected]
    _, answer = server.json("/v1/completions", {"prompt": ids, "return_token_ids": True, **GREEDY})
    assert answer["choices"][0]["prompt_token_ids"] == ids
    assert server.json("/detokenize", {"tokens": answer["choices"][0]["token_ids"]})[1]["prompt"] == expected


def test_fields_that_vllm_sends(server: ServerProcess) -> None:
    """Its clients read them from every answer: null is not the same as absent to them."""
    _, answer = server.json("/v1/completions", {"prompt": PROMPT, **GREEDY})
    nothing = {"service_tier", "system_fingerprint", "kv_transfer_params", "ec_transfer_params", "metrics"}
    assert {name for name, value in answer.items() if value is None} == nothing
    (choice,) = answer["choices"]
    nothing = {"logprobs", "stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids", "routed_experts"}
    assert {name for name, value in choice.items() if value is None} == nothing


def test_truncated_prompts(server: ServerProcess) -> None:
    ids = server.json("/tokenize", {"prompt": PROMPT})[1]["tokens"]
    for prompt in (PROMPT, ids):
        ask = {"prompt": prompt, "max_tokens": 1, "return_token_ids": True, "truncate_prompt_tokens": 7}
        for side, expected in (("left", ids[-7:]), (None, ids[-7:]), ("right", ids[:7])):
            _, answer = server.json("/v1/completions", ask | {"truncation_side": side})
            assert answer["choices"][0]["prompt_token_ids"] == expected
    # So long that its text is cut before it is encoded.
    long = {"prompt": PROMPT * 200, "max_tokens": 1, "return_token_ids": True, "truncate_prompt_tokens": 7}
    _, answer = server.json("/v1/completions", long | {"truncation_side": "right"})
    assert answer["choices"][0]["prompt_token_ids"] == ids[:7]
    status, answer = server.json("/v1/completions", long | {"truncation_side": "middle"})
    assert status == 400 and answer["error"]["param"] == "truncation_side"


def test_logprobs(client: Any, expected: str) -> None:
    choice = client.completions.create(model="reasoner", prompt=PROMPT, logprobs=3, **GREEDY).choices[0]
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == expected
    for begin, token in zip(logprobs.text_offset, logprobs.tokens, strict=True):
        assert expected[begin:].startswith(token)
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(top) == 3 and max(top, key=top.get) == token  # greedy
        assert top[token] == logprob <= 0


CHARACTER = "中"
PARTS = ["ä", "¸", "Ń"]
"""Its bytes, as a byte-level vocabulary writes them."""


@pytest.fixture(scope="module")
def in_parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerState]:
    """A model that says CHARACTER and a letter, a byte at a time, with two names and a default for its template."""
    path = tmp_path_factory.mktemp("parts")
    make_parrot(path, byte_level("chat").hf, ["Ċ", *PARTS, "a", "<|im_end|>"])
    args = EngineArgs(model=path, kv_cache_memory_bytes=16 << 20)
    options = ServerOptions(("first", "second"), chat_template_kwargs={"enable_thinking": False, "x": 1})
    llm = AsyncLLM.from_engine_args(args)
    yield ServerState(args, options, llm)
    llm.shutdown()


def asked(state: ServerState, path: str, body: dict[str, Any] | None = None) -> Any:
    status, answer = asyncio.run(ask(make_app(state), path, body))
    assert status == 200, answer
    return json.loads(answer)


def test_logprobs_of_parts_of_a_character(in_parts: ServerState) -> None:
    """They have their own bytes and names. The places are those of the character in the text."""
    body = {"prompt": "\n", "temperature": 0, "max_tokens": 4, "logprobs": 5}
    choice = asked(in_parts, "/v1/completions", body)["choices"][0]
    names = [f"bytes:\\x{byte:02x}" for byte in CHARACTER.encode()]
    assert choice["text"] == f"{CHARACTER}a"
    assert choice["logprobs"]["tokens"] == [*names, "a"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 1]
    assert all(len(top) == 5 for top in choice["logprobs"]["top_logprobs"])  # none has taken the place of another
    named = asked(in_parts, "/v1/completions", body | {"return_tokens_as_token_ids": True})["choices"][0]["logprobs"]
    assert named["text_offset"] == [0, 0, 0, 1] and named["tokens"][0].startswith("token_id:")


def test_logprobs_of_parts_of_a_character_in_a_chat(in_parts: ServerState) -> None:
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "chat_template_kwargs": {"enable_thinking": True},
        "temperature": 0,
        "max_tokens": 3,
        "logprobs": True,
        "top_logprobs": 1,
    }
    choice = asked(in_parts, "/v1/chat/completions", body)["choices"][0]
    assert choice["message"]["content"] == CHARACTER
    for token, byte in zip(choice["logprobs"]["content"], CHARACTER.encode(), strict=True):
        assert (token["token"], token["bytes"]) == (f"bytes:\\x{byte:02x}", [byte])
        assert token["top_logprobs"][0]["bytes"] == [byte]


@pytest.mark.parametrize("name", ["first", "second", None])
def test_answers_have_the_name_that_was_asked_for(in_parts: ServerState, name: str | None) -> None:
    listed = asked(in_parts, "/v1/models")["data"]
    assert [model["id"] for model in listed] == ["first", "second"]
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    bodies = {
        "/v1/completions": {"prompt": "a", "max_tokens": 1},
        "/v1/chat/completions": chat,
        "/v1/messages": chat,
        "/v1/responses": {"input": "a", "max_output_tokens": 1},
    }
    for path, body in bodies.items():
        if name is not None or path != "/v1/messages":  # where it is required
            answer = asked(in_parts, path, body if name is None else body | {"model": name})
            assert answer["model"] == (name or "first"), path
    if name is not None:
        assert asked(in_parts, f"/v1/models/{name}")["id"] == name


def test_defaults_of_the_chat_template(in_parts: ServerState) -> None:
    """A request's own override them key by key."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
    closed = "<think>\n\n</think>\n\n"
    for kwargs, expected in [({}, True), ({"y": 2}, True), ({"enable_thinking": True}, False)]:
        token_ids = asked(in_parts, "/tokenize", body | {"chat_template_kwargs": kwargs})["tokens"]
        assert in_parts.tokenizer.decode(token_ids).endswith(closed) == expected
        usage = asked(in_parts, "/v1/chat/completions", body | {"chat_template_kwargs": kwargs, "max_tokens": 1})[
            "usage"
        ]
        assert usage["prompt_tokens"] == len(token_ids)


def test_echo_with_logprobs_of_the_prompt(client: Any, expected: str) -> None:
    """What lm-eval asks for. The prompt's own text comes first, and nothing predicts its first token."""
    ask = {"model": "reasoner", "prompt": PROMPT + expected, "temperature": 0, "echo": True, "logprobs": 1}
    choice = client.completions.create(max_tokens=0, **ask).choices[0]
    assert choice.text == PROMPT + expected and choice.finish_reason == "length"
    assert "".join(choice.logprobs.tokens) == PROMPT + expected
    assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.top_logprobs[0] is None
    assert len(choice.logprobs.tokens) == 64 and None not in choice.logprobs.token_logprobs[1:]
    generated = client.completions.create(model="reasoner", prompt=PROMPT, logprobs=1, **GREEDY).choices[0]
    assert choice.logprobs.token_logprobs[40:] == pytest.approx(generated.logprobs.token_logprobs, abs=1e-4)
    one = client.completions.create(max_tokens=1, **ask).choices[0]
    assert one.logprobs.token_logprobs[1:64] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-4)
    assert len(one.logprobs.tokens) == 65
    streamed = list(client.completions.create(max_tokens=1, stream=True, **ask))
    assert "".join(chunk.choices[0].text for chunk in streamed) == one.text


def test_stop_and_seed(client: Any, expected: str) -> None:
    stopped = client.completions.create(model="reasoner", prompt=PROMPT, stop=["f9"], temperature=0, max_tokens=100)
    assert stopped.choices[0].finish_reason == "stop" and stopped.choices[0].stop_reason == "f9"
    assert stopped.choices[0].text == expected[: expected.index("f9")]
    kept = {"include_stop_str_in_output": True}
    with_stop = client.completions.create(
        model="reasoner", prompt=PROMPT, stop="f9", temperature=0, max_tokens=100, extra_body=kept
    )
    assert with_stop.choices[0].text == stopped.choices[0].text + "f9"
    sampled = [
        client.completions.create(model="reasoner", prompt="a", seed=seed, temperature=2, max_tokens=24).choices[0].text
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]


def test_sampling_fields_reach_the_engine(server: ServerProcess) -> None:
    """Each field changes what is written, as its meaning says."""
    ask = {"prompt": PROMPT, "temperature": 0, "max_tokens": 4, "return_token_ids": True}
    first = server.json("/v1/completions", ask)[1]["choices"][0]["token_ids"]
    banned = server.json("/v1/completions", ask | {"logit_bias": {str(first[0]): -100}})[1]["choices"][0]["token_ids"]
    assert banned[0] != first[0]
    word = server.json("/detokenize", {"tokens": first[:1]})[1]["prompt"]
    assert server.json("/v1/completions", ask | {"bad_words": [word]})[1]["choices"][0]["token_ids"][0] != first[0]
    only = server.json("/v1/completions", ask | {"allowed_token_ids": [5]})[1]["choices"][0]["token_ids"]
    assert only == [5, 5, 5, 5]
    ended = server.json("/v1/completions", ask | {"stop_token_ids": [first[1]]})[1]["choices"][0]
    assert ended["token_ids"] == first[:2] and ended["stop_reason"] == first[1]
    later = server.json("/v1/completions", ask | {"stop_token_ids": [first[1]], "min_tokens": 3})[1]["choices"][0]
    assert len(later["token_ids"]) >= 3
    cut = server.json("/v1/completions", ask | {"truncate_prompt_tokens": 7, "echo": True})[1]
    assert cut["usage"]["prompt_tokens"] == 7
    named = server.json("/v1/completions", ask | {"logprobs": 0, "return_tokens_as_token_ids": True})[1]
    assert named["choices"][0]["logprobs"]["tokens"] == [f"token_id:{token}" for token in first]


def test_ignored_and_unknown_fields(server: ServerProcess) -> None:
    harmless = {"user": "someone", "best_of": 1, "nobody_knows_this": {"a": 1}, "suffix": None, "n": None}
    assert server.json("/v1/completions", {"prompt": "a", "max_tokens": 1, **harmless})[0] == 200


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"best_of": 3}, "best_of", "use n"),
        ({"length_penalty": 2}, "length_penalty", "needs use_beam_search"),
        ({"prompt": None}, "prompt", "a prompt is needed"),
        ({"prompt": []}, "prompt", "a prompt is needed"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": ["a", [1]]}, "prompt", "mixes"),
        ({"prompt": [229]}, None, "not in the vocabulary"),
        ({"prompt": [-1]}, None, "not in the vocabulary"),
        ({"prompt": "a" * 100_000}, "prompt", "This model's maximum context length is 4096 tokens"),
        ({"prompt": [5] * 5000}, "prompt", "This model's maximum context length is 4096 tokens"),
        ({"max_tokens": 5000}, "prompt", "This model's maximum context length is 4096 tokens"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": -1}, "max_tokens", "at least 0"),
        ({"max_tokens": "7"}, "max_tokens", "Expected `int"),
        ({"temperature": -1}, "temperature", "between 0"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"n": 0}, "n", "at least 1"),
        ({"n": 1000}, "n", "at most 128"),
        ({"logprobs": 21}, "logprobs", "between 0 and 20"),
        ({"logit_bias": {"5": 1000}}, "logit_bias", "-100 to 100"),
        ({"logit_bias": {str(token): 1 for token in range(2000)}}, "logit_bias", "at most 1024"),
        ({"stop": ["x"] * 65}, "stop", "at most 64"),
        ({"stop": "x" * 2000}, "stop", "at most 1024 characters"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=True"),
        ({"compression": {"budget_tokens": 64}}, None, "threshold"),
        ({"compression": {"method": "kara"}}, "compression", "unknown field"),
        ({"response_format": {"type": "nothing"}}, "response_format", ""),
    ],
)
def test_refusals(server: ServerProcess, fields: dict[str, Any], param: str | None, words: str) -> None:
    for stream in (False, True):
        status, answer = server.json("/v1/completions", {"prompt": "a", "max_tokens": 1, "stream": stream, **fields})
        assert status == 400, answer
        assert answer["error"]["param"] == param and words in answer["error"]["message"], answer
        kind = ("BadRequestError", 400)
        if "maximum context length" in words:
            kind = ("invalid_request_error", "context_length_exceeded")
        assert (answer["error"]["type"], answer["error"]["code"]) == kind
        if "stream_options" in fields:
            break


def test_exceptions_of_the_client(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="reasoner", prompt="a", temperature=-1)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="reasoner", input="a")
    assert [model.id for model in client.models.list()] == ["reasoner"]
    assert client.models.retrieve("reasoner").max_model_len == 4096


def test_64_streams_at_once(server: ServerProcess, expected: str) -> None:
    """Each has all of its text, whoever else is there."""

    async def one(client: Any) -> str:
        stream = await client.completions.create(model="reasoner", prompt=PROMPT, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=120
        ) as client:
            return await asyncio.gather(*(one(client) for _ in range(64)))

    assert asyncio.run(all_of_them()) == [expected] * 64


def test_stream_on_the_wire(server: ServerProcess) -> None:
    status, headers, body = server.request(
        "/v1/completions", {"prompt": PROMPT, "stream": True, **GREEDY}, {"X-Request-Id": "mine:1 \t<b>"}
    )
    assert status == 200 and headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache" and headers["x-accel-buffering"] == "no"
    assert headers["x-request-id"] == "mine:1b"
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert json.loads(events[0].removeprefix("data: "))["id"] == "cmpl-mine:1b"
