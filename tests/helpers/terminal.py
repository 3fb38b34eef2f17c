"""A command at a terminal: a pseudo-terminal that a test types into and reads from."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
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

    def interrupt_and_close(self) -> int:
        """Interrupt a process that waits for a line, and wait for its end. Returns its exit code.

        readline loses an interrupt that comes between its prompt and its wait for a key, so that one may take two.
        """
        for _ in range(10):
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
                break
        return self.close()

    def close(self) -> int:
        """Wait for the end of the process. Returns its exit code."""
        try:
            return self.process.wait(SECONDS)
        finally:
            self.process.kill()
            os.close(self._fd)
