"""Runs of engine variants, each in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from benchmarks.common.child import run_child
from benchmarks.common.measurement import Measurement, measure
from benchmarks.common.workloads import Request
from kvllm import LLM, CompressionConfig, RequestOutput, SamplingParams

WARM_UP_TOKENS = 8


class Job(Struct, kw_only=True):
    """A variant, and all that it shares with the others. `engine` holds keywords of `LLM`."""

    name: str
    model: str
    engine: dict[str, Any]
    compression: CompressionConfig | None
    requests: list[Request]


def make_engine(job: Job) -> LLM:
    return LLM(job.model, compression=job.compression, **job.engine)


def run(job: Job) -> Measurement:
    """Load the model, warm up on prompts of the same lengths with other tokens, and measure."""
    llm = make_engine(job)
    _warm_up(llm, job.requests[: llm.config.max_num_seqs])
    return serve(llm, job.requests)[1]


def serve(llm: LLM, requests: Sequence[Request]) -> tuple[list[RequestOutput], Measurement]:
    """Generate greedily, as many tokens as each request allows, and measure."""
    prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
    params = [SamplingParams(temperature=0, max_tokens=r.output_length, ignore_eos=True) for r in requests]
    outputs, measurement = measure(llm, prompts, params)
    generated = [len(output.outputs[0].token_ids) for output in outputs]
    if generated != [request.output_length for request in requests]:
        raise RuntimeError(f"requests did not generate the tokens they were asked for: {generated}")
    return outputs, measurement


def _warm_up(llm: LLM, requests: list[Request]) -> None:
    """Prompts of one repeated token share no prefix with random or written ones, so the prefix cache stays unused."""
    vocab_size = llm.model_config.vocab_size
    prompts = [{"prompt_token_ids": [i % vocab_size] * len(r.prompt_token_ids)} for i, r in enumerate(requests)]
    params = [
        SamplingParams(temperature=0, max_tokens=min(WARM_UP_TOKENS, r.output_length), ignore_eos=True)
        for r in requests
    ]
    llm.generate(prompts, params, use_tqdm=False)


def run_all(jobs: dict[str, Job], repeats: int) -> dict[str, list[Measurement]]:
    """Run each variant `repeats` times. They take turns, so that a slow minute of the machine meets all of them."""
    runs: dict[str, list[Measurement]] = {name: [] for name in jobs}
    for repeat in range(1, repeats + 1):
        for name, job in jobs.items():
            result = run_process(job)
            runs[name].append(result)
            print(
                f"run {repeat} of {repeats}, {name}: {result.output_tokens_per_s:.1f} output tokens/s, "
                f"{result.seconds:.1f} s",
                flush=True,
            )
    return runs


def run_process(job: Job) -> Measurement:
    """Run a job in a new process of this interpreter. Raises KvLLMError if it fails."""
    return run_child(run, job, f"variant {job.name}")
