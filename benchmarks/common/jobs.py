"""Runs of engine variants, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from benchmarks.common.measurement import Measurement, measure
from benchmarks.common.workloads import Request
from kvllm import LLM, CompressionConfig, RequestOutput, SamplingParams
from kvllm.errors import KvLLMError

ROOT = Path(__file__).parents[2]
WARM_UP_TOKENS = 8


class Job(Struct, kw_only=True):
    """A variant with everything that it shares with the others. `engine` holds keywords of `LLM`."""

    model: str
    engine: dict[str, Any]
    compression: CompressionConfig | None
    requests: list[Request]


def make_engine(job: Job) -> LLM:
    return LLM(job.model, compression=job.compression, **job.engine)


def run(job: Job) -> Measurement:
    """Load the model, warm up on prompts of the same lengths but other tokens, measure."""
    llm = make_engine(job)
    _warm_up(llm, job.requests[: llm.config.max_num_seqs])
    return serve(llm, job.requests)[1]


def serve(llm: LLM, requests: Sequence[Request]) -> tuple[list[RequestOutput], Measurement]:
    """Generate, greedily, as many tokens as each request asks for, and measure."""
    prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
    params = [SamplingParams(temperature=0, max_tokens=r.output_length, ignore_eos=True) for r in requests]
    outputs, measurement = measure(llm, prompts, params)
    generated = [len(output.outputs[0].token_ids) for output in outputs]
    if generated != [request.output_length for request in requests]:
        raise RuntimeError(f"requests did not generate the tokens they were asked for: {generated}")
    return outputs, measurement


def _warm_up(llm: LLM, requests: list[Request]) -> None:
    """Prompts of one repeated token share no beginning with random or written ones: they leave no prefix to hit."""
    vocab_size = llm.model_config.vocab_size
    prompts = [{"prompt_token_ids": [i % vocab_size] * len(r.prompt_token_ids)} for i, r in enumerate(requests)]
    params = [
        SamplingParams(temperature=0, max_tokens=min(WARM_UP_TOKENS, r.output_length), ignore_eos=True)
        for r in requests
    ]
    llm.generate(prompts, params, use_tqdm=False)


def run_all(jobs: dict[str, Job], repeats: int) -> dict[str, list[Measurement]]:
    """Run each variant `repeats` times, taking turns, so that a slow minute of the machine meets all of them."""
    runs: dict[str, list[Measurement]] = {name: [] for name in jobs}
    for repeat in range(1, repeats + 1):
        for name, job in jobs.items():
            result = run_process(name, job)
            runs[name].append(result)
            print(
                f"run {repeat} of {repeats}, {name}: {result.output_tokens_per_s:.1f} output tokens/s, "
                f"{result.seconds:.1f} s",
                flush=True,
            )
    return runs


def run_process(name: str, job: Job) -> Measurement:
    """Run a job in a new process of this interpreter."""
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.common.run_job"],
        input=msgspec.json.encode(job),
        capture_output=True,
        cwd=ROOT,
    )
    if process.returncode != 0:
        raise KvLLMError(f"variant {name} failed:\n{process.stderr.decode(errors='replace').strip()}")
    return msgspec.json.decode(process.stdout, type=Measurement)
