"""Engine variants that a benchmark runs side by side, and what is measured of a run.

As a program it runs one variant in a process of its own: a job as JSON on stdin, a measurement as JSON on stdout.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from statistics import mean
from typing import Any, Literal, get_args

import msgspec
from msgspec import Struct

from benchmarks import report
from benchmarks.workloads import Request
from kvllm import LLM, CompressionConfig, RequestOutput, SamplingParams
from kvllm.attention.registry import BACKENDS
from kvllm.config import METHODS
from kvllm.errors import ConfigError, KvLLMError
from kvllm.llm import DTYPES

VANILLA = "vanilla"
ENGINE_OPTIONS = {
    "block_size": int,
    "dtype": Literal["auto", *DTYPES],
    "attention_backend": Literal["auto", *BACKENDS],
    "enable_prefix_caching": bool,
    "max_num_seqs": int,
    "max_num_batched_tokens": int,
}
WARM_UP_TOKENS = 8


class Variant(Struct, frozen=True):
    """One way to run the engine. `engine` holds keywords of `LLM`, and of those only what differs from the others'."""

    name: str
    compression: CompressionConfig | None = None
    engine: dict[str, Any] = {}


def parse_variant(text: str) -> Variant:
    """Read `vanilla`, a compression method, or either with settings: `kara:period=32,window_blocks=3,block_size=16`.

    Raises ConfigError for unknown methods and settings, and for values that CompressionConfig refuses.
    """
    method, _, settings = text.partition(":")
    if method not in (VANILLA, *METHODS):
        allowed = ", ".join((VANILLA, *METHODS))
        raise ConfigError(f"variant {text!r}: {method!r} is no variant: choose one of {allowed}")
    fields = {} if method == VANILLA else {f.name: f.type for f in msgspec.structs.fields(CompressionConfig)}
    fields.pop("method", None)
    compression: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    for setting in filter(None, settings.split(",")):
        name, equals, value = setting.partition("=")
        if not equals or name not in (*fields, *ENGINE_OPTIONS):
            allowed = ", ".join((*fields, *ENGINE_OPTIONS))
            raise ConfigError(f"variant {text!r}: {setting!r} is no setting: write name=value with one of {allowed}")
        target, type_ = (compression, fields[name]) if name in fields else (engine, ENGINE_OPTIONS[name])
        try:
            target[name] = msgspec.convert(value, type_, strict=False)
        except msgspec.ValidationError as error:
            choices = f": choose one of {', '.join(get_args(type_))}" if get_args(type_) else ""
            raise ConfigError(f"variant {text!r}: {setting!r}: {error}{choices}") from None
    if method == VANILLA:
        return Variant(text, None, engine)
    return Variant(text, CompressionConfig(method=method, **compression), engine)


class Measurement(Struct, kw_only=True):
    """One run. Counts and seconds are the run's own, without the warm-up; concurrency is sequences in a step.

    output_tokens_per_s: of the whole run. step_tokens_per_s: the mean over its steps of tokens sampled / time; a long
        run's last steps, with few sequences, weigh as much as others.
    mean_latency, p99_latency: seconds from a request's arrival (here: of all at once) to its last token; the 99th
        percentile is the least that 99% of the requests do not exceed.
    other_load: cores that other processes kept busy meanwhile, on average; times are comparable where it is near 0.
    timeline: for each step (running sequences, blocks in use).
    """

    device: str
    seconds: float
    requests: int
    output_tokens: int
    output_tokens_per_s: float
    step_tokens_per_s: float
    requests_per_s: float
    mean_latency: float
    p99_latency: float
    other_load: float
    steps: int
    mean_concurrency: float
    peak_concurrency: int
    preemptions: int
    tokens_recomputed: int
    compression_events: int
    windows_compressed: int
    entries_evicted: int
    blocks_released: int
    decode_seconds: float
    prefill_seconds: float
    recompute_seconds: float
    score_seconds: float
    compact_seconds: float
    longest_stall_seconds: float
    num_blocks: int
    block_bytes: int
    method_state_bytes: int
    peak_event_bytes: int
    mean_blocks: float
    peak_blocks: int
    peak_kv_bytes: int
    peak_memory_bytes: int
    timeline: list[tuple[int, int]]


