"""What the server counts of a request: its usage, and how it ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvllm import CompressionConfig
from kvllm.async_llm import AsyncLLM
from kvllm.engine_args import EngineArgs
from kvllm.serving.app import make_app
from kvllm.serving.state import ServerOptions, ServerState
from tests.helpers.asgi import ask
from tests.serving.conftest import PROMPT

THRESHOLD, BUDGET = 256, 128
COMPRESSION = CompressionConfig(method="keydiff", policy="threshold", threshold_tokens=THRESHOLD, budget_tokens=BUDGET)
# 3 sequences need up to 16 blocks each.
ARGS = EngineArgs(block_size=16, num_gpu_blocks_override=28, max_num_seqs=8, compression=COMPRESSION)


@pytest.fixture
def state() -> Iterator[ServerState]:
    llm = AsyncLLM.from_engine_args(ARGS)
    yield ServerState(ARGS, ServerOptions(("reasoner",)), llm)
    llm.shutdown()


async def complete(app: Any, body: dict[str, Any]) -> tuple[int, Any]:
    """Status and body of an answer."""
    status, answer = await ask(app, "/v1/completions", body)
    return status, json.loads(answer)


def test_usage_after_preemptions(state: ServerState) -> None:
    """A preempted sequence is computed and compressed again: its share tells what it has in the end."""
    body = {"prompt": PROMPT, "max_tokens": 700, "ignore_eos": True, "temperature": 0, "n": 3}
    status, answer = asyncio.run(complete(make_app(state), body))
    usage, pairs = answer["usage"]["kvllm"], 3 * 740
    assert status == 200 and usage["preemptions"] > 0
    assert 3 * BUDGET <= usage["kept_share"] * pairs <= 3 * THRESHOLD
    assert usage["evicted_pairs"] == (THRESHOLD - BUDGET) * usage["windows"] > pairs


def test_a_request_that_the_engine_refuses_is_no_abort(state: ServerState) -> None:
    body = {"prompt": PROMPT, "max_tokens": 5, "compression": {"budget_tokens": 1}}
    assert asyncio.run(complete(make_app(state), body))[0] == 400
    assert b'finished_reason="abort"' not in state.metrics.text()
