"""Findings of a section so far: one line of JSON for each check or measurement, written at once.

So nothing is lost when a section runs out of time or its process dies.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PASSED, FAILED, MEASURED, LEFT_OUT = "passed", "failed", "measured", "left out"
Figures = Mapping[str, float | int | str | None]
Row = dict[str, Any]
"""name, status, figures; error: a traceback, of what failed; reason: of what was left out."""


class LeftOut(Exception):
    """Raised by what cannot be checked or measured here; says why."""


class Log:
    """Appends rows to `file`. The section has `seconds` from now on."""

    def __init__(self, file: Path, seconds: float) -> None:
        self.file = file
        self.end = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        return self.end - time.monotonic()

    def check(self, name: str, call: Callable[[], Figures | None]) -> None:
        """Passes unless `call` raises; it may return figures to show. Raising LeftOut, it could not be made."""
        self._guarded(name, PASSED, call)

    def measure(self, name: str, call: Callable[[], Figures]) -> None:
        """`call` returns the figures. Its error is written down, too, and others still run."""
        self._guarded(name, MEASURED, call)

    def _guarded(self, name: str, status: str, call: Callable[[], Figures | None]) -> None:
        if self.seconds_left <= 0:
            self.left_out(name, "there is no time left")
            return
        try:
            figures = call()
        except LeftOut as reason:
            self.left_out(name, str(reason))
        except Exception:
            self._write(name, FAILED, error=traceback.format_exc())
        else:
            self._write(name, status, figures or {})

    def left_out(self, name: str, reason: str) -> None:
        self._write(name, LEFT_OUT, reason=reason)

    def _write(self, name: str, status: str, figures: Figures | None = None, **more: str) -> None:
        row = {"name": name, "status": status, "figures": dict(figures or {}), **more}
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")


def read_rows(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def within(error: float, allowed: float, **figures: float) -> Figures:
    """The figures of a check, which fails if `error` is above `allowed` or is not a number."""
    if not error <= allowed:
        raise AssertionError(f"error {error:.3g} is above {allowed:.3g} ({figures})")
    return {"error": error, "allowed": allowed, **figures}
