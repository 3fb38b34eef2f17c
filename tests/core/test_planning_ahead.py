"""An engine that plans a step while the one before it runs has the plans and tokens of an engine that waits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvllm import LLM, CompressionConfig, RequestOutput, SamplingParams
from kvllm.core.engine import LLMEngine
from kvllm.core.protocol import StepPlan, encode
from tests.helpers.checkpoints import checkpoint_fixture
from tests.helpers.compressions import paper_compression
from tests.helpers.examples import examples

VOCAB = 64
COMPRESSIONS = {
    "none": None,
    "periodic": paper_compression(method="kara", period=4, max_sequences=2, window_blocks=2, buffer=1),
    "observed": CompressionConfig(method="mean_attention", policy="pressure", period=4, window_blocks=2, buffer=1),
    "threshold": CompressionConfig(
        method="keydiff", policy="threshold", threshold_tokens=30, budget_tokens=17, buffer=2
    ),
    "recall": paper_compression(method="keydiff", period=4, window_blocks=2, buffer=1, recall_period=1),
}
TIERS: dict[str, dict[str, Any]] = {
    # Nothing is loaded: how long loads take would decide plans.
    "recall": {"kv_offloading_size": 0.01, "swap": "never", "enable_prefix_caching": False}
}
SWAP = {"kv_offloading_size": 0.01, "swap": "always"}
Engines = tuple[LLMEngine, LLMEngine]
"""One that waits, and one that plans ahead."""


checkpoint = checkpoint_fixture("qwen3", head_dim=16, vocab_size=VOCAB, num_hidden_layers=2)


def make_engines(checkpoint: Path, **options: Any) -> Engines:
    defaults = {"block_size": 4, "num_gpu_blocks_override": 24, "max_num_seqs": 6, "max_num_batched_tokens": 24}
    waiting, ahead = (
        LLM(checkpoint, max_model_len=80, async_scheduling=way, **(defaults | options)).llm_engine
        for way in (False, True)
    )
    assert isinstance(waiting, LLMEngine) and isinstance(ahead, LLMEngine)
    return waiting, ahead


@pytest.fixture(scope="module", params=COMPRESSIONS)
def engines(request: pytest.FixtureRequest, checkpoint: Path) -> Engines:
    return make_engines(checkpoint, compression=COMPRESSIONS[request.param], **TIERS.get(request.param, {}))


@pytest.fixture(scope="module", params=[{}, SWAP], ids=["no tier", "swap"])
def uncompressed(request: pytest.FixtureRequest, checkpoint: Path) -> Engines:
    return make_engines(checkpoint, **request.param)


@contextmanager
def launched(engine: LLMEngine) -> Iterator[list[bytes]]:
    """The plans that an engine launches meanwhile, from an empty pool on, without the tokens of sequences that run."""
    assert not engine.has_unfinished_requests()
    engine.scheduler.reset([])
    plans: list[bytes] = []
    launch = engine.executor.launch

    def record(plan: StepPlan) -> None:
        decodes = replace(plan.decodes, token_ids=[0] * len(plan.decodes.token_ids))
        plans.append(encode(replace(plan, decodes=decodes)))
        launch(plan)

    with patch.object(engine.executor, "launch", record):
        yield plans


def random_prompt(rng: random.Random) -> dict[str, list[int]]:
    """Of few tokens, so that prompts begin alike."""
    return {"prompt_token_ids": [rng.randint(3, 4) for _ in range(rng.randint(1, 24))]}


def run_to_end(engine: LLMEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step()
        engine.scheduler.check()
    assert engine.scheduler.blocks.num_owned == 0


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    assert all(output.error is None for output in outputs)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@given(seed=st.integers(0, 2**32))
@settings(max_examples=examples(50))
def test_plans_and_tokens_are_equal_where_lengths_end_requests(engines: Engines, seed: int) -> None:
    """With preemptions, forks, shared prefixes, prefill chunks, copies on write and compressions in the way."""
    found = []
    for engine in engines:
        rng = random.Random(seed)
        with launched(engine) as plans:
            outputs = []
            for index in range(rng.randint(1, 9)):
                sampling = SamplingParams(
                    n=rng.choice([1, 1, 2, 3]),
                    temperature=rng.choice([0.0, 1.0]),
                    max_tokens=rng.choice([1, rng.randint(1, 50), rng.randint(1, 50)]),
                    seed=rng.randint(0, 9),
                    ignore_eos=True,
                    presence_penalty=rng.choice([0.0, 0.0, 1.0]),
                )
                outputs.append(engine.add_request(str(index), random_prompt(rng), sampling))
            run_to_end(engine)
        found.append((tokens_of(outputs), plans))
    assert found[1][0] == found[0][0]
    assert found[1][1] == found[0][1]


def serve(engine: LLMEngine, seed: int) -> list[Any]:
    """Requests that come and go at random steps, and end by whatever ends them. Returns what must not differ."""
    rng = random.Random(seed)
    outputs: list[RequestOutput] = []
    aborted = set[str]()
    while len(outputs) < 8 or engine.has_unfinished_requests():
        if len(outputs) < 8:
            sampling = SamplingParams(
                n=rng.choice([1, 1, 2]),
                temperature=rng.choice([0.0, 1.0]),
                max_tokens=rng.randint(1, 40),
                min_tokens=rng.choice([0, 1]),
                seed=rng.randint(0, 9),
                stop_token_ids=rng.sample(range(VOCAB), rng.choice([0, 4, 12])),
                repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
                logprobs=rng.choice([None, 1]),
                prompt_logprobs=rng.choice([None, None, 0]),
            )
            outputs.append(engine.add_request(str(len(outputs)), random_prompt(rng), sampling))
            if rng.random() < 0.2:
                aborted.add(outputs[-1].request_id)
        for _ in range(rng.randint(1, 6)):
            engine.step()
            engine.scheduler.check()
        for request_id in sorted(aborted):
            engine.abort(request_id)
    assert engine.scheduler.blocks.num_owned == 0
    return [
        (each.token_ids, each.finish_reason, each.stop_reason, [list(logprobs) for logprobs in each.logprobs or ()])
        for output in outputs
        if output.request_id not in aborted
        for each in output.outputs
    ]


@given(seed=st.integers(0, 2**32))
@settings(max_examples=examples(50))
def test_tokens_are_equal_whatever_ends_requests(uncompressed: Engines, seed: int) -> None:
    """Tokens after an end are computed for nothing, and are nowhere to be seen."""
    waiting, ahead = uncompressed
    assert serve(ahead, seed) == serve(waiting, seed)


def test_sequences_that_are_swapped_have_the_tokens_of_an_engine_that_waits(checkpoint: Path) -> None:
    """A sequence goes to the host with a token in flight; while one loads its blocks, no step is planned ahead."""
    found = []
    for engine in make_engines(checkpoint, **SWAP, watermark=0.0):
        ahead = []
        plan_ahead = engine._plan_ahead

        def noting(engine: LLMEngine = engine, ahead: list = ahead, inner: Any = plan_ahead) -> Any:
            loads = bool(engine.scheduler.step.plan.loads)
            planned = inner()
            ahead.append((planned is not None, loads))
            return planned

        engine._plan_ahead = noting
        outputs = [
            engine.add_request(str(i), random_prompt(random.Random(i)), SamplingParams(max_tokens=40, temperature=0))
            for i in range(8)
        ]
        run_to_end(engine)
        assert engine.stats.swapped_in > 0 and (True, True) not in ahead
        assert any(is_ahead for is_ahead, _ in ahead) == engine.config.async_scheduling
        found.append(tokens_of(outputs))
    assert found[0] == found[1]


def test_a_step_is_planned_while_the_one_before_it_runs(uncompressed: Engines) -> None:
    events: list[str] = []
    _, engine = uncompressed
    engine.step()  # the one after the last token of an earlier test

    def noting(name: str, call: Any) -> Any:
        def noted(*arguments: Any) -> Any:
            events.append(name)
            return call(*arguments)

        return noted

    parts = {"plan": engine.scheduler, "launch": engine.executor, "collect": engine.executor, "process": engine.outputs}
    methods = {"plan": "schedule"}
    with pytest.MonkeyPatch.context() as patches:
        for name, part in parts.items():
            method = methods.get(name, name)
            patches.setattr(part, method, noting(name, getattr(part, method)))
        engine.add_request("0", {"prompt_token_ids": [3]}, SamplingParams(max_tokens=3, ignore_eos=True))
        run_to_end(engine)
    ahead = ["plan", "launch", "collect", "process"]
    assert events == ["plan", "launch", *ahead, *ahead, "collect", "process"]


def test_an_end_leaves_nothing_behind(uncompressed: Engines) -> None:
    """The step after the last token runs on while the engine is idle, and the next request does not see it."""
    waiting, ahead = uncompressed
    prompt = {"prompt_token_ids": [3, 4, 3]}
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = []
    for engine in (waiting, ahead):
        first = engine.add_request("first", prompt, greedy)
        run_to_end(engine)
        stop = first.outputs[0].token_ids[2]
        ended = engine.add_request("ended", prompt, SamplingParams(temperature=0, stop_token_ids=[stop]))
        run_to_end(engine)
        again = engine.add_request("again", prompt, greedy)
        run_to_end(engine)
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        assert ended.outputs[0].token_ids == first.outputs[0].token_ids[: len(ended.outputs[0].token_ids)]
        found.append(tokens_of([first, ended, again]))
    assert found[0] == found[1]
