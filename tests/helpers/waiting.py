"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], bool], what: str, seconds: float = 60, state: Callable[[], object] = str
) -> None:
    """Return as soon as the condition holds; fail when it has not for much longer than a busy machine takes.

    state: what there is instead, for the message.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come in {seconds} s: {state()}"
        time.sleep(0.05)
