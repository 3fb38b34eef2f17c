"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_SECONDS = 0.05


def wait_until(
    condition: Callable[[], bool], what: str, seconds: float = 60, state: Callable[[], object] = str
) -> None:
    """Return as soon as the condition holds; fail when it has not for much longer than a busy machine takes.

    Looks are counted, not seconds: a machine that stands still for a minute passes the time without doing anything.

    state: what there is instead, for the message.
    """
    for _ in range(int(seconds / LOOK_SECONDS)):
        if condition():
            return
        time.sleep(LOOK_SECONDS)
    assert condition(), f"{what} did not come in {seconds} s: {state()}"
