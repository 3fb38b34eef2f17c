"""AsyncLLM: deltas that add up to what `LLM.generate` returns, aborts, slow readers, dead engines."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from kvllm import LLM, AsyncLLM, EngineDeadError, RequestError, SamplingParams
from kvllm.engine_args import DEFAULT_MODEL, EngineArgs
from kvllm.outputs import RequestOutput
from tests.helpers.deltas import append, collect
from tests.helpers.waiting import wait_until

OPTIONS = {"block_size": 16, "num_gpu_blocks_override": 400, "max_num_seqs": 32}
PROMPTS = ["AB=", "A=3 B=4", "QRS", "Q"]


@pytest.fixture(scope="module")
def async_llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM.from_engine_args(EngineArgs(**OPTIONS))
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(**OPTIONS)


def sampled(max_tokens: int = 60, **options) -> SamplingParams:
    return SamplingParams(**({"max_tokens": max_tokens, "seed": 5, "ignore_eos": True} | options))


def idle(async_llm: AsyncLLM) -> None:
    engine = async_llm._engine
    wait_until(lambda: not engine.has_unfinished_requests(), "the engine's rest")
    assert engine.scheduler.blocks.num_owned == 0


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(sampled(), marks=pytest.mark.long),
        sampled(temperature=0, logprobs=2),
        sampled(n=3),
        pytest.param(sampled(60, stop=["1", "the"]), marks=pytest.mark.long),
        sampled(60, stop=["2"], include_stop_str_in_output=True, n=2),
        sampled(60, ignore_eos=False),
        sampled(60, stop_token_ids=[20, 30, 40]),
        sampled(60, skip_special_tokens=False),
    ],
    ids=["sampled", "logprobs", "n", "stop", "stop included", "end of text", "stop token", "special tokens"],
)
def test_deltas_add_up_to_the_outputs_of_a_batch(async_llm: AsyncLLM, llm: LLM, params: SamplingParams) -> None:
    async def run() -> list[RequestOutput]:
        return await asyncio.gather(
            *(collect(async_llm.generate(prompt, params, str(i))) for i, prompt in enumerate(PROMPTS))
        )

    for found, expected in zip(asyncio.run(run()), llm.generate(PROMPTS, params, use_tqdm=False), strict=True):
        assert found.outputs == expected.outputs
        assert (found.prompt, found.prompt_token_ids) == (expected.prompt, expected.prompt_token_ids)


def test_every_token_comes_at_once(async_llm: AsyncLLM) -> None:
    async def run() -> list[int]:
        return [
            len(delta.outputs[0].token_ids) async for delta in async_llm.generate("A", sampled(100), "prompt reader")
        ]

    sizes = asyncio.run(run())
    assert sum(sizes) == 100 and len(sizes) > 50


def test_many_readers_get_fewer_and_larger_deltas(async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies between the first and the last one may be held back, and these two come at once."""
    monkeypatch.setattr("kvllm.async_llm.MOST_DELTAS_PER_SECOND", 0.001)
    monkeypatch.setattr("kvllm.async_llm.LONGEST_HOLD", 1000)

    async def read(request_id: str) -> list[int]:
        return [len(delta.outputs[0].token_ids) async for delta in async_llm.generate("A", sampled(100), request_id)]

    async def run() -> list[list[int]]:
        return await asyncio.gather(*(read(f"crowd {i}") for i in range(4)))

    for first, last in asyncio.run(run()):
        assert first < 50 and first + last == 100
    monkeypatch.setattr("kvllm.async_llm.LONGEST_HOLD", 0)
    assert all(sum(sizes) == 100 and len(sizes) > 10 for sizes in asyncio.run(run()))


def test_a_slow_reader_gets_larger_deltas(async_llm: AsyncLLM) -> None:
    begin = time.monotonic()
    found = asyncio.run(collect(async_llm.generate("AB=", sampled(300), "slow"), seconds=0.05))
    assert len(found.outputs[0].token_ids) == 300
    assert time.monotonic() - begin < 300 * 0.05 / 2


def test_a_closed_iterator_aborts_its_request(async_llm: AsyncLLM) -> None:
    async def run() -> None:
        items = async_llm.generate("A", sampled(400), "closed")
        await anext(items)
        await items.aclose()
        reading = asyncio.create_task(collect(async_llm.generate("A", sampled(400), "cancelled")))
        await asyncio.sleep(0.02)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        found = await collect(async_llm.generate("A", sampled(3), "closed"))  # the id is free again
        assert len(found.outputs[0].token_ids) == 3

    tokens_before = async_llm.stats().output_tokens
    asyncio.run(run())
    idle(async_llm)
    assert async_llm.stats().output_tokens - tokens_before < 700


def test_an_abort_ends_the_items(async_llm: AsyncLLM) -> None:
    async def run() -> RequestOutput:
        items = async_llm.generate("A", sampled(400, n=2), "aborted")
        first = await anext(items)
        await async_llm.abort("aborted")
        await async_llm.abort("unknown")
        rest = await collect(items)
        append(first, rest)
        return first

    found = asyncio.run(run())
    idle(async_llm)
    assert [completion.finish_reason for completion in found.outputs] == ["abort"] * 2
    assert 0 < len(found.outputs[0].token_ids) < 400
    assert found.outputs[0].text == async_llm.tokenizer.decode(found.outputs[0].token_ids, skip_special_tokens=True)


