"""How many threads the operators of a process use on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvllm._extension import operator
from kvllm.errors import ConfigError

VARIABLE = "KVLLM_NUM_THREADS"


def set_up_threads() -> None:
    """Let torch and the CPU operators use as many threads as the environment variable says, if it is set.

    Raises:
        ConfigError: it is not a whole number of at least 1.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{VARIABLE}={text!r} is not allowed: give a number of threads, at least 1")
    torch.set_num_threads(int(text))


@contextmanager
def operators_alone() -> Iterator[None]:
    """The compiled operators on all threads of this process, and torch's own loops on the calling one.

    torch's threads spin for about a millisecond after each of its loops. In a step they would take cores from the
    operators' threads, and beside other work most of the time.
    """
    threads = torch.get_num_threads()
    set_loop_threads = operator("set_loop_threads")
    set_loop_threads(threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        set_loop_threads(0)
