"""/v1/chat/completions with a template that the server's operator gives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from kvllm.serving import chat_template
from tests.helpers.server import ServerProcess
from tests.helpers.tokenizers import byte_level
from tests.serving.conftest import PROMPT

# The model knows no roles, so a template of its own alphabet: the messages one after the other.
TEMPLATE = """\
{%- if stuck %}{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}{% endif -%}
{%- for message in messages %}{{ message.content }}{% if not loop.last %},{% endif %}{% endfor -%}
{%- if add_generation_prompt %}{{ ending or '' }}{% endif -%}
"""
QUESTION = [{"role": "user", "content": PROMPT}]
GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def chat_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    names = ("--served-model-name", "small", "other/name")
    settings = "method=keydiff,policy=threshold,threshold_tokens=256,budget_tokens=128"
    pool = ("--block-size", "16", "--kv-cache-memory-bytes", "64M", "--compression", settings)
    process = ServerProcess("--chat-template", str(template), *names, *pool)
    try:
        yield process
    finally:
        assert process.stop() == 0


@pytest.fixture(scope="module")
def client(chat_server: ServerProcess) -> Any:
    return openai.OpenAI(base_url=f"{chat_server.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def expected(client: Any) -> str:
    return client.completions.create(model="small", prompt=PROMPT, **GREEDY).choices[0].text


def test_answer(client: Any, expected: str) -> None:
    answer = client.chat.completions.create(model="other/name", messages=QUESTION, **GREEDY)
    message = answer.choices[0].message
    assert (message.role, message.content, answer.choices[0].finish_reason) == ("assistant", expected, "length")
    assert (answer.object, answer.model) == ("chat.completion", "other/name")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (40, 24)
    assert client.models.retrieve("other/name").id == "other/name"


def test_stream_begins_with_the_role(client: Any, expected: str) -> None:
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model="small", messages=QUESTION, n=2, stream=True, stream_options=options, **GREEDY
        )
    )
    texts, finish = ["", ""], [None, None]
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", "assistant"]
    for chunk in chunks[:-1]:
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        finish[choice.index] = choice.finish_reason or finish[choice.index]
    assert texts == [expected, expected] and finish == ["length", "length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 48


def test_fields_that_vllm_sends(chat_server: ServerProcess) -> None:
    """Its clients read them from every answer: null is not the same as absent to them."""
    _, answer = chat_server.json("/v1/chat/completions", {"messages": QUESTION, **GREEDY})
    nothing = {"service_tier", "system_fingerprint", "prompt_logprobs", "prompt_token_ids", "prompt_text"}
    nothing |= {"kv_transfer_params", "ec_transfer_params", "metrics"}
    assert {name for name, value in answer.items() if value is None} == nothing
    (choice,) = answer["choices"]
    nothing = {"logprobs", "stop_reason", "token_ids", "routed_experts"}
    assert {name for name, value in choice.items() if value is None} == nothing
    nothing = {"refusal", "annotations", "audio", "function_call", "reasoning", "reasoning_content"}
    assert {name for name, value in choice["message"].items() if value is None} == nothing
    assert "tool_calls" not in choice["message"]


def test_the_first_chunk(client: Any, chat_server: ServerProcess) -> None:
    """It has the prompt's token ids, if they are asked for, and no token of output has been counted."""
    usage = {"include_usage": True, "continuous_usage_stats": True}
    ask: Any = {"model": "small", "messages": QUESTION, "stream": True, "stream_options": usage, **GREEDY}
    for asked in (True, False):
        first, second, *_ = client.chat.completions.create(**ask, extra_body={"return_token_ids": asked})
        ids = chat_server.json("/tokenize", {"prompt": PROMPT})[1]["tokens"]
        assert first.prompt_token_ids == (ids if asked else None) and not hasattr(second, "prompt_token_ids")
        assert bool(second.choices[0].token_ids) == asked
        assert (first.usage.prompt_tokens, first.usage.completion_tokens, first.usage.total_tokens) == (40, 0, 40)
        assert second.usage.completion_tokens >= 1


def test_truncated_conversations(chat_server: ServerProcess) -> None:
    ids = chat_server.json("/tokenize", {"prompt": PROMPT})[1]["tokens"]
    ask = {"messages": QUESTION, "max_tokens": 1, "return_token_ids": True, "truncate_prompt_tokens": 7}
    for side, expected in (("left", ids[-7:]), ("right", ids[:7])):
        _, answer = chat_server.json("/v1/chat/completions", ask | {"truncation_side": side})
        assert answer["prompt_token_ids"] == expected


def test_parts_and_template_arguments(client: Any, chat_server: ServerProcess) -> None:
    """The text that the template makes of the messages is the prompt."""
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": parts}]
    for extra, prompt in (
        ({}, "x,A\nB"),
        ({"chat_template_kwargs": {"ending": "?"}}, "x,A\nB?"),
        ({"chat_template_kwargs": {"ending": "?"}, "add_generation_prompt": False}, "x,A\nB"),
    ):
        status, encoded = chat_server.json("/tokenize", {"messages": messages, **extra})
        assert status == 200, encoded
        assert chat_server.json("/detokenize", {"tokens": encoded["tokens"]})[1]["prompt"] == prompt


