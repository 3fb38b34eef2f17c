"""The thread that runs the steps of a CPU: who prepares them, and when their results are handed over."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from kvllm import LLM, SamplingParams
from kvllm.core.protocol import Decodes, PrefillChunk, SequenceStart, StepPlan
from kvllm.core.sequence import PENDING
from kvllm.core.tables import TableStart
from kvllm.worker.inline import StepThread
from kvllm.worker.model_runner import ModelRunner
from kvllm.worker.step_inputs import StepInputs
from tests.helpers.checkpoints import make_checkpoint

PROMPT = [3, 4, 3]
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


class Observed:
    """Steps on a thread, each of whose passes waits until it is let go.

    noted: what happened, and the number of results that were handed over by then.
    """

    def __init__(self, runner: ModelRunner, patches: pytest.MonkeyPatch) -> None:
        self.thread = StepThread(runner)
        self.results: list[Future[Any]] = []
        self.noted: list[tuple[str, int]] = []
        self._in_pass, self._may_go_on = threading.Semaphore(0), threading.Semaphore(0)
        inputs = runner.forward_pass.inputs
        forward, prepare, write_tokens = runner.model.forward, inputs.prepare, StepInputs.write_tokens

        def gated(*arguments: Any) -> Any:
            self._note("pass")
            self._in_pass.release()
            assert self._may_go_on.acquire(timeout=60)
            return forward(*arguments)

        def noted_prepare(*arguments: Any) -> Any:
            here = threading.current_thread() is threading.main_thread()
            self._note("prepared by the engine" if here else "prepared by the thread")
            return prepare(*arguments)

        def noted_write(inputs: StepInputs, *arguments: Any) -> None:
            self._note("tokens")
            write_tokens(inputs, *arguments)

        patches.setattr(runner.model, "forward", gated)
        patches.setattr(inputs, "prepare", noted_prepare)
        patches.setattr(StepInputs, "write_tokens", noted_write)

    def _note(self, event: str) -> None:
        self.noted.append((event, sum(result.done() for result in self.results)))

    def launch(self, plan: StepPlan) -> None:
        self.results.append(self.thread.launch(plan))

    def await_pass(self) -> None:
        assert self._in_pass.acquire(timeout=60)

    def end_pass(self) -> None:
        self._may_go_on.release()

    def take_noted(self) -> list[tuple[str, int]]:
        noted, self.noted = self.noted, []
        return noted


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, "qwen3")
    return LLM(path, block_size=16, num_gpu_blocks_override=8)


def prompt_plan(seq_id: int, block: int, *, reset: bool = False) -> StepPlan:
    start = SequenceStart(seq_id, PROMPT[:], len(PROMPT), 0, GREEDY, 0, tables=[TableStart(0, [block])])
    return StepPlan(new_seqs=[start], chunks=[PrefillChunk(seq_id, len(PROMPT), [], True)], reset=reset)


DECODE = StepPlan(decodes=Decodes([0], [PENDING]))
ENGINE, THREAD = "prepared by the engine", "prepared by the thread"


def test_between_two_passes_there_are_only_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are prepared before, and results are handed over after them. A plan that does more is prepared when its
    turn comes, after the results."""
    [expected] = llm.generate([{"prompt_token_ids": PROMPT}], GREEDY, use_tqdm=False)
    observed = Observed(llm.llm_engine.executor.runner, monkeypatch)
    observed.launch(prompt_plan(0, 0, reset=True))
    observed.await_pass()
    assert observed.take_noted() == [(THREAD, 0), ("tokens", 0), ("pass", 0)]
    observed.launch(DECODE)  # it depends on what starts before
    observed.end_pass()
    observed.await_pass()
    assert observed.take_noted() == [(THREAD, 0), ("tokens", 0), ("pass", 1)]
    observed.launch(DECODE)
    assert observed.take_noted() == [(ENGINE, 1)]
    observed.end_pass()
    observed.await_pass()
    assert observed.take_noted() == [("tokens", 1), ("pass", 2)]
    observed.launch(prompt_plan(1, 1))
    observed.end_pass()
    observed.await_pass()
    assert observed.take_noted() == [(THREAD, 3), ("tokens", 3), ("pass", 3)]
    observed.end_pass()
    tokens = [result.result(timeout=60)().tokens[0].token_id for result in observed.results]  # nothing is queued
    observed.thread.close()
    assert tokens == [*expected.outputs[0].token_ids[:3], tokens[0]]


def test_a_failure_keeps_no_result_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes after the result of the step before, and the thread goes on."""
    observed = Observed(llm.llm_engine.executor.runner, monkeypatch)
    observed.launch(prompt_plan(0, 0, reset=True))
    observed.await_pass()
    observed.launch(StepPlan(decodes=Decodes([7], [PENDING])))  # nobody has heard of sequence 7
    observed.end_pass()
    with pytest.raises(KeyError, match="7"):
        observed.results[1].result(timeout=60)
    assert observed.results[0].result(timeout=60)().tokens
    observed.launch(prompt_plan(0, 0, reset=True))
    observed.end_pass()
    assert observed.results[2].result(timeout=60)().tokens == observed.results[0].result()().tokens
    observed.thread.close()
