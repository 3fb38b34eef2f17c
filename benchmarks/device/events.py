"""The cost of compression events for a decoding batch, by phase, and the time for which they hold it up."""

from __future__ import annotations

import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.device.crowd import Crowd
from benchmarks.device.log import Figures, Log
from benchmarks.device.shapes import LLAMA_8B, write_shape
from benchmarks.device.target import Target
from kvllm import LLM, CompressionConfig


class Setting(NamedTuple):
    """batch: sequences that decode. prompt: their tokens at the beginning. budget: most tokens of a step."""

    batch: int
    prompt: int
    block_size: int
    period: int
    buffer: int
    budget: int
    periods: int
    """That are measured. The paper's are so few that each event finds as many windows as it may take."""


# The paper's (appendix B.1): blocks of 256, 257 of 768 KV pairs, every 128 steps, at most 30 sequences.
PAPER = Setting(batch=128, prompt=160, block_size=256, period=128, buffer=32, budget=2048, periods=3)
TINY = Setting(batch=3, prompt=10, block_size=16, period=8, buffer=4, budget=64, periods=8)
PHASES = {
    "recompute_of_event_seconds": "recompute_seconds",
    "score_of_event_seconds": "score_seconds",
    "compact_of_event_seconds": "compact_seconds",
}


def run(target: Target, log: Log) -> None:
    setting = target.size(PAPER, TINY)
    length = target.size(4096, 100)
    log.measure(f"a prompt of {length} tokens arrives", partial(arrival, target, setting, length))
    target.release_memory()
    log.measure(f"{setting.batch} sequences", partial(events, target, setting))


def make_llm(target: Target, setting: Setting, compression: CompressionConfig | None) -> LLM:
    with tempfile.TemporaryDirectory() as directory:
        return LLM(
            write_shape(target, LLAMA_8B, Path(directory)),
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=20 * setting.block_size,
            block_size=setting.block_size,
            num_gpu_blocks_override=setting.batch * 8,
            max_num_seqs=setting.batch + 1,
            max_num_batched_tokens=setting.budget,
            enable_prefix_caching=False,
            compression=compression,
        )


def events(target: Target, setting: Setting) -> Figures:
    """An event goes on in the next steps if its windows exceed a step's token budget. Its cost is the time of these
    steps, less as many without one."""
    compression = CompressionConfig(
        method="kara",
        policy="periodic",
        window_blocks=3,
        period=setting.period,
        retain_tokens=setting.block_size + 1,
        buffer=setting.buffer,
        chunk_budget=setting.buffer,
    )
    llm = make_llm(target, setting, compression)
    crowd, stats = Crowd(llm), llm.stats()
    crowd.grow(setting.batch, setting.prompt)
    while not stats.compression_events:  # the policy's clock waits for more than a window of steps
        crowd.steps(1)
        if stats.steps > 6 * setting.block_size:
            raise RuntimeError(f"no compression event in {stats.steps} steps")
    crowd.steps(setting.period // 2)  # the first event is over by then, whole ones follow
    before = {name: stats[name] for name in (*PHASES.values(), "compression_events", "windows_compressed")}
    counts = [stats.compression_events]
    num_steps = setting.periods * setting.period
    times = crowd.steps(num_steps, lambda: counts.append(stats.compression_events))
    has_event = [now > earlier for earlier, now in pairwise(counts)]
    plain = median(seconds for seconds, event in zip(times, has_event, strict=True) if not event)
    cost = sum(seconds - plain for seconds, event in zip(times, has_event, strict=True) if event)
    of_run = {name: stats[name] - value for name, value in before.items()}
    num_events = sum(now and not earlier for earlier, now in pairwise([False, *has_event]))
    return {
        "windows_of_an_event": of_run["windows_compressed"] / num_events,
        "steps_of_an_event": of_run["compression_events"] / num_events,
        "step_seconds": plain,
        "event_seconds": cost / num_events,
        "of_decoding": cost / (num_steps * plain),
        "longest_step_seconds": max(times),
        "longest_in_steps": max(times) / plain,
        **{name: of_run[field] / num_events for name, field in PHASES.items()},
        "event_bytes": stats.peak_event_bytes,
    }


def arrival(target: Target, setting: Setting, length: int) -> Figures:
    """A long prompt begins while the others decode: its chunks share their steps."""
    llm = make_llm(target, setting, None)
    crowd = Crowd(llm)
    crowd.grow(setting.batch, setting.prompt)
    plain = median(crowd.steps(target.size(20, 4))[1:])
    crowd.add(length)
    times = crowd.steps(-(-length // (setting.budget - setting.batch)) + 1)
    return {
        "step_seconds": plain,
        "longest_step_seconds": max(times),
        "longest_in_steps": max(times) / plain,
    }
