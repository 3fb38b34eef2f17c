"""The measurement of one run of the engine."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from statistics import mean
from typing import Any

from msgspec import Struct

from benchmarks.common import machine
from kvllm import LLM, RequestOutput, SamplingParams
from kvllm.durations import Durations


class Counts(Struct, kw_only=True):
    """Fields of EngineStats that count up: the figures of one run are differences."""

    preemptions: int
    tokens_recomputed: int
    swapped_out: int
    blocks_loaded: int
    compression_events: int
    windows_compressed: int
    entries_evicted: int
    blocks_released: int
    decode_seconds: float
    prefill_seconds: float
    recompute_seconds: float
    score_seconds: float
    compact_seconds: float


class Measurement(Counts, kw_only=True):
    """One run. Counts and seconds leave the warm-up out. Concurrency is the number of sequences in a step.

    output_tokens_per_s: output tokens over the time of the run. step_tokens_per_s: the mean over all steps of the
        tokens sampled / the step's time. The second weighs a long run's last steps, with few sequences, as much as
        full ones.
    mean_latency, p99_latency: seconds from a request's arrival (here all arrive at once) to its last token. The 99th
        percentile is the least latency that 99% of the requests do not exceed.
    other_load: cores that other processes kept busy meanwhile, on average. Times are comparable where it is near 0.
    timeline: (running sequences, blocks in use) of each step.
    """

    seconds: float
    output_tokens: int
    output_tokens_per_s: float
    step_tokens_per_s: float
    mean_latency: float
    p99_latency: float
    other_load: float
    steps: int
    mean_concurrency: float
    peak_concurrency: int
    p99_stall_seconds: float
    longest_stall_seconds: float
    num_blocks: int
    peak_blocks: int
    peak_kv_bytes: int
    peak_memory_bytes: int
    timeline: list[tuple[int, int]]


def measure(
    llm: LLM, prompts: Sequence[Any], sampling_params: SamplingParams | Sequence[SamplingParams]
) -> tuple[list[RequestOutput], Measurement]:
    """Time `llm.generate`.

    Raises the error of the first request that could not be served.
    """
    stats = llm.stats()
    before = {name: stats[name] for name in Counts.__struct_fields__}
    stats.stalls, stats.event_stalls = Durations(), Durations()  # in a warm-up, kernels may be compiled
    steps_before = stats.steps
    with _rates_of_steps(llm) as rates:
        others_before, begin = machine.cpu_seconds_of_others(), time.perf_counter()
        outputs = llm.generate(prompts, sampling_params, use_tqdm=sys.stderr.isatty())
        seconds = time.perf_counter() - begin
        others = machine.cpu_seconds_of_others() - others_before
    for output in outputs:
        if output.error is not None:
            raise output.error
    timeline = stats.timeline_since(steps_before)
    output_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    times = [output.metrics for output in outputs]
    latencies = sorted((each.finished_time or 0.0) - each.arrival_time for each in times)  # all have ended
    peak_blocks = max(blocks for _, blocks in timeline)
    return outputs, Measurement(
        seconds=seconds,
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / seconds,
        step_tokens_per_s=mean(rates),
        mean_latency=mean(latencies),
        p99_latency=latencies[ceil(0.99 * len(latencies)) - 1],
        other_load=max(0.0, others / seconds),
        steps=len(timeline),
        mean_concurrency=sum(running for running, _ in timeline) / len(timeline),
        peak_concurrency=max(running for running, _ in timeline),
        **{name: stats[name] - before[name] for name in Counts.__struct_fields__},
        p99_stall_seconds=stats.stalls.p99,
        longest_stall_seconds=stats.longest_stall_seconds,
        num_blocks=stats.num_blocks,
        peak_blocks=peak_blocks,
        peak_kv_bytes=peak_blocks * llm.cache_shape.bytes_per_block,
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        timeline=timeline,
    )


@contextmanager
def _rates_of_steps(llm: LLM) -> Iterator[list[float]]:
    """Tokens sampled per second, of each step of the engine while the block runs."""
    engine, stats, rates = llm.llm_engine, llm.stats(), list[float]()
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
        del engine.step  # the method of the class is back