def test_refusals_come_before_the_first_item_and_harm_no_one(async_llm: AsyncLLM) -> None:
    async def run() -> None:
        reading = asyncio.create_task(collect(async_llm.generate("A", sampled(100), "good")))
        await asyncio.sleep(0)
        for prompt in ("", [10**9], [1] * 10**5, None, {"prompt": 5}, "\ud800"):
            with pytest.raises(RequestError):
                await anext(async_llm.generate(prompt, sampled(), "bad"))
        with pytest.raises(RequestError, match="in use"):
            await anext(async_llm.generate("A", sampled(), "good"))
        for options in ({"priority": 1.5}, {"priority": 1 << 64}, {"tenant": None}, {"cache_salt": ""}):
            with pytest.raises(RequestError, match=next(iter(options))):
                await anext(async_llm.generate("A", sampled(), "bad", **options))
        assert len((await reading).outputs[0].token_ids) == 100
        await async_llm.check_health()

    asyncio.run(run())
    idle(async_llm)


def test_prefixes_are_shared_under_the_same_salt_alone(async_llm: AsyncLLM) -> None:
    prompt = [7 + i % 50 for i in range(100)]

    async def cached(request_id: str, salt: str | None) -> int:
        found = await collect(async_llm.generate(prompt, sampled(2), request_id, cache_salt=salt))
        return found.metrics.num_cached_tokens

    async def run() -> list[int]:
        salts = ("a", "a", "b", None, None, "b")
        found = [await cached(str(i), salt) for i, salt in enumerate(salts)]
        await async_llm.reset_prefix_cache()
        return [*found, await cached("after", "a")]

    assert asyncio.run(run()) == [0, 96, 0, 0, 96, 96, 0]


def test_requests_of_several_event_loops(async_llm: AsyncLLM, llm: LLM) -> None:
    params = sampled(80)
    expected = llm.generate(PROMPTS, params, use_tqdm=False)
    found: dict[int, RequestOutput] = {}

    def run(index: int) -> None:
        found[index] = asyncio.run(collect(async_llm.generate(PROMPTS[index], params, f"thread {index}")))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i].outputs for i in range(len(PROMPTS))] == [output.outputs for output in expected]


def test_statistics_are_a_copy(async_llm: AsyncLLM) -> None:
    before = async_llm.stats()
    tokens, timeline = before.output_tokens, before.timeline
    asyncio.run(collect(async_llm.generate("A", sampled(20), "counted")))
    assert async_llm.stats().output_tokens == tokens + 20
    assert (before.output_tokens, before.timeline) == (tokens, timeline)


def test_readers_of_a_dead_engine_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = AsyncLLM.from_engine_args(EngineArgs(DEFAULT_MODEL, **OPTIONS))

    async def run() -> None:
        items = llm.generate("A", sampled(400), "first")
        await anext(items)
        await llm.check_health()
        assert llm.is_running and not llm.errored
        monkeypatch.setattr(llm._engine.executor, "launch", lambda plan: 1 / 0)
        with pytest.raises(EngineDeadError, match="division by zero") as raised:
            async for _ in items:
                pass
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
        assert llm.errored and not llm.is_running
        for call in (anext(llm.generate("A", sampled(), "second")), llm.check_health()):
            with pytest.raises(EngineDeadError, match="division by zero"):
                await call

    asyncio.run(run())
    llm.shutdown()


def num_engine_threads() -> int:
    return sum(thread.name == "kvllm-engine" for thread in threading.enumerate())


def test_shutdown_ends_all_readers() -> None:
    threads = num_engine_threads()
    llm = AsyncLLM.from_engine_args(EngineArgs(DEFAULT_MODEL, **OPTIONS))

    async def run() -> None:
        items = llm.generate("A", sampled(400), "first")
        await anext(items)
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            async for _ in items:
                pass
        with pytest.raises(EngineDeadError, match="shut down"):
            await anext(llm.generate("A", sampled(), "second"))

    asyncio.run(run())
    llm.shutdown()
    assert num_engine_threads() == threads


def test_the_engine_is_inspected_between_steps(async_llm: AsyncLLM) -> None:
    async def run() -> None:
        stream = async_llm.generate("AB=", sampled(400), "a")
        await anext(stream)
        assert await async_llm.inspect(lambda engine: list(engine.outputs.requests)) == ["a"]
        assert await async_llm.inspect(lambda _: threading.current_thread().name) == "kvllm-engine"
        with pytest.raises(KeyError):
            await async_llm.inspect(lambda engine: engine.outputs.requests["b"])
        assert (await anext(stream)).outputs
        await stream.aclose()

    asyncio.run(run())


def test_a_dead_engine_cannot_be_inspected() -> None:
    async def run() -> None:
        llm = AsyncLLM.from_engine_args(EngineArgs(**OPTIONS))
        llm.shutdown()
        with pytest.raises(EngineDeadError):
            await llm.inspect(lambda _: None)

    asyncio.run(run())
