"""AsyncLLM.deliver: the items of `generate`, handed to a function."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from kvllm import AsyncLLM, RequestError, SamplingParams
from kvllm.engine_args import EngineArgs
from kvllm.outputs import RequestOutput
from tests.helpers.deltas import append, collect
from tests.helpers.waiting import wait_until


@pytest.fixture(scope="module")
def async_llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM.from_engine_args(EngineArgs(block_size=16, num_gpu_blocks_override=400, max_num_seqs=32))
    yield llm
    llm.shutdown()


def sampled(max_tokens: int, **options) -> SamplingParams:
    return SamplingParams(**({"max_tokens": max_tokens, "seed": 5, "ignore_eos": True} | options))


def at_rest(async_llm: AsyncLLM) -> None:
    engine: Any = async_llm._engine
    wait_until(lambda: not engine.has_unfinished_requests(), "the engine's rest")
    assert engine.scheduler.blocks.num_owned == 0
    assert async_llm._streams == {}


def added_up(deltas: list[RequestOutput]) -> RequestOutput:
    first, *rest = deltas
    for delta in rest:
        append(first, delta)
    first.outputs.sort(key=lambda completion: completion.index)
    return first


@pytest.mark.parametrize(
    "params",
    [sampled(60, n=3, logprobs=1), sampled(200, stop=["1", "the"]), sampled(1), sampled(200, ignore_eos=False)],
)
def test_what_is_delivered_is_what_generate_yields(async_llm: AsyncLLM, params: SamplingParams) -> None:
    async def run() -> None:
        deltas: list[RequestOutput] = []
        expected = await collect(async_llm.generate("A=3 B=4", params, "generated"))
        await async_llm.deliver("A=3 B=4", params, "delivered", deltas.append)
        assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        assert added_up(deltas).outputs == expected.outputs

    asyncio.run(run())


def test_nothing_is_handed_over_while_the_receiver_is_not_ready(async_llm: AsyncLLM) -> None:
    """What comes meanwhile is one item, and the last item is waited for, too."""

    async def run() -> None:
        deltas: list[RequestOutput] = []
        is_ready = True

        async def pause() -> None:
            nonlocal is_ready
            await asyncio.sleep(0.1)
            is_ready = True

        def receive(delta: RequestOutput):
            nonlocal is_ready
            assert is_ready
            is_ready = False
            deltas.append(delta)
            return pause()

        await async_llm.deliver("AB=", sampled(300), "slow", receive)
        assert is_ready and deltas[-1].finished
        assert len(deltas) < 100 and len(added_up(deltas).outputs[0].token_ids) == 300

    asyncio.run(run())


@pytest.mark.parametrize("waits", [False, True])
def test_a_receiver_that_fails_ends_its_request_alone(async_llm: AsyncLLM, waits: bool) -> None:
    async def fail() -> None:
        raise ValueError("broken")

    def receive(delta: RequestOutput):
        if waits:
            return fail()
        raise ValueError("broken")

    async def run() -> None:
        neighbour = asyncio.create_task(collect(async_llm.generate("A", sampled(100), "neighbour")))
        with pytest.raises(ValueError, match="broken"):
            await async_llm.deliver("A", sampled(600), "broken", receive)
        assert len((await neighbour).outputs[0].token_ids) == 100

    before = async_llm.stats().output_tokens
    asyncio.run(run())
    at_rest(async_llm)
    assert async_llm.stats().output_tokens - before < 600


@pytest.mark.parametrize("waits", [False, True])
def test_a_cancelled_delivery_aborts_its_request(async_llm: AsyncLLM, waits: bool) -> None:
    """Its receiver, and what it waits for, hear no more."""

    async def run() -> None:
        count, began, ended = 0, asyncio.Event(), []

        async def wait() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(True)

        def receive(delta: RequestOutput):
            nonlocal count
            count += 1
            began.set()
            return wait() if waits else None

        delivery = asyncio.create_task(async_llm.deliver("A", sampled(1000), "cancelled", receive))
        await began.wait()
        await asyncio.sleep(0)  # what the receiver returned has begun
        delivery.cancel()
        with pytest.raises(asyncio.CancelledError):
            await delivery
        found = count
        await collect(async_llm.generate("A", sampled(3), "cancelled"))  # the id is free again
        assert count == found and ended == [True] * waits

    before = async_llm.stats().output_tokens
    asyncio.run(run())
    at_rest(async_llm)
    assert async_llm.stats().output_tokens - before < 1000


def test_a_refusal_comes_before_the_first_item(async_llm: AsyncLLM) -> None:
    deltas: list[RequestOutput] = []
    with pytest.raises(RequestError, match="token"):
        asyncio.run(async_llm.deliver({"prompt_token_ids": [10**6]}, sampled(3), "refused", deltas.append))
    assert deltas == []
    at_rest(async_llm)