COUNTERS = (
    "preemptions",
    "tokens_recomputed",
    "compression_events",
    "windows_compressed",
    "entries_evicted",
    "blocks_released",
    "decode_seconds",
    "prefill_seconds",
    "recompute_seconds",
    "score_seconds",
    "compact_seconds",
)
"""Fields of EngineStats that count up: a run's own are differences."""


def measure(
    llm: LLM, prompts: Sequence[Any], sampling_params: SamplingParams | Sequence[SamplingParams], use_tqdm: bool = False
) -> tuple[list[RequestOutput], Measurement]:
    """Time `llm.generate`.

    Raises the error of the first request that could not be served.
    """
    stats = llm.stats()
    before = {name: stats[name] for name in COUNTERS}
    stats.longest_stall_seconds = 0.0  # in a warm-up, kernels may be compiled
    steps_before = stats.steps
    with _step_rates(llm) as rates:
        others_before, begin = report.cpu_seconds_of_others(), time.perf_counter()
        outputs = llm.generate(prompts, sampling_params, use_tqdm)
        seconds = time.perf_counter() - begin
        others = report.cpu_seconds_of_others() - others_before
    for output in outputs:
        if output.error is not None:
            raise output.error
    timeline = stats.timeline_since(steps_before)
    output_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    latencies = sorted(_latency(output) for output in outputs)
    peak_blocks = max(blocks for _, blocks in timeline)
    return outputs, Measurement(
        device=llm.llm_engine.executor.runner.cache.data.device.type,
        seconds=seconds,
        requests=len(outputs),
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / seconds,
        step_tokens_per_s=mean(rates),
        requests_per_s=len(outputs) / seconds,
        mean_latency=mean(latencies),
        p99_latency=latencies[ceil(0.99 * len(latencies)) - 1],
        other_load=max(0.0, others / seconds),
        steps=len(timeline),
        mean_concurrency=sum(running for running, _ in timeline) / len(timeline),
        peak_concurrency=max(running for running, _ in timeline),
        **{name: stats[name] - before[name] for name in COUNTERS},
        longest_stall_seconds=stats.longest_stall_seconds,
        num_blocks=stats.num_blocks,
        block_bytes=llm.cache_shape.bytes_per_block,
        method_state_bytes=stats.method_state_bytes,
        peak_event_bytes=stats.peak_event_bytes,
        mean_blocks=sum(blocks for _, blocks in timeline) / len(timeline),
        peak_blocks=peak_blocks,
        peak_kv_bytes=peak_blocks * llm.cache_shape.bytes_per_block,
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        timeline=timeline,
    )


def _latency(output: RequestOutput) -> float:
    assert output.metrics.finished_time is not None
    return output.metrics.finished_time - output.metrics.arrival_time


@contextmanager
def _step_rates(llm: LLM) -> Iterator[list[float]]:
    """Time every step that `generate` makes, from outside: tokens sampled per second of each."""
    engine, stats, rates = llm.llm_engine, llm.stats(), []
    step = engine.step

    def timed() -> list[RequestOutput]:
        steps, tokens, begin = stats.steps, stats.output_tokens, time.perf_counter()
        outputs = step()
        if stats.steps > steps:  # a step that only preempts is no forward pass
            rates.append((stats.output_tokens - tokens) / (time.perf_counter() - begin))
        return outputs

    engine.step = timed
    try:
        yield rates
    finally:
        del engine.step


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


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    try:
        measurement = run(job)
    except KvLLMError as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(msgspec.json.encode(measurement))


if __name__ == "__main__":
    main()
