"""Streams that are kept: what ends them, and which ids are free."""

from __future__ import annotations

import asyncio

import pytest

from kvllm.serving.errors import ApiError, unavailable
from kvllm.serving.kept_answers import KeptAnswer, KeptAnswers
from kvllm.serving.sse import EventStream, Write


def test_cancelling_twice_leaves_the_work_time_to_clean_up() -> None:
    """As a client does that sends DELETE again."""
    cleaned = []

    async def source(write: Write) -> None:
        write(b"data: 1\n\n")
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.02)
            cleaned.append(True)

    async def cancel() -> None:
        answer = KeptAnswer(EventStream(source))
        for _ in range(5):
            await asyncio.sleep(0.005)
            answer.cancel()
        await answer.reader(0).source(lambda data: None)

    asyncio.run(cancel())
    assert cleaned == [True]


def test_the_id_of_a_refused_stream_is_free_again() -> None:
    async def refuse(write: Write) -> None:
        raise unavailable("the server is busy")

    async def answer(write: Write) -> None:
        write(b"data: 1\n\n")

    async def ask() -> list[bytes]:
        answers, found = KeptAnswers(), list[bytes]()
        with pytest.raises(ApiError, match="is busy"):
            await answers.start("key", "a", lambda: KeptAnswer(EventStream(refuse))).reader(0).source(found.append)
        await answers.start("key", "a", lambda: KeptAnswer(EventStream(answer))).reader(0).source(found.append)
        with pytest.raises(ApiError, match="there is an answer with the id 'a'"):
            answers.start("key", "a", lambda: KeptAnswer(EventStream(answer)))
        return found

    assert asyncio.run(ask()) == [b"data: 1\nid: 1\n\n"]
