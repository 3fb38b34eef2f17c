"""Calls of several threads in one LLM, and exceptions that leave calls: each call has the tokens of a lone run."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from kvllm import LLM, BeamSearchParams, CompressionConfig, RequestError, SamplingParams
from kvllm.core.engine import LLMEngine
from tests.helpers.checkpoints import make_with_package_tokenizer
from tests.helpers.examples import examples, thinned
from tests.helpers.interrupts import Trap, chosen_lines

NUM_THREADS = 8
PROMPTS = ["ABCDEFG", "AAAABBBBCCCCD", "XYZ", "AAAABBBBCC", "EEE", "ABABABAB", "DDCCBBAA", "A"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(seed=3, n=2, max_tokens=9, ignore_eos=True, logprobs=2)
THRESHOLD = CompressionConfig(
    method="snapkv", policy="threshold", threshold_tokens=16, budget_tokens=8, buffer=2, query_window=4
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer with random weights, and the tokenizer of the package's model."""
    path = tmp_path_factory.mktemp("shared")
    make_with_package_tokenizer(path)
    return path


@pytest.fixture(scope="module", params=[False, True], ids=["one step", "planning ahead"])
def llm(checkpoint: Path, request: pytest.FixtureRequest) -> LLM:
    """With a pool that makes several threads preempt one another."""
    return make_llm(checkpoint, async_scheduling=request.param)


def make_llm(checkpoint: Path, **options: Any) -> LLM:
    return LLM(
        checkpoint,
        block_size=4,
        num_gpu_blocks_override=24,
        max_num_seqs=16,
        max_num_batched_tokens=16,
        max_model_len=48,
        **options,
    )


def tokens_of(llm: LLM, prompts: list[str], params: SamplingParams, **options: Any) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, **{"use_tqdm": False, **options})
    assert all(output.error is None for output in outputs)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def in_threads(work: Callable[[int], Any], count: int = NUM_THREADS) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def check_nothing_leaks(llm: LLM) -> None:
    engine = llm.llm_engine
    assert isinstance(engine, LLMEngine)
    llm._calls.wait(10)
    engine.scheduler.check()
    assert engine.scheduler.blocks.num_owned == 0 and not engine.has_unfinished_requests()


def batch_of(thread: int) -> tuple[list[str], SamplingParams]:
    prompts = PROMPTS[thread:] + PROMPTS[:thread]
    return prompts[: 1 + thread % 4], GREEDY if thread % 2 else SEEDED


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[list[list[int]]]]:
    """Tokens of each thread's batch, in a lone run."""
    return [tokens_of(llm, *batch_of(thread)) for thread in range(NUM_THREADS)]


def test_calls_of_eight_threads_have_the_tokens_of_lone_runs(llm: LLM, expected: list[Any]) -> None:
    before = llm.stats().steps
    lone = sum(max(map(len, (each for output in batch for each in output))) for batch in expected)

    def work(thread: int) -> None:
        for _ in range(4):
            assert tokens_of(llm, *batch_of(thread)) == expected[thread]

    in_threads(work)
    assert llm.stats().steps - before < 4 * lone, "the batches of threads do not run together"
    check_nothing_leaks(llm)


def test_other_calls_beside_them(llm: LLM, expected: list[Any]) -> None:
    search = BeamSearchParams(beam_width=2, max_tokens=5)
    beams = [each.token_ids for each in llm.beam_search("ABC", search)[0].outputs]

    def work(thread: int) -> None:
        if thread == 0:
            assert [each.token_ids for each in llm.beam_search("ABC", search)[0].outputs] == beams
        elif thread == 1:
            assert all(llm.reset_prefix_cache() for _ in range(5))
        elif thread == 2:
            with pytest.raises(RequestError, match="not in the vocabulary"):
                llm.generate([{"prompt_token_ids": [10**6]}][0], GREEDY, use_tqdm=False)
        else:
            assert tokens_of(llm, *batch_of(thread)) == expected[thread]

    in_threads(work)
    check_nothing_leaks(llm)


class Failure(Exception):
    """What the tests raise."""


