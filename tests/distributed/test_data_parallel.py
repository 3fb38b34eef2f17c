"""Several engines under one LLM: the outputs of one, shared prefixes together, engines that die, hang and fail.

All run in real Ray actors.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvllm import (
    LLM,
    AsyncLLM,
    CompletionOutput,
    CompressionConfig,
    ConfigError,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from kvllm.core.protocol import SequenceStart
from kvllm.engine_args import DEFAULT_MODEL
from kvllm.errors import WorkerError
from kvllm.models.config import load_model_config
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.deltas import collect
from tests.helpers.interrupts import Trap, chosen_lines
from tests.helpers.waiting import wait_until

ray = pytest.importorskip("ray", reason="needs ray: pip install ray")
from kvllm.distributed.replicas import replica_set  # noqa: E402
from kvllm.distributed.replicas.replica import Reporter  # noqa: E402

pytestmark = pytest.mark.xdist_group("ray")

OPTIONS = {"block_size": 16, "num_gpu_blocks_override": 100, "max_num_seqs": 16}
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # small ones would form words, and the tokenizer knows few


def text(rng: random.Random, length: int) -> str:
    return "".join(rng.choices(LETTERS, k=length))


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights and the tokenizer of the package's model."""
    path = tmp_path_factory.mktemp("characters")
    make_checkpoint(path, "qwen3", head_dim=16, vocab_size=load_model_config(DEFAULT_MODEL).vocab_size)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEFAULT_MODEL / name, path)
    return path


@pytest.fixture(scope="module")
def one(path: Path) -> LLM:
    return LLM(path, **OPTIONS)


def test_an_engine_goes_on_from_known_output(path: Path) -> None:
    """It fits only compressed, and so it comes in."""
    compression = CompressionConfig(
        method="snapkv", policy="threshold", threshold_tokens=64, budget_tokens=32, buffer=8, query_window=8
    )
    options = {"block_size": 8, "num_gpu_blocks_override": 9, "compression": compression}
    llm = LLM(path, **options)
    (expected,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, greedy(300), use_tqdm=False)
    output = expected.outputs[0].token_ids
    engine = LLM(path, **options).llm_engine
    reporter = Reporter(engine, path)
    reporter.start([SequenceStart(40, [5, 6, 7, *output[:250]], 3, 0, greedy(300), seed=0)])
    steps, busy = [], True
    while busy:
        report = reporter.report(1.0)
        steps += report.steps
        busy = report.busy
    assert [(seq_id, token.token_id) for step in steps for seq_id, token in step.tokens] == [
        (40, t) for t in output[250:]
    ]
    assert [ended.seq_id for step in steps for ended in step.ended] == [40] and report.stats.preemptions == 0


@pytest.mark.long
def test_two_engines_of_two_ranks(ray_cluster: None, path: Path, one: LLM) -> None:
    """A rank is replaced within its engine. An engine is replaced, but not more often than allowed. Nothing stays.

    It comes first: the cluster has no room for more engines beside these.
    """
    gc.collect()
    wait_until(all_cpus_are_free, "the CPUs' return from earlier tests")
    llm = LLM(path, data_parallel_size=2, tensor_parallel_size=2, max_worker_restarts=1, **OPTIONS)
    engine = llm.llm_engine
    engines = [psutil.Process(pid) for pid in engine.replicas.pids]
    prompts = ["a", "b", "c", "d"]
    expected = [output.outputs for output in one.generate(prompts, greedy(300), use_tqdm=False)]
    outputs = [engine.add_request(prompt, prompt, greedy(300)) for prompt in prompts]
    while llm.stats().output_tokens == 0:
        engine.step()
    _ranks()[0].kill()
    while engine.has_unfinished_requests():
        engine.step()
    assert [output.outputs for output in outputs] == expected
    assert all(process.is_running() for process in engines) and not engine.replicas.restart_seconds
    assert len(_ranks()) == 4
    for process in engines:
        process.kill()
    with pytest.raises(WorkerError, match="the workers failed again after 1 restarts"):
        llm.generate(prompts, greedy(100), use_tqdm=False)
    with pytest.raises(WorkerError, match="again after 1 restarts"):
        llm.generate(prompts, greedy(4), use_tqdm=False)
    wait_until(lambda: not _ranks(), "the ranks' end")
    wait_until(all_cpus_are_free, "the CPUs' return")
    assert all(group["state"] == "REMOVED" for group in ray.util.placement_group_table().values())


def all_cpus_are_free() -> bool:
    return ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"]


def _ranks() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if "Rank" in name_of(process)]


def name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:  # it has just ended
        return ""


@pytest.fixture(scope="module")
def two(ray_cluster: None, path: Path) -> Iterator[LLM]:
    llm = LLM(path, data_parallel_size=2, **OPTIONS)
    yield llm
    llm.llm_engine.close()


