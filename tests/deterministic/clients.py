"""Clients of one kind each: they ask, read as slowly as they like, and go away."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, MutableMapping
from typing import Any

from msgspec import Struct

from kvllm import RequestOutput
from kvllm.async_llm import AsyncLLM
from kvllm.config import EngineConfig
from kvllm.errors import RequestError
from kvllm.lora.request import Adapter
from tests.deterministic.routes import PATHS, body_of, read_answer
from tests.deterministic.scenario import Arrival


class CallbackFailed(Exception):
    """What a client's own callback raises."""


class Got(Struct):
    """What a client has of a request, by completion. text: of the only one, from a route that shows no tokens.
    prompt_logprobs: of the prompt's own tokens. left: whether it went away before the end. asked, ended: when."""

    tokens: list[list[int]]
    reasons: list[str | None]
    text: str = ""
    prompt_logprobs: list[float | None] = []
    error: BaseException | None = None
    left: bool = False
    asked: float = 0.0
    ended: float = 0.0

    def take(self, output: RequestOutput) -> None:
        for completion in output.outputs:
            self.tokens[completion.index] += completion.token_ids
            self.reasons[completion.index] = completion.finish_reason
        if output.prompt_logprobs is not None:
            own = zip(output.prompt_token_ids, output.prompt_logprobs, strict=False)
            self.prompt_logprobs = [each[token].logprob if each else None for token, each in own]
        if output.error is not None:
            self.error = output.error


class Clients:
    """llm: the engine that there is now. app: the server's application. prompts: of the model, the requests'. contents:
    of messages, where a request is one."""

    def __init__(
        self,
        llm: Callable[[], AsyncLLM],
        app: Any,
        prompts: dict[str, list[int]],
        contents: dict[str, str],
        config: EngineConfig,
        rng: random.Random,
    ) -> None:
        self.llm = llm
        self.app = app
        self.prompts = prompts
        self.contents = contents
        self.max_model_len = config.max_model_len
        self.rng = rng

    async def ask(self, name: str, arrival: Arrival) -> Got:
        """Wait for the time of a request, and ask."""
        await asyncio.sleep(arrival.at)
        number = arrival.sampling.get("n", 1)
        got = Got([[] for _ in range(number)], [None] * number, asked=asyncio.get_running_loop().time())
        ways = {"generate": self._generate, "deliver": self._deliver, "beam": self._search}
        talk = ways.get(arrival.via, self._post)
        task = asyncio.ensure_future(talk(name, arrival, got))
        if arrival.leave_at is not None and arrival.via in ways:
            await asyncio.wait((task,), timeout=arrival.leave_at)
            got.left = not task.done()
            task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            assert got.left
        except (RequestError, RuntimeError, CallbackFailed) as error:
            got.error = error
        got.ended = asyncio.get_running_loop().time()
        return got

    async def _generate(self, name: str, arrival: Arrival, got: Got) -> None:
        self._plan_abort(name, arrival)
        async for item in self.llm().generate(_prompt(arrival), arrival.params, name, **_service(arrival)):
            got.take(item)
            if arrival.pause:
                await asyncio.sleep(arrival.pause)

    def _plan_abort(self, name: str, arrival: Arrival) -> None:
        if arrival.abort_at is not None:
            asyncio.get_running_loop().call_later(
                arrival.abort_at, lambda: asyncio.ensure_future(self.llm().abort(name))
            )

    async def _search(self, name: str, arrival: Arrival, got: Got) -> None:
        self._plan_abort(name, arrival)
        got.take(await self.llm().beam_search(_prompt(arrival), arrival.beams, name, **_service(arrival)))

    async def _deliver(self, name: str, arrival: Arrival, got: Got) -> None:
        items = 0

        def receive(item: RequestOutput) -> Any:
            nonlocal items
            items += 1
            if items == arrival.raises_at:
                raise CallbackFailed
            got.take(item)
            return asyncio.sleep(arrival.pause) if arrival.pause else None

        await self.llm().deliver(_prompt(arrival), arrival.params, name, receive, **_service(arrival))

    async def _post(self, name: str, arrival: Arrival, got: Got) -> None:
        """A request to the server, whose body comes in two parts, and whose answer comes whole or as a stream."""
        gone = asyncio.Event()
        if arrival.leave_at is not None:
            asyncio.get_running_loop().call_later(arrival.leave_at, gone.set)
        body = body_of(arrival, self.contents.get(name, ""), self.max_model_len - len(self.prompts[name]))
        half = self.rng.randrange(len(body))
        parts = [(body[:half], True), (body[half:], False)]
        status, written = 0, b""

        async def receive() -> dict[str, Any]:
            if parts:
                content, more_body = parts.pop(0)
                return {"type": "http.request", "body": content, "more_body": more_body}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal status, written
            status = message.get("status", status)
            if not gone.is_set():
                written += message.get("body", b"")
            if arrival.pause:
                await asyncio.sleep(arrival.pause)

        headers = [(b"content-type", b"application/json"), (b"x-request-id", name.encode())]
        scope = {"type": "http", "method": "POST", "path": PATHS[arrival.route]}
        scope |= {"query_string": b"", "headers": headers}
        await self.app(scope, receive, send)
        got.left = gone.is_set()
        if got.left and not (arrival.via == "stream" and status == 200):
            return
        for piece in read_answer(arrival, status, written):
            got.tokens[piece.index] += piece.tokens
            got.text += piece.text
            got.reasons[piece.index] = piece.reason or got.reasons[piece.index]
            got.error = piece.error or got.error


def _prompt(arrival: Arrival) -> Any:
    return {"prompt_token_ids": arrival.prompt}


def _service(arrival: Arrival) -> dict[str, Any]:
    adapter = Adapter(arrival.adapter, "", arrival.adapter) if arrival.adapter else None
    return {
        "priority": arrival.priority,
        "tenant": arrival.tenant,
        "cache_salt": arrival.salt,
        "lora_request": adapter,
    }
