"""Which requests a server takes."""

from __future__ import annotations

import asyncio

import pytest

from kvllm.serving.admission import Admission
from kvllm.serving.errors import ApiError


def test_completions_in_flight() -> None:
    admission = Admission(max_requests=3, max_tokens=None)
    admission.enter(2, 10)
    with pytest.raises(ApiError, match="of 3 at most") as refused:
        admission.enter(2, 10)
    assert refused.value.status == 503 and int(refused.value.headers["Retry-After"]) > 0
    assert admission.in_flight == 2 and admission.rejections["requests"] == 1
    admission.enter(1, 10)
    admission.leave(2)
    admission.enter(2, 10)


def test_prompt_tokens_that_wait() -> None:
    """A long prompt is taken while fewer tokens wait than allowed: it would never be otherwise."""
    admission = Admission(max_requests=None, max_tokens=100)
    admission.enter(1, 5000)
    with pytest.raises(ApiError, match="5000 prompt tokens wait"):
        admission.enter(1, 1)
    assert admission.rejections["tokens"] == 1
    admission.leave_prefill(5000)
    admission.enter(1, 1)


def test_draining() -> None:
    async def drain() -> None:
        admission = Admission(None, None)
        await asyncio.wait_for(admission.wait_until_idle(), 1)
        admission.enter(2, 1)
        admission.is_draining = True
        with pytest.raises(ApiError, match="shutting down"):
            admission.enter(1, 1)
        idle = asyncio.ensure_future(admission.wait_until_idle())
        admission.leave(1)
        await asyncio.sleep(0)
        assert not idle.done()
        admission.leave(1)
        await asyncio.wait_for(idle, 1)

    asyncio.run(drain())
