"""How many threads the operators of a process use on a CPU."""

from __future__ import annotations

import os

import torch

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