@pytest.fixture
def tokens_of(two: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each engine reports."""
    counts = [0, 0]
    receive = two.llm_engine.replicas.receive

    def listen() -> list[tuple[int, Any]]:
        reports = receive()
        for engine, report in reports:
            counts[engine] += sum(len(step.tokens) for step in report.steps) if report else 0
        return reports

    monkeypatch.setattr(two.llm_engine.replicas, "receive", listen)
    return counts


def test_outputs_are_those_of_one_engine(path: Path, two: LLM, tokens_of: list[int]) -> None:
    """Greedy and sampled, with seeds and without, forks, stop strings, log probabilities; in the order of the prompts.
    The pools are too small for all, and some sequences are preempted."""
    rng = random.Random(0)
    kinds = [
        {"temperature": 0},
        {"n": 3},
        {"stop": ["1", "cd"], "max_tokens": 200},
        {"seed": 7, "top_p": 0.9, "logprobs": 2},
        {"min_tokens": 20, "presence_penalty": 1, "stop": ["e"], "include_stop_str_in_output": True},
    ]
    prompts = [text(rng, rng.randrange(1, 150)) for _ in range(60)]
    params = [SamplingParams(**{"max_tokens": 100, "ignore_eos": i % 3 == 0, **kinds[i % 5]}) for i in range(60)]
    one = LLM(path, **OPTIONS)  # which has given no seeds yet, like the other
    expected, found = (llm.generate(prompts, params, use_tqdm=False) for llm in (one, two))
    for a, b in zip(expected, found, strict=True):
        assert (a.prompt, a.prompt_token_ids, a.outputs, b.finished) == (b.prompt, b.prompt_token_ids, b.outputs, True)
        assert b.metrics.arrival_time < b.metrics.first_token_time <= b.metrics.finished_time
    assert {completion.finish_reason for output in found for completion in output.outputs} == {"stop", "length"}
    total = sum(len(completion.token_ids) for output in found for completion in output.outputs)
    assert sum(tokens_of) == total and min(tokens_of) > total / 4
    stats = two.stats()
    assert stats.output_tokens == total and stats.num_blocks == 200
    assert stats.steps == len(stats.timeline) and stats.decode_seconds > 0
    assert stats.peak_blocks == max(blocks for _, blocks in stats.timeline) <= 200
    assert max(running for running, _ in stats.timeline) > 16  # more than one engine runs
    assert stats.preemptions == sum(output.metrics.preemptions for output in found) > 0


def test_requests_go_where_their_prefix_is(two: LLM, tokens_of: list[int]) -> None:
    rng = random.Random(1)
    prefixes = [text(rng, 100) for _ in range(6)]
    two.generate(prefixes, greedy(4), use_tqdm=False)
    assert min(tokens_of) == 12
    outputs = two.generate([p + text(rng, 20) for p in prefixes for _ in range(3)], greedy(4), use_tqdm=False)
    assert [output.metrics.num_cached_tokens for output in outputs] == [96] * 18
    assert tokens_of == [12 + 36] * 2


def test_a_bad_request_is_refused_before_the_others_start(two: LLM, one: LLM) -> None:
    steps = two.stats().steps
    with pytest.raises(RequestError, match="the prompt is empty"):
        two.generate({"prompt_token_ids": []}, greedy(4), use_tqdm=False)
    with pytest.raises(RequestError, match="allows 511 and one generated token"):
        two.generate("A" * 512, greedy(4), use_tqdm=False)
    assert two.stats().steps == steps
    outputs = two.generate(["a", {"prompt_token_ids": [10**6]}, "b"], greedy(4), use_tqdm=False)
    assert "not in the vocabulary" in str(outputs[1].error) and outputs[1].finished
    expected = one.generate(["a", "b"], greedy(4), use_tqdm=False)
    assert [outputs[0].outputs, outputs[2].outputs] == [output.outputs for output in expected]


def test_an_interrupt_ends_what_runs(one: LLM, two: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ray, "wait", lambda *args, **options: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            two.generate(["a"] * 8, greedy(2000), use_tqdm=False)
    assert not two.llm_engine.has_unfinished_requests()
    expected = [o.outputs for o in one.generate(["b"] * 8, greedy(20), use_tqdm=False)]
    assert [o.outputs for o in two.generate(["b"] * 8, greedy(20), use_tqdm=False)] == expected
    before = two.stats().output_tokens  # with those that the engines computed until they heard of the interrupt
    assert [o.outputs for o in two.generate(["b"] * 8, greedy(20), use_tqdm=False)] == expected
    assert two.stats().output_tokens - before == 8 * 20  # the engines have ended the others, too


@pytest.mark.long
def test_an_interrupt_loses_no_request(one: LLM, two: LLM) -> None:
    """Requests that the replicas have begun are dropped there, and handed out again."""
    params = SamplingParams(n=2, seed=1, max_tokens=20, ignore_eos=True)
    prompts = {"a": "GOOD", "b": "HAND", "c": "EDGE"}
    expected = [output.outputs for output in one.generate(list(prompts.values()), params, use_tqdm=False)]
    engine = two.llm_engine
    parts = ("distributed/replicas", "core/transition.py", "core/output_processor.py")

    def serve(trap: Trap) -> list[list[CompletionOutput]]:
        outputs = [engine.add_request(name, prompt, params) for name, prompt in prompts.items()]
        with trap.set():
            while not all(output.finished for output in outputs):
                with suppress(KeyboardInterrupt):
                    engine.step()
        return [output.outputs for output in outputs]

    everything = Trap(parts)
    assert serve(everything) == expected
    for line, hit in chosen_lines(everything.seen):
        assert serve(Trap(parts, line, hit)) == expected, f"after an interrupt at {line}"


def test_a_request_that_a_replica_refuses_ends_alone(one: LLM, two: LLM) -> None:
    (expected,) = one.generate(["GOOD"], greedy(20), use_tqdm=False)
    engine = two.llm_engine
    good, bad = engine.add_request("good", "GOOD", greedy(20)), engine.add_request("bad", "BAD", greedy(20))
    engine.outputs.requests["bad"].sequences[0].token_ids[0] = 10**6  # behind the door, which checks this
    while engine.has_unfinished_requests():
        engine.step()
    assert good.outputs == expected.outputs and good.error is None
    assert bad.finished and "1000000 is not in the vocabulary" in str(bad.error)
    assert two.generate(["GOOD"], greedy(20), use_tqdm=False)[0].outputs == expected.outputs


def test_requests_survive_engines_that_die_and_hang(one: LLM, two: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go on from the tokens that are known: none is counted twice."""
    monkeypatch.setattr(replica_set, "SILENCE_SECONDS", 5.0)
    rng = random.Random(2)
    prompts = [text(rng, rng.randrange(1, 60)) for _ in range(32)]
    params = [SamplingParams(n=1 + i % 2, seed=i, max_tokens=150 + i, ignore_eos=True, stop=["zz"]) for i in range(32)]
    expected = one.generate(prompts, params, use_tqdm=False)
    engine, before = two.llm_engine, two.stats().output_tokens
    outputs = [engine.add_request(str(i), p, params[i]) for i, p in enumerate(prompts)]
    total = sum(len(completion.token_ids) for output in expected for completion in output.outputs)
    faults = [(0.2, signal.SIGKILL, 1), (0.5, signal.SIGSTOP, 0)]
    lost = []
    while engine.has_unfinished_requests():
        engine.step()
        if faults and two.stats().output_tokens - before > faults[0][0] * total:
            _, number, index = faults.pop(0)
            lost.append(engine.replicas.pids[index])
            threading.Timer(rng.random() / 100, os.kill, (lost[-1], number)).start()
    assert not faults and [output.outputs for output in outputs] == [output.outputs for output in expected]
    assert two.stats().output_tokens - before == total
    wait_until(lambda: not any(map(psutil.pid_exists, lost)), "the end of the lost engines")
    again = two.generate(prompts[:8], greedy(10), use_tqdm=False)
    assert [o.outputs for o in again] == [o.outputs for o in one.generate(prompts[:8], greedy(10), use_tqdm=False)]


def test_requests_of_event_loops(one: LLM, two: LLM) -> None:
    """Deltas, prompt logprobs, salts, aborts and statistics, with tokens that come from other processes."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, prompt_logprobs=1, logprobs=1)
    prompts = [text(random.Random(i), 50) for i in range(6)]
    expected = one.generate(prompts, params, use_tqdm=False)
    llm = AsyncLLM(two.llm_engine, two.model_config)

    async def run() -> list[RequestOutput]:
        aborted = llm.generate(prompts[0], greedy(400), "aborted")
        await anext(aborted)
        await aborted.aclose()
        found = await asyncio.gather(
            *(collect(llm.generate(prompt, params, str(i))) for i, prompt in enumerate(prompts))
        )
        hits = []
        for i, salt in enumerate(("a", "a", "b")):
            output = await collect(llm.generate(prompts[0], greedy(2), f"salted {i}", cache_salt=salt))
            assert output.metrics.scheduled_time is not None
            hits.append(output.metrics.num_cached_tokens)
        assert hits == [0, 48, 0]
        return found

    try:
        found = asyncio.run(run())
        wait_until(lambda: not llm.stats().num_running, "the engines' rest")
    finally:
        llm._loop.stop()  # the engines go on to serve other tests
    for output, wanted in zip(found, expected, strict=True):
        assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert output.outputs[0].text == wanted.outputs[0].text
        assert len(output.outputs[0].logprobs) == 40
        assert [entry and list(entry) for entry in output.prompt_logprobs] == [
            entry and list(entry) for entry in wanted.prompt_logprobs
        ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size=0 is not allowed: at least 1"),
        ({"data_parallel_size": 2, "distributed_executor_backend": "inline"}, 'one rank.*=2.*: use "ray" or None'),
        (
            {"data_parallel_size": 3, "tensor_parallel_size": 2},
            "data_parallel_size=3 with tensor_parallel_size=2 needs",
        ),
    ],
    ids=str,
)
def test_wrong_options(ray_cluster: None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**options)
