"""An interrupt at every line of the core and the worker: the next call works, with the same tokens and nothing lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvllm import LLM, CompletionOutput, CompressionConfig, RequestOutput, SamplingParams
from kvllm.core.engine import LLMEngine
from kvllm.outputs import Logprob
from tests.helpers.checkpoints import make_with_package_tokenizer
from tests.helpers.interrupts import Trap, chosen_lines

ROOMS = ("core", "worker", "llm.py")

SEEDED: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True}
REQUESTS = {
    "branches": ("ABCDEFG", SamplingParams(n=3, seed=1, max_tokens=7, logprobs=2, **SEEDED)),
    "long": ("AAAABBBBCCCCD", SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)),
    "penalized": ("XYZ", SamplingParams(seed=2, max_tokens=9, min_tokens=3, presence_penalty=1.0, top_p=0.9)),
    "stopped": ("AAAABBBBCC", SamplingParams(seed=3, max_tokens=9, stop=["1", "A"], top_k=20, **SEEDED)),
    "aborted": ("EEE", SamplingParams(seed=4, max_tokens=30, **SEEDED)),
}
ABORTED_AT = 4
THRESHOLD = CompressionConfig(
    method="snapkv", policy="threshold", threshold_tokens=16, budget_tokens=8, buffer=2, query_window=4
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer with random weights, and the tokenizer of the package's model."""
    path = tmp_path_factory.mktemp("interrupts")
    make_with_package_tokenizer(path)
    return path


def make_llm(checkpoint: Path, compression: CompressionConfig | None, *, async_scheduling: bool = False) -> LLM:
    return LLM(
        checkpoint,
        block_size=4,
        num_gpu_blocks_override=16,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        max_model_len=48,
        compression=compression,
        async_scheduling=async_scheduling,
    )


def serve(engine: LLMEngine, trap: Trap) -> dict[str, RequestOutput]:
    """All requests to their end, as a caller would serve them who goes on after an interrupt."""
    outputs = {}
    with trap.set():
        for request_id, (prompt, params) in REQUESTS.items():
            try:
                outputs[request_id] = engine.add_request(request_id, prompt, params)
            except KeyboardInterrupt:
                engine.abort(request_id)  # it may have been added
                outputs[request_id] = engine.add_request(request_id, prompt, params)
        steps, unfinished = 0, True
        while unfinished:
            steps += 1
            try:
                if steps >= ABORTED_AT:
                    engine.abort("aborted")
                engine.step()
                unfinished = engine.has_unfinished_requests()
            except KeyboardInterrupt:
                continue
    return outputs


def check_nothing_leaks(engine: LLMEngine) -> None:
    engine.scheduler.check()
    assert engine.scheduler.blocks.num_owned == 0 and not engine.scheduler.has_unfinished
    for finish in engine.executor._in_flight:  # type: ignore[attr-defined]  # a step after the last token
        finish()
    runner = engine.executor.runner  # type: ignore[attr-defined]
    assert len(runner.states) + len(runner.free_slots) == len(runner.tables.logical)


def results(outputs: dict[str, RequestOutput]) -> dict[str, list[Any]]:
    """All that depends neither on when an abort came nor on the batch: log probabilities may differ in their last bit
    (oneDNN before torch 2.13), so only their tokens are compared."""
    served = {request_id: output for request_id, output in outputs.items() if request_id != "aborted"}
    assert all(output.finished and output.error is None for output in outputs.values())
    assert outputs["aborted"].outputs[0].finish_reason == "abort"
    return {request_id: [without_bits(each) for each in output.outputs] for request_id, output in served.items()}


def without_bits(completion: CompletionOutput) -> CompletionOutput:
    logprobs = completion.logprobs and [dict.fromkeys(each, Logprob(0.0)) for each in completion.logprobs]
    return replace(completion, logprobs=logprobs, cumulative_logprob=None)


def test_an_interrupt_anywhere_changes_no_token_and_loses_nothing(checkpoint: Path) -> None:
    llm = make_llm(checkpoint, None)
    engine = llm.llm_engine
    expected = results(serve(engine, Trap(ROOMS, (__file__, 0))))
    assert llm.stats().preemptions > 0
    everything = Trap(ROOMS)
    assert results(serve(engine, everything)) == expected
    assert len(everything.seen) > 300
    for line, hit in chosen_lines(everything.seen):
        trap = Trap(ROOMS, line, hit)
        outputs = serve(engine, trap)
        assert results(outputs) == expected, f"after an interrupt at {line}, hit {hit}"
        check_nothing_leaks(engine)


def test_an_interrupt_beside_a_step_in_flight_changes_no_token_and_loses_nothing(checkpoint: Path) -> None:
    """While a step is planned, launched or collected, another one is in flight."""
    engine = make_llm(checkpoint, None, async_scheduling=True).llm_engine
    everything = Trap(ROOMS)
    expected = results(serve(engine, everything))
    files = ("engine.py", "executor.py", "inline.py", "scheduler.py")
    lines = {line: hits for line, hits in everything.seen.items() if Path(line[0]).name in files}
    for line, hit in chosen_lines(lines):
        assert results(serve(engine, Trap(ROOMS, line, hit))) == expected, f"after an interrupt at {line}, hit {hit}"
        check_nothing_leaks(engine)


def test_an_interrupt_anywhere_in_a_compressing_engine_loses_nothing(checkpoint: Path) -> None:
    """The survivors, and so the tokens, may differ: a sequence that is computed again is compressed at other steps."""
    llm = make_llm(checkpoint, THRESHOLD)
    engine = llm.llm_engine
    everything = Trap(ROOMS)
    lengths = {name: [len(each.token_ids) for each in of] for name, of in results(serve(engine, everything)).items()}
    assert llm.stats().windows_compressed > 0
    for line, hit in chosen_lines({line: hits for line, hits in everything.seen.items() if "compress" in line[0]}):
        outputs = results(serve(engine, Trap(ROOMS, line, hit)))
        for name in ("branches", "long"):
            assert [len(each.token_ids) for each in outputs[name]] == lengths[name], f"after an interrupt at {line}"
        check_nothing_leaks(engine)


def test_generate_works_after_an_interrupt_anywhere(checkpoint: Path) -> None:
    llm = make_llm(checkpoint, None)
    prompts, params = (list(each) for each in zip(*REQUESTS.values(), strict=True))

    def texts() -> list[list[str]]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [[completion.text for completion in output.outputs] for output in outputs]

    expected = texts()
    everything = Trap(ROOMS)
    with everything.set():
        texts()
    for line, hit in chosen_lines({line: hits for line, hits in everything.seen.items() if "llm.py" in line[0]}):
        with pytest.raises(KeyboardInterrupt), Trap(ROOMS, line, hit).set():
            texts()
        assert texts() == expected, f"after an interrupt at {line}"
        check_nothing_leaks(llm.llm_engine)