class FailingOnce:
    """Raises before or after the k-th call of a method of an object, and never again."""

    def __init__(self, owner: Any, name: str, call: int, *, after: bool) -> None:
        self._owner, self._name, self._left, self._after = owner, name, call, after
        self._method = getattr(owner, name)

    def __enter__(self) -> FailingOnce:
        setattr(self._owner, self._name, self._call)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(self._owner, self._name, self._method)

    @property
    def has_failed(self) -> bool:
        return self._left <= 0

    def _call(self, *args: Any, **options: Any) -> Any:
        self._left -= 1
        if self._left == 0 and not self._after:
            raise Failure
        result = self._method(*args, **options)
        if self._left == 0 and self._after:
            raise Failure
        return result


BOUNDARIES = [
    ("llm_engine.executor", "launch"),
    ("llm_engine.executor", "collect"),
    ("llm_engine.scheduler", "schedule"),
    ("llm_engine.scheduler", "receive"),
    ("llm_engine.outputs", "process"),
    ("llm_engine", "step"),
    ("llm_engine", "add_request"),
]


def owner_of(llm: LLM, path: str) -> Any:
    found: Any = llm
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("path", "method"), BOUNDARIES)
def test_an_exception_at_a_step_boundary(llm: LLM, expected: list[Any], path: str, method: str, after: bool) -> None:
    """The call may raise; the next one has the tokens of a fresh engine."""
    for number in range(1, 30, 1 if examples(100) == 100 else 4):
        failing = FailingOnce(owner_of(llm, path), method, number, after=after)
        with suppress(Failure), failing:
            tokens_of(llm, *batch_of(3))
        if not failing.has_failed:
            break
        assert tokens_of(llm, *batch_of(3)) == expected[3], f"call {number} of {method}"
        check_nothing_leaks(llm)
    assert number > 1


@pytest.mark.parametrize(("path", "method"), thinned(BOUNDARIES))
def test_an_exception_beside_the_calls_of_other_threads(llm: LLM, expected: list[Any], path: str, method: str) -> None:
    """It leaves one call at most. The others, and the next ones, have their tokens."""
    for number in (1, 5, 12) if examples(100) == 100 else (5,):
        raised: list[int] = []

        def work(thread: int, raised: list[int] = raised) -> None:
            try:
                assert tokens_of(llm, *batch_of(thread)) == expected[thread]
            except Failure:
                raised.append(thread)

        with FailingOnce(owner_of(llm, path), method, number, after=bool(number % 2)):
            in_threads(work)
        assert len(raised) <= 1
        assert tokens_of(llm, *batch_of(5)) == expected[5]
        check_nothing_leaks(llm)


class Bar(tqdm):
    """A progress bar of which one callback raises."""

    fails = ("update", 1)

    def __init__(self, *args: Any, **options: Any) -> None:
        self.calls: dict[str, int] = {}
        self._count("__init__")
        super().__init__(*args, **options | {"disable": True})

    def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        if (name, self.calls[name]) == self.fails:
            raise Failure(name)

    def update(self, n: float | None = 1) -> bool | None:
        self._count("update")
        return super().update(n)

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        self._count("set_postfix_str")

    def close(self) -> None:
        self._count("close")
        super().close()


@pytest.mark.parametrize("callback", ["__init__", "update", "set_postfix_str", "close"])
def test_an_exception_in_a_callback_of_the_progress_bar(llm: LLM, expected: list[Any], callback: str) -> None:
    failing = type("FailingBar", (Bar,), {"fails": (callback, 1)})
    with pytest.raises(Failure):
        tokens_of(llm, *batch_of(3), use_tqdm=failing)
    assert tokens_of(llm, *batch_of(3)) == expected[3]
    check_nothing_leaks(llm)

    def work(thread: int) -> None:
        if thread % 4 == 1:
            with pytest.raises(Failure):
                tokens_of(llm, *batch_of(thread), use_tqdm=failing)
        else:
            assert tokens_of(llm, *batch_of(thread)) == expected[thread]

    in_threads(work)
    assert tokens_of(llm, *batch_of(2)) == expected[2]
    check_nothing_leaks(llm)


