"""A text ends at every token that one of the checkpoint's files names, and so does all that looks at these tokens."""

from __future__ import annotations

import asyncio
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvllm import LLM, AsyncLLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from kvllm.engine_args import EngineArgs
from tests.helpers.asgi import ask
from tests.helpers.checkpoints import make_parrot
from tests.helpers.ends import CHAIN, END, OTHER, make_checkpoint_with_end
from tests.helpers.tokenizers import byte_level

OPTIONS: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 40, "max_num_seqs": 8}
FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
MESSAGES = [{"role": "user", "content": "Hi"}]  # after which the template has a newline


@pytest.fixture(scope="module", params=FILES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint_with_end(path, request.param)
    return path


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(path, **OPTIONS)


def names(llm: LLM, token_ids: list[int]) -> list[str]:
    assert llm.tokenizer is not None
    return [llm.tokenizer.decode([token_id]) for token_id in token_ids]


def test_generate_and_chat(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=20, skip_special_tokens=False)
    for outputs in (llm.generate("\n", greedy, use_tqdm=False), llm.chat(MESSAGES, greedy, use_tqdm=False)):
        (completion,) = outputs[0].outputs
        assert names(llm, completion.token_ids) == ["<think>", "a", "b", END]
        assert (completion.text, completion.finish_reason, completion.stop_reason) == ("<think>ab", "stop", None)


def test_both_ends_count(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    (completion,) = llm.generate("c", params, use_tqdm=False)[0].outputs
    assert names(llm, completion.token_ids) == ["d", "</think>", OTHER]
    ignoring = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    (completion,) = llm.generate("\n", ignoring, use_tqdm=False)[0].outputs
    assert names(llm, completion.token_ids) == CHAIN[1:10]


def test_min_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0, min_tokens=6, max_tokens=40)
    (completion,) = llm.generate("\n", params, use_tqdm=False)[0].outputs
    found = names(llm, completion.token_ids)
    assert found[:3] == ["<think>", "a", "b"] and not {END, OTHER} & set(found[:6])


@pytest.mark.skipif(find_spec("llguidance") is None, reason="needs llguidance: pip install llguidance")
def test_structured_outputs(llm: LLM) -> None:
    """The model would go on: nothing but the end is left to it."""
    params = SamplingParams(temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="ab?"))
    (completion,) = llm.generate("<think>", params, use_tqdm=False)[0].outputs
    assert names(llm, completion.token_ids) == ["a", "b", END]
    assert (completion.text, completion.finish_reason) == ("ab", "stop")


@pytest.mark.skipif(find_spec("llguidance") is None, reason="needs llguidance: pip install llguidance")
def test_an_end_that_is_a_word_of_the_vocabulary_is_no_text_of_a_rule(tmp_path: Path) -> None:
    """Its tokenizer.json does not say that it is special. The model wants to say it where the rule allows its text."""
    make_parrot(tmp_path, byte_level("chat").hf, ["<think>", END, "c"])
    file = json.loads((tmp_path / "tokenizer.json").read_text())
    file["added_tokens"] = [token for token in file["added_tokens"] if token["content"] != END]
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    rule = StructuredOutputsParams(regex=r"[a-z_<>|]{10}[xyz]")
    params = SamplingParams(temperature=0, max_tokens=20, structured_outputs=rule)
    (completion,) = LLM(tmp_path, **OPTIONS).generate("<think>", params, use_tqdm=False)[0].outputs
    assert re.fullmatch(rule.regex or "", completion.text) and completion.finish_reason == "stop"


def test_beam_search(llm: LLM) -> None:
    (output,) = llm.beam_search(["\n"], BeamSearchParams(beam_width=2, max_tokens=8))
    assert names(llm, output.outputs[0].token_ids) == ["<think>", "a", "b", END]


@pytest.mark.skipif(find_spec("starlette") is None, reason="needs starlette: pip install starlette")
def test_chat_route(path: Path) -> None:
    from kvllm.serving.app import make_app
    from kvllm.serving.state import ServerOptions, ServerState

    args = EngineArgs(path, **OPTIONS)
    llm = AsyncLLM.from_engine_args(args)
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 20}
    app = make_app(ServerState(args, ServerOptions(("parrot",)), llm))
    status, content = asyncio.run(ask(app, "/v1/chat/completions", body))
    llm.shutdown()
    choice = json.loads(content)["choices"][0]
    assert (status, choice["finish_reason"], choice["message"]["content"]) == (200, "stop", "<think>ab")
