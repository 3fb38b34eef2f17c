"""Firefox, over the standard protocol WebDriver BiDi: Playwright drives a Firefox of its own making alone."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.helpers.waiting import wait_until

NAMES = ("firefox", "firefox-esr")
START_SECONDS = 60


class Firefox:
    """One window. errors: what its console had. The connection has a thread of its own: Playwright's loop runs in the
    main one."""

    def __init__(self, url: str) -> None:
        self.errors: list[str] = []
        self._thread = ThreadPoolExecutor(1)
        self._runner = asyncio.Runner()
        self._number = 0
        self._run(self._connect(url))
        self.send("session.new", capabilities={})
        self.send("session.subscribe", events=["log.entryAdded"])
        self._context = self.send("browsingContext.getTree")["contexts"][0]["context"]

    def go(self, url: str) -> None:
        self.send("browsingContext.navigate", context=self._context, url=url, wait="complete")

    def reload(self) -> None:
        self.send("browsingContext.reload", context=self._context, wait="complete")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression: a number, a string or a boolean."""
        target = {"context": self._context}
        found = self.send("script.evaluate", expression=expression, target=target, awaitPromise=True)
        assert found["type"] == "success", found
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        wait_until(lambda: self.evaluate(expression) is True, expression, 30)

    def type(self, text: str) -> None:
        """Press keys, one after the other."""
        keys = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        actions = [{"type": "key", "id": "keyboard", "actions": keys}]
        self.send("input.performActions", context=self._context, actions=actions)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command."""
        return self._run(self._send(method, params))

    def close(self) -> None:
        self._run(self._session.close())
        self._thread.submit(self._runner.close).result()
        self._thread.shutdown()

    def _run(self, work: Any) -> Any:
        return self._thread.submit(self._runner.run, work).result()

    async def _connect(self, url: str) -> None:
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(f"{url}/session", max_msg_size=0)

    async def _send(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json()
            if message.get("method") == "log.entryAdded" and message["params"]["level"] == "error":
                self.errors.append(str(message["params"].get("text")))
            if message.get("id") == self._number:
                assert "result" in message, message
                return message["result"]


@contextmanager
def open_firefox() -> Iterator[Firefox]:
    """Firefox without a window; skips the test where there is none."""
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        pytest.skip(f"needs a browser: one of {', '.join(NAMES)}")
    with tempfile.TemporaryDirectory() as home, open(Path(home) / "log", "w+") as log:
        options = ("--headless", "--no-remote", "--remote-debugging-port", "0", "--profile", home)
        environment = {"HOME": home, "PATH": "/usr/bin:/bin"}
        process = subprocess.Popen([executable, *options], stdout=log, stderr=log, env=environment)
        try:
            firefox = Firefox(_address(Path(log.name)))
            yield firefox
            firefox.close()
        finally:
            process.kill()
            process.wait()


def _address(log: Path) -> str:
    for _ in range(START_SECONDS * 5):
        if found := re.search(r"WebDriver BiDi listening on (ws://\S+)", log.read_text()):
            return found[1]
        time.sleep(0.2)
    raise RuntimeError(f"Firefox has not started: {log.read_text()}")