def test_what_a_call_leaves_after_is_aborted(llm: LLM) -> None:
    def adds(request_id: str, num_tokens: int) -> tuple[str, Callable[[], Any]]:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return request_id, lambda: found.append(llm.llm_engine.add_request(request_id, "A", params)) or found[-1]

    def fail(_: Any) -> None:
        raise Failure

    found: list[Any] = []
    with pytest.raises(Failure):
        llm._calls.run([adds("left", 40), adds("short", 1)], fail)
    check_nothing_leaks(llm)
    assert [each.outputs[0].finish_reason for each in found] == ["abort", "length"]


def test_interrupts_of_threads_at_any_time(llm: LLM, expected: list[Any]) -> None:
    """As a signal's handler would raise them, between any two instructions."""
    dice = random.Random(0)
    for _ in range(max(1, examples(100) // 10)):
        interrupted = set[int]()
        threads: dict[int, threading.Thread] = {}

        def work(thread: int, interrupted: set[int] = interrupted) -> None:
            try:
                for _ in range(3):
                    assert tokens_of(llm, *batch_of(thread)) == expected[thread]
            except KeyboardInterrupt:
                interrupted.add(thread)

        threads = {i: threading.Thread(target=work, args=(i,)) for i in range(NUM_THREADS)}
        for thread in threads.values():
            thread.start()
        for i in dice.sample(range(NUM_THREADS), 3):
            threads[i].join(dice.random() / 20)
            if (ident := threads[i].ident) is not None:
                error = ctypes.py_object(KeyboardInterrupt)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), error)
        for thread in threads.values():
            thread.join(60)
            assert not thread.is_alive()
        assert tokens_of(llm, *batch_of(6)) == expected[6]
        check_nothing_leaks(llm)


def test_an_interrupt_at_any_line_of_a_call(llm: LLM, expected: list[Any]) -> None:
    rooms = ("llm.py", "core/shared_engine.py", "core/engine_loop.py")
    everything = Trap(rooms)
    with everything.set():
        tokens_of(llm, *batch_of(3))
    for line, hit in chosen_lines(everything.seen):
        with suppress(KeyboardInterrupt), Trap(rooms, line, hit).set():
            tokens_of(llm, *batch_of(3))
        assert tokens_of(llm, *batch_of(3)) == expected[3], f"after an interrupt at {line}"
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(tokens_of, llm, *batch_of(3)).result(60) == expected[3]
        check_nothing_leaks(llm)


def test_a_compressing_engine(checkpoint: Path) -> None:
    """A threshold names the same KV pairs whatever else runs, as long as nothing is preempted."""
    llm = make_llm(checkpoint, compression=THRESHOLD, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    lone = [tokens_of(llm, [prompt], params) for prompt in PROMPTS[:3]]
    assert llm.stats().windows_compressed > 0

    def work(thread: int) -> None:
        assert tokens_of(llm, [PROMPTS[thread]], params) == lone[thread]

    for _ in range(3):
        in_threads(work, 3)
    check_nothing_leaks(llm)


def test_a_call_within_a_call_of_the_same_thread(llm: LLM, expected: list[Any]) -> None:
    found: list[Any] = []

    def update(bar: Bar, n: float | None = 1) -> None:
        found.append(tokens_of(llm, *batch_of(1)))

    llm.generate("B", GREEDY, use_tqdm=type("CallingBar", (Bar,), {"update": update}))
    assert found == [expected[1]]
    check_nothing_leaks(llm)


def test_requests_that_were_added_by_hand_are_not_touched(llm: LLM) -> None:
    engine = llm.llm_engine
    output = engine.add_request("mine", [1, 2], GREEDY)
    for work in (lambda: llm.generate("A", use_tqdm=False), llm.reset_prefix_cache):
        with pytest.raises(RequestError, match="unfinished requests"):
            work()
    while engine.has_unfinished_requests():
        engine.step()
    assert output.outputs[0].finish_reason == "length"
