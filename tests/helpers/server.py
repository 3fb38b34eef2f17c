"""A real server process on a port of its own, and what tests ask it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

START_SECONDS = 120.0
TRACEBACK = re.compile(r"^.*\nTraceback .*\n(?: .*\n)*.*", re.MULTILINE)
COMPLETION_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
"""The beginning of a request that is written to a socket."""


class ServerProcess:
    """`kvllm serve` with some arguments. url: where it answers. Its log is a file, so that no pipe fills up.

    module: what runs in place of `kvllm`.
    """

    def __init__(self, *arguments: str, environment: Mapping[str, str] | None = None, module: str = "kvllm") -> None:
        self._log = tempfile.NamedTemporaryFile("r+", suffix=".log")  # noqa: SIM115  # closed by `stop`
        options = {**os.environ, "OMP_NUM_THREADS": "1", "KVLLM_NUM_THREADS": "1", **(environment or {})}
        command = [sys.executable, "-m", module, "serve", *arguments]
        if "--uds" not in arguments and "--port" not in arguments:
            command += ["--port", "0"]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=options)
        self.url = self._wait_for_start()

    @property
    def log(self) -> str:
        """All that the process has written."""
        with open(self._log.name) as file:
            return file.read()

    @property
    def tracebacks(self) -> list[str]:
        """The exceptions in the log, each with the line before it."""
        return TRACEBACK.findall(self.log)

    def request(
        self, path: str, body: Any = None, headers: Mapping[str, str] | None = None, method: str | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of an answer. body: bytes, or what becomes JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, data, sent, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, _headers(answer), answer.read()
        except urllib.error.HTTPError as error:
            return error.code, _headers(error), error.read()

    def json(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        status, _, content = self.request(path, body, headers)
        return status, json.loads(content)

    def metric(self, name: str) -> float:
        """The value of the first sample of a metric with this name, or name and labels."""
        _, _, text = self.request("/metrics")
        found = re.search(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text.decode(), re.MULTILINE)
        assert found, f"no metric {name} in {text.decode()}"
        return float(found[1])

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def stop(self) -> int:
        """End it, if it has not ended. Returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self._log.close()

    def _wait_for_start(self) -> str:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if found := re.search(r"serving .* at (\S+)$", self.log, re.MULTILINE):
                return found[1]
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        self.process.kill()
        raise RuntimeError(f"the server has not started: {self.log}")


def _headers(answer: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in answer.headers.items()}
