"""Tables 2 and 3 of the Kara paper with its pool: 64 GB for the weights and the cache of an 8B model.

The requests, variants and settings are those of `benchmarks.tables_2_3`, whose runs take minutes each, to the end of
the last request. Here each variant serves the same queue for the same time, and what it has done by then is compared.
In the second half of that time the pool has been full for a while.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import runs, tables_2_3
from benchmarks.device.log import Figures, Log
from benchmarks.device.shapes import LLAMA_8B, held_weight_bytes, write_shape
from benchmarks.device.target import Target
from benchmarks.variants import Job, make_engine
from benchmarks.workloads import Request
from kvllm import LLM, RequestOutput, SamplingParams
from kvllm.models.config import load_model_config

MEMORY = 64_000_000_000
# Most running sequences and variant, by importance: as many are run as there is time for.
RUNS = (
    (256, "vanilla"),
    (256, "periodic"),
    (256, "pressure"),
    (256, "snapkv"),
    (64, "vanilla"),
    (64, "periodic"),
    (128, "vanilla"),
    (128, "periodic"),
    (64, "snapkv"),
    (32, "vanilla"),
    (32, "periodic"),
    (16, "vanilla"),
    (16, "periodic"),
)
TINY_RUNS = ((4, "vanilla"), (4, "periodic"), (4, "pressure"), (4, "snapkv"))
TINY_ARGUMENTS = (
    "--preset cpu --num-prompts 8 --input-len 8 --output-median 40 --max-output-len 60 --block-size 16 "
    "--pool-fraction 0.5 --max-num-batched-tokens 64"
)
SECONDS, TINY_SECONDS = 60.0, 1.0
"""Each variant serves at least so long: until then the pool has been full for half of the time."""
LEAST_SECONDS = 20.0
"""Less says nothing."""
LOAD_SECONDS = 12.0
"""What a run needs beside."""
COUNTS = ("preemptions", "compression_events", "windows_compressed")
PHASES = ("decode_seconds", "prefill_seconds", "recompute_seconds", "score_seconds", "compact_seconds")


def run(target: Target, log: Log) -> None:
    planned = target.size(RUNS, TINY_RUNS)
    count, seconds = target.size(share_out(log.seconds_left), (len(TINY_RUNS), TINY_SECONDS))
    references: dict[int, Figures] = {}
    with tempfile.TemporaryDirectory() as directory:
        jobs = make_jobs(target, Path(directory))
        for column, name in planned[:count]:
            call = partial(measure, jobs[column][name], seconds, references, column)
            log.measure(f"at most {column}: {name}", call)
            target.release_memory()
    for column, name in planned[count:]:
        log.left_out(f"at most {column}: {name}", "no time is left: run this section alone, with more --seconds")


def share_out(seconds: float) -> tuple[int, float]:
    """How many runs there is time for, and how long each may serve."""
    count = min(len(RUNS), max(2, int(seconds / (SECONDS + LOAD_SECONDS))))  # one run alone compares nothing
    each = seconds / count - LOAD_SECONDS
    return (count, each) if each >= LEAST_SECONDS else (0, 0.0)


def make_jobs(target: Target, directory: Path) -> dict[int, dict[str, Job]]:
    """By column and variant."""
    shape = write_shape(target, LLAMA_8B, directory)
    model = load_model_config(shape)
    planned = target.size(RUNS, TINY_RUNS)
    columns, variants = (dict.fromkeys(str(run[i]) for run in planned) for i in (0, 1))
    arguments = ["--model", str(shape / "config.json"), "--variants", *variants, "--max-num-seqs", *columns]
    pool = ["--preset", "paper", "--kv-cache-memory-bytes", str(MEMORY - held_weight_bytes(model))]
    args = tables_2_3.parse_arguments([*arguments, *target.size(pool, TINY_ARGUMENTS.split())])
    path, model = runs.find_model(args, directory)
    _, requests = runs.make_requests(args, path, model)
    return runs.make_jobs(args, runs.chosen_variants(args), path, model, requests, args.max_num_seqs)


def measure(job: Job, seconds: float, references: dict[int, Figures], column: int) -> Figures:
    """What a variant serves in `seconds`, and its gains over the first one of the column."""
    figures = serve(make_engine(job), job.requests, seconds)
    reference = references.setdefault(column, figures)
    rates = {"gain": "output_tokens_per_s", "second_half_gain": "second_half_tokens_per_s"}
    return figures | {gain: figures[rate] / reference[rate] - 1 for gain, rate in rates.items()}


def serve(llm: LLM, requests: Sequence[Request], seconds: float) -> dict[str, Any]:
    """Greedily, as many tokens as each request asks for, until the time is up."""
    warm_up(llm, requests[0])
    engine, stats = llm.llm_engine, llm.stats()
    before = {name: stats[name] for name in (*COUNTS, *PHASES)}
    steps_before, tokens_before = stats.steps, stats.output_tokens
    outputs = [
        engine.add_request(str(i), request.prompt_token_ids, greedy(request.output_length), stream=False)
        for i, request in enumerate(requests)
    ]
    begin = time.perf_counter()
    ends, tokens = [begin], [tokens_before]
    while ends[-1] < begin + seconds and engine.has_unfinished_requests():
        engine.step()
        ends.append(time.perf_counter())
        tokens.append(stats.output_tokens)
    middle = next(i for i, end in enumerate(ends) if end >= (begin + ends[-1]) / 2)
    latencies = [latency(output) for output in outputs if output.finished]
    running = [running for running, _ in stats.timeline_since(steps_before)]
    for output in outputs:
        engine.abort(output.request_id)
    return {
        "served_seconds": ends[-1] - begin,
        "output_tokens_per_s": (tokens[-1] - tokens_before) / (ends[-1] - begin),
        "second_half_tokens_per_s": (tokens[-1] - tokens[middle]) / (ends[-1] - ends[middle]),
        "mean_concurrency": mean(running),
        "requests_finished": len(latencies),
        "mean_latency_seconds": mean(latencies) if latencies else None,
        "longest_step_seconds": max(later - end for end, later in pairwise(ends)),
        **{name: stats[name] - before[name] for name in (*COUNTS, *PHASES)},
    }


def warm_up(llm: LLM, request: Request) -> None:
    """Other tokens than the request's: they leave no prefix to hit."""
    prompt = [0] * len(request.prompt_token_ids)
    llm.generate({"prompt_token_ids": prompt}, greedy(8), use_tqdm=False)


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def latency(output: RequestOutput) -> float:
    assert output.metrics.finished_time is not None
    return output.metrics.finished_time - output.metrics.arrival_time
