"""Swap, recall and prefixes over host memory that loses blocks: no leak, no wrong KV pair, no wrong token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from kvllm import RequestOutput, SamplingParams
from kvllm.core.engine import LLMEngine
from kvllm.worker.features.offloading import Offloader
from tests.helpers.checkpoints import checkpoint_fixture
from tests.helpers.compressions import paper_compression
from tests.helpers.engines import make_llm, random_token_ids, tokens
from tests.helpers.examples import examples
from tests.helpers.features import feature_of
from tests.helpers.watched_pairs import Watch, recall_of, runner_of

PROMPTS = random_token_ids(3, 17, 40, 63, 30, 9)
MOST_TOKENS = 60
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 20, "block_size": 8, "max_num_seqs": 8, "watermark": 0.0}
SMALL |= {"max_num_batched_tokens": 64, "kv_offloading_size": 0.02, "swap": "always", "async_scheduling": False}
POLICIES = {
    "pressure": {"window_blocks": 3, "period": 8},
    "periodic": {"window_blocks": 3, "period": 8, "retain_tokens": 13},
    "threshold": {"threshold_tokens": 60, "budget_tokens": 40},
}


checkpoint = checkpoint_fixture("qwen3", head_dim=32, num_hidden_layers=2)


def params(max_tokens: int, *, compress: bool) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, compress=compress)


class Losing:
    """An engine with recall whose host memory loses blocks between the steps: what is lost is written over.

    expected: tokens of each prompt, without preemption. loss: the share of the blocks that are held.
    """

    def __init__(self, path: Path, policy: str, expected: list[list[int]]) -> None:
        compression = paper_compression(method="keydiff", policy=policy, buffer=4, recall_period=1, **POLICIES[policy])
        self.llm = make_llm(path, **SMALL, compression=compression)
        assert isinstance(self.llm.llm_engine, LLMEngine)
        self.engine = self.llm.llm_engine
        self.watch = Watch(self.llm)
        self.num_free = recall_of(self.llm).dropped.chunks.num_free
        self.store = feature_of(runner_of(self.llm), Offloader).store
        self.expected = expected
        self.begin(0.0, 0)

    def begin(self, loss: float, seed: int) -> None:
        self.loss, self.random = loss, random.Random(seed)
        self.live: dict[str, RequestOutput] = {}
        self.watch.pairs.clear()
        self.engine.scheduler.reset([])

    def add(self, prompt: int, max_tokens: int, *, compress: bool, number: int) -> None:
        request_id = f"{number}/{prompt}/{compress}"
        given = {"prompt_token_ids": PROMPTS[prompt]}
        self.live[request_id] = self.engine.add_request(request_id, given, params(max_tokens, compress=compress))

    def step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                self._check_tokens(self.live.pop(output.request_id))
        self.engine.scheduler.check()
        self.watch.check()
        self.store._queue.submit(self._lose).wait()  # after what was submitted before

    def _lose(self) -> None:
        for block in [block for block in sorted(self.store.held) if self.random.random() < self.loss]:
            self.store.held.remove(block)
            for part in self.store.records:
                part[block].view(torch.uint8).fill_(self.random.randrange(1, 100))

    def _check_tokens(self, output: RequestOutput) -> None:
        """What is not compressed has the tokens of an engine that never preempts."""
        _, prompt, compress = output.request_id.split("/")
        found = output.outputs[0].token_ids
        assert output.error is None and len(found) > 0
        if compress == "False":
            assert found == self.expected[int(prompt)][: len(found)]

    def run(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()

    def end(self) -> None:
        """Nothing is left of anything."""
        self.run()
        self.add(5, 1, compress=False, number=-1)  # a plan that drops the last of the others
        self.run()
        assert self.engine.scheduler.blocks.num_owned == 0
        assert recall_of(self.llm).dropped.chunks.num_free == self.num_free and not recall_of(self.llm).sequences


@pytest.fixture(scope="module")
def engines(checkpoint: Path) -> dict[str, Losing]:
    whole = make_llm(checkpoint, **SMALL | {"num_gpu_blocks_override": 400})
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    expected = tokens(whole, prompts, params(MOST_TOKENS, compress=False))
    return {policy: Losing(checkpoint, policy, expected) for policy in POLICIES}


@pytest.mark.parametrize(
    ("policy", "loss"),
    [
        ("pressure", 1.0),
        ("periodic", 0.0),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (("pressure", 0.0), ("periodic", 1.0), ("threshold", 0.0), ("threshold", 1.0))
        ),
    ],
)
def test_a_tier_that_loses_all_or_nothing(engines: dict[str, Losing], policy: str, loss: float) -> None:
    losing = engines[policy]
    before = losing.llm.stats()
    swapped_out, swapped_in = before.swapped_out, before.swapped_in
    losing.begin(loss, 0)
    for prompt in range(len(PROMPTS)):
        losing.add(prompt, MOST_TOKENS, compress=prompt % 3 > 0, number=0)
    losing.end()
    stats = losing.llm.stats()
    num_lost = stats.swapped_out - swapped_out - (stats.swapped_in - swapped_in)
    assert (num_lost > 0) == (loss > 0) and stats.swapped_out > swapped_out
    assert stats.recalled_bytes > 0


class LosingMachine(RuleBasedStateMachine):
    """Add, step, compress, recall, preempt, swap, abort, fail and finish in any order, while some of what is on the
    host gets lost."""

    engines: dict[str, Losing]

    @initialize(policy=st.sampled_from([*POLICIES]), loss=st.sampled_from([0.0, 0.05, 0.3]), seed=st.integers(0, 99))
    def start(self, policy: str, loss: float, seed: int) -> None:
        self.losing = self.engines[policy]
        self.losing.begin(loss, seed)
        self.number = 0

    @rule(prompts=st.lists(st.tuples(st.integers(0, 5), st.integers(1, MOST_TOKENS), st.booleans()), min_size=1))
    def add(self, prompts: list[tuple[int, int, bool]]) -> None:
        for prompt, max_tokens, compress in prompts[:4]:
            self.losing.add(prompt, max_tokens, compress=compress, number=self.number)
            self.number += 1

    @precondition(lambda self: self.losing.live)
    @rule(count=st.integers(1, 40))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.losing.live:
                self.losing.step()

    @precondition(lambda self: self.losing.live)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.losing.live)))
        self.losing.engine.abort(request_id)
        del self.losing.live[request_id]

    @precondition(lambda self: self.losing.live)
    @rule()
    def fail(self) -> None:
        """A step whose results do not arrive."""
        failing = patch.object(self.losing.engine.executor, "collect", side_effect=KeyboardInterrupt)
        with failing, pytest.raises(KeyboardInterrupt):
            self.losing.engine.step()

    def teardown(self) -> None:
        if hasattr(self, "losing"):
            self.losing.end()


@pytest.fixture
def machine(engines: dict[str, Losing]) -> Iterator[type[LosingMachine]]:
    LosingMachine.engines = engines
    yield LosingMachine
    del LosingMachine.engines


def test_any_order_of_events_over_a_tier_that_loses_blocks(machine: type[LosingMachine]) -> None:
    case = settings(
        max_examples=examples(40), stateful_step_count=8, suppress_health_check=list(HealthCheck), deadline=None
    )
    run_state_machine_as_test(machine, settings=case)
