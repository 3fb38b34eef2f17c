"""The server of a run, which is reconfigured, drained, and gets a new engine when one has died."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest.mock import patch

from kvllm.async_llm import AsyncLLM
from kvllm.lora.request import Adapter, LoRARequest
from kvllm.serving.app import make_app
from kvllm.serving.state import ServerOptions, ServerState
from kvllm.serving.supervisor import EngineSupervisor
from tests.deterministic.scenario import ADAPTERS


class Change(NamedTuple):
    """Which files an adapter's name stands for, since a moment between two; None for no adapter."""

    begin: float
    end: float
    digest: str | None


class AdapterFiles:
    """Opens adapters: the digest of one is its path."""

    def open(self, request: LoRARequest) -> Adapter:
        return Adapter(request.lora_name, request.lora_path, request.lora_path)


class SimulatedServer:
    """make_llm: of an engine, the first or another one.

    supervisor: looks after the engine, if it shall. dead: from when to when there was no engine.
    """

    def __init__(self, make_llm: Callable[[], AsyncLLM], *, max_loras: int, supervised: bool) -> None:
        self._make_llm = make_llm
        self._loop = asyncio.get_running_loop()
        self.dead: list[tuple[float, float]] = []
        loads = max_loras > 0
        args = cast("Any", SimpleNamespace(sampling_defaults={}, enable_lora=loads))
        options = ServerOptions(("model",), allow_runtime_lora_updating=loads)
        adapters = {name: Adapter(name, name, name) for name in ADAPTERS if loads}
        self.state = ServerState(args, options, make_llm(), adapters)
        self.app = make_app(self.state)
        self.changes = {name: [Change(-math.inf, -math.inf, name)] for name in adapters}
        self._patch = patch.object(AsyncLLM, "from_engine_args", self._start_again)
        self._patch.start()
        self.supervisor = asyncio.ensure_future(EngineSupervisor(self.state).watch()) if supervised else None

    def close(self) -> None:
        self._patch.stop()

    def note_death(self) -> None:
        self.dead.append((self._loop.time(), math.inf))

    def _start_again(self, args: Any) -> AsyncLLM:
        llm = self._make_llm()
        self.dead[-1] = self.dead[-1][0], self._loop.time()
        return llm

    async def wait_for_engine(self) -> None:
        """Return when there is one, or will be none. Raises AssertionError if the supervisor is at fault."""
        for _ in range(100):
            if not self.state.llm.errored or self.supervisor is None:
                return
            if self.supervisor.done():
                self.supervisor.result()
                assert len(self.dead) > 3, "the supervisor has given up too early"
                return
            await asyncio.sleep(0.1)
        raise AssertionError("the supervisor has not started the engine again")

    async def reconfigure(self, kind: str, number: int) -> None:
        """Load another adapter of a name, or unload it."""
        name = ADAPTERS[number % len(ADAPTERS)]
        body = {"lora_name": name} | ({"lora_path": f"{name}{number}", "load_inplace": True} if kind == "load" else {})
        begin, status = self._loop.time(), await self._post(f"/v1/{kind}_lora_adapter", body)
        was_there = self.changes[name][-1].digest is not None
        assert status == 200 or (status == 404 and kind == "unload" and not was_there), f"{kind} {name}: {status}"
        self.changes[name].append(Change(begin, self._loop.time(), body.get("lora_path") if kind == "load" else None))

    def digests(self, name: str, begin: float, end: float) -> list[str | None]:
        """Of the adapters that a name may have stood for between two moments."""
        changes = self.changes[name]
        ends = [change.end for change in changes[1:]] + [math.inf]
        return [
            change.digest for change, last in zip(changes, ends, strict=True) if change.begin <= end and begin <= last
        ]

    async def _post(self, path: str, body: dict[str, Any]) -> int:
        statuses = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

        async def send(message: Any) -> None:
            statuses.append(message.get("status"))

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        await self.app(scope, receive, send)
        return statuses[0]
