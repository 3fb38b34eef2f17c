"""Changes that an exception may cut short anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Transition:
    """Changes an object as a whole: the body of `with transition():` ends, or the next transition begins with
    `recover`, which makes the object consistent again from what cannot be half written.

    An interrupt can fall between any two instructions, so no `except` or `finally` could undo what was done so far.
    Refusals come before a transition.
    """

    def __init__(self, recover: Callable[[], None]) -> None:
        self._recover = recover
        self._cut_short = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._cut_short:
            self._recover()
        self._cut_short = True
        yield
        self._cut_short = False
