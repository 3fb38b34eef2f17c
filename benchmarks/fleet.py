"""Real replicas on this machine beside the simulated fleet.

    python -m benchmarks.calibrate --output cpu.json
    python -m benchmarks.fleet --hardware cpu.json

Replicas run under Ray, compute a model with random weights, each on a core that nothing else may use, and get requests
at random moments, some of which begin as an earlier one does. A run with all requests at once gives the factor by which
steps of several replicas take longer than the description says.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, cast

import torch
from msgspec import Struct
from scipy.optimize import bisect

from benchmarks.common import command_line, report, shapes
from kvllm import LLM, SamplingParams
from kvllm.config import EngineConfig
from kvllm.models.config import load_model_config
from kvllm.simulation.cost import CostModel
from kvllm.simulation.failures import Failure
from kvllm.simulation.fleet import simulate_fleet
from kvllm.simulation.hardware import load_hardware
from kvllm.simulation.traffic import Arrival
from kvllm.simulation.workload import MOONCAKE_BLOCK, TraceRequest, arrival_times

SHAPE, DTYPE = "50m", "bfloat16"
OPTIONS: dict[str, Any] = {"block_size": 16, "max_model_len": 2048, "max_num_seqs": 16, "num_gpu_blocks_override": 2000}


class Served(Struct):
    """seconds: from the first arrival to the last token. The others are of each request, as in FleetOutcome."""

    seconds: float
    first_tokens: list[float]
    latencies: list[float]
    cached_tokens: int


def make_arrivals(count: int, rate: float | None, seed: int) -> list[Arrival]:
    """Conversations of up to three turns. rate: requests/s; None: all at once."""
    rng = random.Random(seed)
    users = [rng.randrange(count) for _ in range(count)]
    arrivals = []
    for index, time_ in enumerate(arrival_times(count, rate, seed)):
        turns = min(2, users[:index].count(users[index]))
        prefix = [3 * users[index] + turn + 1 for turn in range(turns + 1)]
        prompt = MOONCAKE_BLOCK * turns + rng.randint(32, MOONCAKE_BLOCK)
        arrivals.append(Arrival(time_, TraceRequest(prompt, rng.randint(16, 128), time_, prefix), seed))
    return arrivals


def tokens_of(arrival: Arrival, vocab_size: int) -> list[int]:
    """Its prompt for a model: equal where that of another one is."""
    numbers = arrival.prompt()
    tokens: list[int] = []
    for begin in range(0, len(numbers), MOONCAKE_BLOCK):
        count = min(MOONCAKE_BLOCK, len(numbers) - begin)
        tokens += random.Random(numbers[begin]).choices(range(vocab_size), k=MOONCAKE_BLOCK)[:count]
    return tokens


def serve(llm: LLM, arrivals: Sequence[Arrival]) -> Served:
    engine, vocab_size = llm.llm_engine, llm.model_config.vocab_size
    prompts = [{"prompt_token_ids": tokens_of(arrival, vocab_size)} for arrival in arrivals]
    first, last, cached, coming = dict[int, float](), dict[int, float](), 0, 0
    begin = time.perf_counter()
    while len(last) < len(arrivals):
        now = time.perf_counter() - begin
        while coming < len(arrivals) and arrivals[coming].time <= now:
            length = arrivals[coming].request.output
            sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            engine.add_request(str(coming), prompts[coming], sampling)
            coming += 1
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, arrivals[coming].time - now))
            continue
        for output in engine.step():
            index, now = int(output.request_id), time.perf_counter() - begin
            first.setdefault(index, now - arrivals[index].time)
            if output.finished:
                last[index] = now - arrivals[index].time
                cached += output.num_cached_tokens
    seconds = max(arrival.time + last[index] for index, arrival in enumerate(arrivals)) - arrivals[0].time
    of_requests = range(len(arrivals))
    return Served(seconds, [first[i] for i in of_requests], [last[i] for i in of_requests], cached)


def predict(config: EngineConfig, cost: CostModel, arrivals: Sequence[Arrival], replicas: int, factor: float) -> Served:
    slow = Failure(kind="slow", count=replicas, seconds=1e9, factor=factor)
    run = simulate_fleet(config, cost, arrivals, replicas, failures=[slow])
    return Served(run.seconds, run.first_tokens, run.latencies, run.cached_tokens)


def fit(config: EngineConfig, cost: CostModel, arrivals: Sequence[Arrival], replicas: int, seconds: float) -> float:
    """The factor of all steps with which the requests take so long."""

    def beyond(power: float) -> float:
        return predict(config, cost, arrivals, replicas, 10**power).seconds - seconds

    return 10 ** cast(float, bisect(beyond, -2, 2, xtol=5e-4))


def rows(measured: Served, predicted: Served, arrivals: Sequence[Arrival]) -> list[list[str]]:
    def figures(run: Served) -> dict[str, float]:
        return {
            "output tokens/s": sum(arrival.request.output for arrival in arrivals) / run.seconds,
            "first token, mean, s": mean(run.first_tokens),
            "first token, p99, s": sorted(run.first_tokens)[-1 - len(arrivals) // 100],
            "latency, mean, s": mean(run.latencies),
            "found in cache, tokens": run.cached_tokens,
        }

    pairs = zip(figures(measured).items(), figures(predicted).values(), strict=True)
    return [
        [name, f"{found:,.2f}", f"{said:,.2f}", f"{said / found - 1:+.0%}" if found else ""]
        for (name, found), said in pairs
    ]


def run_fleet(arguments: Sequence[str]) -> None:
    parser = command_line.make_parser("benchmarks.fleet", __doc__)
    parser.add_argument("--hardware", default="cpu", metavar="NAME", help="as for kvllm simulate (default: cpu)")
    parser.add_argument("--replicas", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--requests", type=int, default=100, metavar="N", help="of each run (default: 100)")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.0], metavar="R", help="requests/s")
    args = parser.parse_args(arguments)
    command_line.require_positive(args, "replicas", "requests")
    hardware, factor = load_hardware(args.hardware), None
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        path = shapes.find_model(SHAPE, Path(name))
        llm = LLM(path, dtype=DTYPE, load_format="dummy", data_parallel_size=args.replicas, **OPTIONS)
        config = llm.llm_engine.config
        cost = CostModel(hardware, load_model_config(path), DTYPE)
        serve(llm, make_arrivals(8, None, seed=0))  # warms up
        loads = [make_arrivals(args.requests, rate, seed) for seed, rate in enumerate([None, *args.rates], 1)]
        for title, arrivals in zip(["all at once", *(f"{rate:g} a second" for rate in args.rates)], loads, strict=True):
            measured = serve(llm, arrivals)
            factor = factor or fit(config, cost, arrivals, args.replicas, measured.seconds)
            predicted = predict(config, cost, arrivals, args.replicas, factor)
            print(report.table([title, "measured", "simulated", "error"], rows(measured, predicted, arrivals)) + "\n")
        print(f"Steps take {factor:.2f} times as long as {args.hardware} has them.")


if __name__ == "__main__":
    command_line.run_script(run_fleet)
