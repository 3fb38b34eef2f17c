"""The threads of the CPU operators: their number, several callers, forked processes."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from kvllm._extension import operator
from kvllm.errors import ConfigError
from kvllm.worker.threads import set_up_threads
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


def multiply_in_a_fork() -> None:
    """Multiply, fork, multiply in the child, which has none of the parent's threads, and print its status."""
    torch.set_num_threads(2)
    x, packed = torch.ones(3, 256), operator("pack_weight")(torch.ones(512, 256))
    products(x, packed)
    child = os.fork()
    if child == 0:
        os._exit(0 if all((each == 256).all() for each in products(x, packed)) else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_makes_its_own_threads() -> None:
    assert run_python("multiply_in_a_fork()", __name__) == 0


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
