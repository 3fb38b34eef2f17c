"""Beam search by the server: the beams of `LLM.beam_search`, within bounds, and nothing left behind."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from kvllm import LLM, BeamSearchParams
from tests.helpers.server import ServerProcess
from tests.helpers.waiting import wait_until
from tests.serving.conftest import PROMPT, SERVERS

pytestmark = SERVERS

PROMPTS = [PROMPT, "words: a1,b2\n"]
BEAMS = {"use_beam_search": True, "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def expected(width: int, **options: Any) -> list[list[str]]:
    llm = LLM(block_size=16, kv_cache_memory_bytes=64 << 20)
    found = llm.beam_search(PROMPTS, BeamSearchParams(beam_width=width, max_tokens=12, **options))
    return [[completion.text for completion in output.outputs] for output in found]


def test_beams_are_those_of_the_library(client: Any) -> None:
    beams = expected(3)
    assert len(set(beams[0])) == 3
    answer = client.completions.create(model="reasoner", prompt=PROMPTS, n=3, extra_body=BEAMS)
    assert [choice.text for choice in answer.choices] == [*beams[0], *beams[1]]
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage.completion_tokens <= 6 * 12 and answer.usage.prompt_tokens > 40
    fewer = client.completions.create(model="reasoner", prompt=PROMPTS, best_of=3, extra_body=BEAMS)
    assert [choice.text for choice in fewer.choices] == [beams[0][0], beams[1][0]]
    long = client.completions.create(model="reasoner", prompt=PROMPTS, n=3, extra_body=BEAMS | {"length_penalty": 3.0})
    assert [choice.text for choice in long.choices] == [
        text for beams in expected(3, length_penalty=3.0) for text in beams
    ]


def test_a_stream_has_the_beams_at_its_end(client: Any) -> None:
    options = {"model": "reasoner", "prompt": PROMPT, "n": 3, "stream": True, "extra_body": BEAMS}
    chunks = [chunk.choices[0] for chunk in client.completions.create(**options)]
    assert [chunk.text for chunk in chunks] == expected(3)[0]
    assert all(chunk.finish_reason == "length" for chunk in chunks)


def test_chats_have_beams(parrot_server: ServerProcess) -> None:
    ask = {"messages": [{"role": "user", "content": "Is it fine?"}], "max_tokens": 8}
    status, answer = parrot_server.json("/v1/chat/completions", ask | {"use_beam_search": True, "n": 2})
    assert status == 200 and len(answer["choices"]) == 2, answer
    _, greedy = parrot_server.json("/v1/chat/completions", ask | {"temperature": 0})
    assert answer["choices"][0]["message"] == greedy["choices"][0]["message"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"best_of": 17}, "beam_width", "between 1 and 16"),
        ({"n": 4, "best_of": 2}, "best_of", "at least n"),
        ({"prompt": ["a"] * 100, "n": 2}, "n", "at most|more than 128"),
        ({"length_penalty": 11}, "length_penalty", "between -10 and 10"),
        ({"logprobs": 1}, "logprobs", "not supported with"),
        ({"logprobs": 0}, "logprobs", "not supported with"),
        ({"stop": ["a"]}, "stop", "not supported with"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported with"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported with"),
        ({"max_tokens": 0, "echo": True}, "max_tokens", "at least 1"),
    ],
)
def test_refusals(server: ServerProcess, fields: dict[str, Any], param: str, words: str) -> None:
    status, answer = server.json("/v1/completions", {"prompt": "a", **BEAMS, **fields})
    assert status == 400 and answer["error"]["param"] == param, answer
    assert any(each in answer["error"]["message"] for each in words.split("|"))


def test_a_client_that_goes_away_ends_its_search(server: ServerProcess, client: Any) -> None:
    """And its beams leave the engine."""
    ask = {"prompt": PROMPT, "n": 16, "extra_body": {**BEAMS, "max_tokens": 4000, "ignore_eos": True}}
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1.0).completions.create(model="reasoner", **ask)
    _wait_until_idle(server)


def _wait_until_idle(server: ServerProcess) -> None:
    def load() -> tuple[float, float]:
        return server.json("/load")[1]["server_load"], server.metric("vllm:num_requests_running")

    wait_until(lambda: load() == (0, 0), "an idle server", state=load)
    assert server.metric("vllm:kv_cache_usage_perc") == 0
