"""The threads of the CPU operators: their number, several callers, forked processes."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from kvllm import LLM, SamplingParams
from kvllm._extension import operator
from kvllm.errors import ConfigError
from kvllm.worker import model_runner
from kvllm.worker.threads import operators_alone, set_up_threads
from tests.helpers.processes import run_python


def products(x: torch.Tensor, packed: torch.Tensor, count: int = 200) -> list[torch.Tensor]:
    return [operator("packed_linear")(x, packed, None, None, 512) for _ in range(count)]


@pytest.fixture
def operands() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(5, 256), operator("pack_weight")(torch.randn(512, 256))


def test_many_threads_compute_what_one_does(operands: tuple[torch.Tensor, torch.Tensor]) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        (alone,) = products(*operands, 1)
        for threads in (2, 7, 3):
            torch.set_num_threads(threads)
            assert all(torch.equal(each, alone) for each in products(*operands))
    finally:
        torch.set_num_threads(before)


def test_several_callers_at_once(operands: tuple[torch.Tensor, torch.Tensor]) -> None:
    (alone,) = products(*operands, 1)
    found: list[torch.Tensor] = []
    callers = [threading.Thread(target=lambda: found.extend(products(*operands))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 800 and all(torch.equal(each, alone) for each in found)


def multiply_in_a_fork() -> int:
    """Multiply, fork, multiply in the child, which has none of the parent's threads -> its status."""
    torch.set_num_threads(2)
    x, packed = torch.ones(3, 256), operator("pack_weight")(torch.ones(512, 256))
    products(x, packed)
    child = os.fork()
    if child == 0:
        os._exit(0 if all((each == 256).all() for each in products(x, packed)) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def count_threads_of_a_step() -> list[int]:
    """The threads that a step's operators, and then torch's own loops, have started."""
    numbers, x, packed = torch.ones(1 << 20), torch.ones(5, 256), operator("pack_weight")(torch.ones(512, 256))
    torch.set_num_threads(3)
    with operators_alone():
        before = len(os.listdir("/proc/self/task"))
        products(x, packed)
        between = len(os.listdir("/proc/self/task"))
        numbers.exp()
        return [between - before, len(os.listdir("/proc/self/task")) - between]


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="this system does not list a process's threads")
def test_threads_of_steps_and_of_forks() -> None:
    """In a step operators have all threads and torch has one; a forked process makes its own."""
    assert run_python("print([*count_threads_of_a_step(), multiply_in_a_fork()])", __name__) == [2, 0, 0]


def test_torch_has_its_threads_again_after_a_step_that_failed() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with pytest.raises(RuntimeError, match="lost"), operators_alone():
            assert torch.get_num_threads() == 1
            raise RuntimeError("lost")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_the_engine_samples_on_one_thread_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    sample = model_runner.sample
    monkeypatch.setattr(model_runner, "sample", lambda *args: (found.append(torch.get_num_threads()), sample(*args))[1])
    before = torch.get_num_threads()
    llm = LLM(num_gpu_blocks_override=4)
    try:
        torch.set_num_threads(3)
        llm.generate(["2"], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        assert found == [1, 1] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("text", "threads"), [("1", 1), ("3", 3), ("", None)])
def test_the_number_of_threads_is_the_variables(
    monkeypatch: pytest.MonkeyPatch, text: str, threads: int | None
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("KVLLM_NUM_THREADS", text)
    try:
        set_up_threads()
        assert torch.get_num_threads() == (threads or before)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_a_number_of_threads_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("KVLLM_NUM_THREADS", text)
    with pytest.raises(ConfigError, match="at least 1"):
        set_up_threads()
