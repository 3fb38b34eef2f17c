"""Lines of progress: what they count, and that the engine is as before when they end."""

from __future__ import annotations

import re

import pytest

from benchmarks.common.progress import show_progress, wrapped_step
from kvllm import LLM, SamplingParams
from tests.helpers.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = tmp_path_factory.mktemp("tiny")
    make_checkpoint(path, "qwen3", head_dim=16, tie_word_embeddings=True)
    return LLM(path, block_size=8, num_gpu_blocks_override=32, max_model_len=64)


def generate(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 5, 9)]
    llm.generate([{"prompt_token_ids": [i + 3] * 4} for i in range(3)], params, use_tqdm=False)


def test_a_line_after_every_interval_counts_what_is_done(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    steps_before = llm.stats().steps
    with show_progress(llm, "a\nrun", 3, seconds=0):
        generate(llm)
    *lines, last = capsys.readouterr().err.splitlines()
    assert len(lines) == llm.stats().steps - steps_before
    done = [int(re.findall(r"^  a run: (\d) of 3 requests, ", line)[0]) for line in lines]
    assert done == sorted(done) and set(done) == {0, 1, 2, 3} and last.startswith("  a run: 3 of 3 requests, ")
    running = [int(re.findall(r", (\d) running, ", line)[0]) for line in lines]
    assert running[0] == 3 and running[-1] == 1
    assert re.search(r", [\d,]+ tokens/s, 1 running, KV pool \d+% in use, \d+ s$", last)
    assert llm.llm_engine.step.__self__ is llm.llm_engine


def test_a_long_interval_leaves_the_last_line_alone(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress(llm, "run", 3, seconds=60):
        generate(llm)
    assert len(capsys.readouterr().err.splitlines()) == 1
    with show_progress(llm, "", 3, seconds=0):  # without a title
        generate(llm)
    assert capsys.readouterr().err == ""


def test_nested_wrappers_leave_in_their_order(llm: LLM) -> None:
    calls = []

    def wrap(name: str):
        return lambda step: lambda: (calls.append(name), step())[1]

    with pytest.raises(RuntimeError), wrapped_step(llm, wrap("outer")), wrapped_step(llm, wrap("inner")):
        generate(llm)
        raise RuntimeError
    assert calls[:2] == ["inner", "outer"] and calls.count("inner") == calls.count("outer")
    calls.clear()
    with wrapped_step(llm, wrap("outer")):
        with wrapped_step(llm, wrap("inner")):
            pass
        generate(llm)
    assert set(calls) == {"outer"} and llm.llm_engine.step.__self__ is llm.llm_engine
