"""Interrupts at chosen lines of the package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import kvllm
from tests.helpers.examples import examples

PACKAGE = Path(kvllm.__file__).parent
Line = tuple[str, int]


class Trap:
    """Raises KeyboardInterrupt once, when a line is about to run; without a line, it notes all that do.

    parts: folders and files of the package, whose lines count. hit: how many times the line has to be about to run.
    """

    def __init__(self, parts: tuple[str, ...], line: Line | None = None, hit: int = 1) -> None:
        self.parts = tuple(str(PACKAGE / part) for part in parts)
        self.line = line
        self.hits_left = hit
        self.seen: dict[Line, int] = {}

    @contextmanager
    def set(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        file = frame.f_code.co_filename
        relevant = file.startswith(self.parts) if self.line is None else file == self.line[0]
        return self._step if relevant else None

    def _step(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if event != "line":
            return self._step
        line = (frame.f_code.co_filename, frame.f_lineno)
        if self.line is None:
            self.seen[line] = self.seen.get(line, 0) + 1
        elif line == self.line:
            self.hits_left -= 1
            if not self.hits_left:
                sys.settrace(None)
                raise KeyboardInterrupt(f"{line[0]}:{line[1]}")
        return self._step


def chosen_lines(seen: dict[Line, int]) -> list[tuple[Line, int]]:
    """Lines, each with the number of the hit to raise at: with --long all of them, else one of forty."""
    lines = sorted((line, hit) for line, hits in seen.items() for hit in {1, max(1, hits // 2)})
    return lines[:: 1 if examples(100) == 100 else 40]
