"""`LLM.generate` on one batch again and again, in a process of its own that runs when it is told to.

Each line on stdin is one round, and each round is one line of JSON on stdout.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import msgspec
from msgspec import Struct

from benchmarks.common.child import ROOT
from kvllm import LLM, SamplingParams


class Batch(Struct):
    """What to generate. options: of the LLM."""

    model: str
    options: dict[str, Any]
    prompts: list[list[int]]
    output_tokens: int


class Round(Struct, kw_only=True):
    """One round. seconds: of the whole batch. step_seconds, model_seconds: of all steps, and of the model in these."""

    seconds: float
    steps: int
    step_seconds: float
    model_seconds: float
    token_ids: list[list[int]]


class GenerateProcess:
    """The other end: a process with an LLM, which is idle between two rounds."""

    def __init__(self, batch: Batch) -> None:
        command = [sys.executable, "-m", "benchmarks.common.run_generate_rounds"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        self._send(msgspec.json.encode(batch))

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self) -> Round:
        """One round. The first one waits until the model is loaded."""
        self._send(b"")
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of LLM.generate has ended with code {self._process.wait()}")
        return msgspec.json.decode(line, type=Round)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()


def serve_rounds() -> None:
    """The process: a Batch comes first, then a line for each round."""
    batch = msgspec.json.decode(sys.stdin.buffer.readline(), type=Batch)
    llm = LLM(batch.model, **batch.options)
    for _ in sys.stdin.buffer:
        sys.stdout.buffer.write(msgspec.json.encode(_run(llm, batch)) + b"\n")
        sys.stdout.buffer.flush()


def _run(llm: LLM, batch: Batch) -> Round:
    params = SamplingParams(temperature=0, max_tokens=batch.output_tokens, ignore_eos=True)
    stats = llm.stats()
    steps, step_seconds, model_seconds = stats.steps, stats.step_seconds, stats.decode_seconds + stats.prefill_seconds
    begin = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in batch.prompts], params, use_tqdm=False)
    return Round(
        seconds=time.perf_counter() - begin,
        steps=stats.steps - steps,
        step_seconds=stats.step_seconds - step_seconds,
        model_seconds=stats.decode_seconds + stats.prefill_seconds - model_seconds,
        token_ids=[output.outputs[0].token_ids for output in outputs],
    )
