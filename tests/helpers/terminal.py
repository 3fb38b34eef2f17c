"""A command at a terminal: a pseudo-terminal that a test types into and reads from."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from collections.abc import Sequence

SECONDS = 60.0


class Terminal:
    """A process whose standard streams are a terminal of its own."""

    def __init__(self, command: Sequence[str]) -> None:
        self._fd, inner = pty.openpty()
        options = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
        self.process = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=inner, env=options, start_new_session=True
        )
        os.close(inner)
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, text: str) -> str:
        """Read until a text comes. Returns what came before it, since the last call."""
        end = time.monotonic() + SECONDS
        while text not in self.text:
            ready, _, _ = select.select([self._fd], [], [], end - time.monotonic())
            assert ready, f"{text!r} did not come: {self.text!r}"
            self.text += os.read(self._fd, 65536).decode(errors="replace")
        before, _, self.text = self.text.partition(text)
        return before

    def close(self) -> int:
        """Wait for the end of the process. Returns its exit code."""
        try:
            return self.process.wait(SECONDS)
        finally:
            self.process.kill()
            os.close(self._fd)
