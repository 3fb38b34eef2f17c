"""A dead engine is replaced while its server answers 503."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from kvllm.async_llm import AsyncLLM
from kvllm.engine_args import EngineArgs
from kvllm.serving.app import make_app
from kvllm.serving.state import ServerOptions, ServerState
from kvllm.serving.supervisor import MOST_RESTARTS, EngineSupervisor
from tests.helpers.asgi import ask
from tests.serving.conftest import PROMPT

ARGS = EngineArgs(block_size=16, kv_cache_memory_bytes=16 << 20)


def kill(llm: AsyncLLM) -> None:
    """Let the engine's thread end with an error, as a bug would."""

    def fail(engine: Any) -> None:
        raise MemoryError("no memory at /secret/path")

    llm._loop.submit(fail)


async def until_replaced(state: ServerState, dead: AsyncLLM) -> None:
    async with asyncio.timeout(60):
        while state.llm is dead:
            await asyncio.sleep(0.02)


async def serve_through_deaths() -> None:
    first = AsyncLLM.from_engine_args(ARGS)
    state = ServerState(ARGS, ServerOptions(("reasoner",)), first)
    app = make_app(state)
    long = {"prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    stream = asyncio.create_task(ask(app, "/v1/completions", long))
    while first.stats().output_tokens < 5:
        await asyncio.sleep(0.01)
    kill(first)
    status, events = await stream
    assert status == 200 and events.endswith(b"data: [DONE]\n\n")
    assert json.loads(events.split(b"\n\n")[-3].removeprefix(b"data: "))["error"]["code"] == 503
    assert b"/secret/path" not in events
    for path, body in (("/health", None), ("/v1/completions", {"prompt": "a"})):
        assert (await ask(app, path, body))[0] == 503
    watching = asyncio.create_task(EngineSupervisor(state).watch())
    for _ in range(MOST_RESTARTS):
        dead = state.llm
        kill(dead)
        await until_replaced(state, dead)
        assert (await ask(app, "/health"))[0] == 200
        assert (await ask(app, "/v1/completions", {"prompt": PROMPT, "max_tokens": 2}))[0] == 200
    kill(state.llm)
    await asyncio.wait_for(watching, 60)  # it gives up
    assert state.admission.in_flight == state.admission.prompt_tokens == 0
    state.llm.shutdown()


def test_a_dead_engine_is_replaced() -> None:
    """Its streams end with an error. After too many deaths nothing is started any more."""
    asyncio.run(serve_through_deaths())