def test_the_last_message_is_continued(chat_server: ServerProcess, expected: str) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "at"}]
    body = {"messages": messages, "continue_final_message": True, **GREEDY}
    status, answer = chat_server.json("/v1/chat/completions", body)
    assert status == 200, answer
    _, echoed = chat_server.json("/v1/chat/completions", body | {"echo": True})
    assert echoed["choices"][0]["message"]["content"] == "at" + answer["choices"][0]["message"]["content"]
    both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    assert chat_server.json("/v1/chat/completions", both)[0] == 400


def test_logprobs(client: Any, expected: str) -> None:
    answer = client.chat.completions.create(model="small", messages=QUESTION, logprobs=True, top_logprobs=2, **GREEDY)
    content = answer.choices[0].logprobs.content
    assert "".join(each.token for each in content) == expected
    for each in content:
        assert len(each.top_logprobs) == 2 and each.top_logprobs[0].token == each.token
        assert bytes(each.bytes).decode() == each.token
    plain = client.chat.completions.create(model="small", messages=QUESTION, logprobs=True, **GREEDY)
    assert all(each.top_logprobs == [] for each in plain.choices[0].logprobs.content)


def test_max_completion_tokens(client: Any) -> None:
    few = client.chat.completions.create(model="small", messages=QUESTION, max_completion_tokens=3, temperature=0)
    assert few.usage.completion_tokens == 3
    unlimited = client.chat.completions.create(model="small", messages=QUESTION, temperature=0)
    assert unlimited.choices[0].finish_reason == "stop" and unlimited.usage.completion_tokens > 24


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "at least one"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input_audio"),
        ({"messages": [{"content": "a"}]}, "role"),
        ({"chat_template": "{{ 1 }}"}, "--chat-template"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "tokenize"),
        ({"top_logprobs": 2}, "logprobs"),
        ({"max_tokens": 0}, "at least 1"),
        ({"modalities": ["audio"]}, "text"),
        ({"logprobs": True, "top_logprobs": 50}, "between 0 and 20"),
    ],
)
def test_refusals(chat_server: ServerProcess, fields: dict[str, Any], words: str) -> None:
    status, answer = chat_server.json("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 1, **fields})
    assert status == 400 and words in answer["error"]["message"], answer


def test_a_template_that_takes_long_is_stopped(chat_server: ServerProcess) -> None:
    """And the server has its thread back: more of them than it has threads are stopped, one after the other.

    No other rendering is begun for the arguments that are no object.
    """
    call = {"function": {"name": "f", "arguments": "{"}}
    body = {
        "messages": [{"role": "assistant", "tool_calls": [call]}],
        "chat_template_kwargs": {"stuck": True},
        "max_tokens": 1,
    }
    status, answer = chat_server.json("/v1/chat/completions", body)
    assert status == 400 and "took longer than" in answer["error"]["message"], answer
    assert chat_server.json("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 1})[0] == 200


def test_a_conversation_that_waits_for_a_thread_is_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "TEMPLATE_SECONDS", 0.2)

    async def render() -> str:
        with ThreadPoolExecutor(1) as pool:
            template = chat_template.ChatTemplate(byte_level("chat"), TEMPLATE, pool)
            pool.submit(time.sleep, 0.6)
            return await template.render([{"role": "user", "content": "hello"}], None, {})

    assert asyncio.run(render()) == "hello"


def test_compression_and_its_usage(chat_server: ServerProcess) -> None:
    """A request of 540 KV pairs is cut to 128 whenever it has 256, unless it asks for something else."""
    body = {"prompt": PROMPT, "max_tokens": 500, "temperature": 0, "ignore_eos": True}
    usages = []
    for compression in (None, {"budget_tokens": 192}, {"compress": False}):
        status, answer = chat_server.json("/v1/completions", body | {"compression": compression})
        assert status == 200, answer
        usages.append(answer["usage"]["kvllm"])
    cut, less, not_at_all = usages
    assert cut["evicted_pairs"] >= 2 * 128 and cut["kept_share"] == round(1 - cut["evicted_pairs"] / 540, 4)
    assert 0 < less["evicted_pairs"] < cut["evicted_pairs"]
    assert not_at_all == {"kept_share": 1.0, "windows": 0, "evicted_pairs": 0, "preemptions": 0}
    assert chat_server.metric("kvllm:evicted_pairs_total") == cut["evicted_pairs"] + less["evicted_pairs"]
    assert chat_server.json("/v1/completions", body | {"compression": {"method": "kara"}})[0] == 400


def test_no_template(server: ServerProcess) -> None:
    """The model in the package has none."""
    status, answer = server.json("/v1/chat/completions", {"messages": QUESTION})
    assert status == 400
    assert "/v1/completions" in answer["error"]["message"] and "--chat-template" in answer["error"]["message"]
