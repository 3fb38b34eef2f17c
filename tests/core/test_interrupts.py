"""An interrupt at every line of the core and the worker: the next call works, with the same tokens and nothing lost."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvllm
from kvllm import LLM, CompressionConfig, RequestOutput, SamplingParams
from kvllm.core.engine import LLMEngine
from kvllm.llm import DEFAULT_MODEL
from kvllm.models.config import load_model_config
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.examples import examples

PACKAGE = Path(kvllm.__file__).parent
ROOMS = (str(PACKAGE / "core"), str(PACKAGE / "worker"), str(PACKAGE / "llm.py"))
Line = tuple[str, int]

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


class Trap:
    """Raises KeyboardInterrupt once, when a line of ROOMS is about to run; without a line, it notes all that do."""

    def __init__(self, line: Line | None = None, hit: int = 1) -> None:
        self.line = line
        self.hits_left = hit
        self.seen: dict[Line, int] = {}

    @contextmanager
    def set(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        file = frame.f_code.co_filename
        relevant = file.startswith(ROOMS) if self.line is None else file == self.line[0]
        return self._step if relevant else None

    def _step(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if event != "line":
            return self._step
        line = (frame.f_code.co_filename, frame.f_lineno)
        if self.line is None:
            self.seen[line] = self.seen.get(line, 0) + 1
        elif line == self.line:
            self.hits_left -= 1
            if not self.hits_left:
                sys.settrace(None)
                raise KeyboardInterrupt(f"{line[0]}:{line[1]}")
        return self._step


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer with random weights, and the tokenizer of the package's model."""
    path = tmp_path_factory.mktemp("interrupts")
    vocab_size = load_model_config(DEFAULT_MODEL).vocab_size
    make_checkpoint(path, "qwen3", head_dim=16, vocab_size=vocab_size, num_hidden_layers=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEFAULT_MODEL / name, path)
    return path


def make_llm(checkpoint: Path, compression: CompressionConfig | None) -> LLM:
    return LLM(
        checkpoint,
        block_size=4,
        num_gpu_blocks_override=16,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        max_model_len=48,
        compression=compression,
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
    runner = engine.executor.runner  # type: ignore[attr-defined]
    assert len(runner.states) + runner.tables.num_free == len(runner.tables.table)


def results(outputs: dict[str, RequestOutput]) -> dict[str, list[Any]]:
    """All that does not depend on when an abort came."""
    served = {request_id: output for request_id, output in outputs.items() if request_id != "aborted"}
    assert all(output.finished and output.error is None for output in outputs.values())
    assert outputs["aborted"].outputs[0].finish_reason == "abort"
    return {request_id: output.outputs for request_id, output in served.items()}


def chosen_lines(seen: dict[Line, int]) -> list[tuple[Line, int]]:
    """Lines, each with the number of the hit to raise at: with --long all of them, else one of twelve."""
    lines = sorted((line, hit) for line, hits in seen.items() for hit in {1, max(1, hits // 2)})
    return lines[:: 1 if examples(100) == 100 else 12]


def test_an_interrupt_anywhere_changes_no_token_and_loses_nothing(checkpoint: Path) -> None:
    llm = make_llm(checkpoint, None)
    engine = llm.llm_engine
    expected = results(serve(engine, Trap((__file__, 0))))
    assert llm.stats().preemptions > 0
    everything = Trap()
    assert results(serve(engine, everything)) == expected
    assert len(everything.seen) > 300
    for line, hit in chosen_lines(everything.seen):
        trap = Trap(line, hit)
        outputs = serve(engine, trap)
        assert results(outputs) == expected, f"after an interrupt at {line}, hit {hit}"
        check_nothing_leaks(engine)


def test_an_interrupt_anywhere_in_a_compressing_engine_loses_nothing(checkpoint: Path) -> None:
    """What survives, and so the tokens, may differ: what is computed again is compressed at other steps."""
    llm = make_llm(checkpoint, THRESHOLD)
    engine = llm.llm_engine
    everything = Trap()
    lengths = {name: [len(each.token_ids) for each in of] for name, of in results(serve(engine, everything)).items()}
    assert llm.stats().windows_compressed > 0
    for line, hit in chosen_lines({line: hits for line, hits in everything.seen.items() if "compress" in line[0]}):
        outputs = results(serve(engine, Trap(line, hit)))
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
    everything = Trap()
    with everything.set():
        texts()
    for line, hit in chosen_lines({line: hits for line, hits in everything.seen.items() if "llm.py" in line[0]}):
        with pytest.raises(KeyboardInterrupt), Trap(line, hit).set():
            texts()
        assert texts() == expected, f"after an interrupt at {line}"
        check_nothing_leaks(llm.llm_engine)
