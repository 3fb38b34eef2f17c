"""The part of `kvllm simulate` that has several replicas: its options, its runs and its table."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from kvllm.config import EngineConfig, require
from kvllm.distributed.replicas.messages import REPORT_SECONDS
from kvllm.distributed.replicas.router import ROUTING
from kvllm.entrypoints.engine_flags import SETTINGS
from kvllm.simulation.cost import CostModel
from kvllm.simulation.failures import Failure, of_part, parse_failures
from kvllm.simulation.fleet import FleetOutcome, simulate_fleet
from kvllm.simulation.traffic import Arrival, arrivals_of, own_rate, repeat_trace
from kvllm.simulation.workload import arrival_times, load_workload, read_requests

SHOWN: tuple[tuple[str, str, Callable[[FleetOutcome], float]], ...] = (
    ("requests", "{:,.0f}", lambda run: run.requests),
    ("output tokens/s per device", "{:,.0f}", lambda run: run.tokens_per_device),
    ("time to first token, p50, s", "{:.3f}", lambda run: run.first_token.p50),
    ("time to first token, p99, s", "{:.3f}", lambda run: run.first_token.p99),
    ("inter-token latency, p50, ms", "{:.1f}", lambda run: 1e3 * run.between.p50),
    ("inter-token latency, p99, ms", "{:.1f}", lambda run: 1e3 * run.between.p99),
    ("inter-token latency, max, ms", "{:,.0f}", lambda run: 1e3 * run.between.most),
    ("prompts found in cache, %", "{:.1f}", lambda run: 100 * run.cached_tokens / run.prompt_tokens),
    ("time in steps, %", "{:.1f}", lambda run: 100 * run.busy / run.seconds / run.replicas),
    ("preemptions", "{:,.0f}", lambda run: run.preemptions),
    ("requests that lost a replica", "{:,.0f}", lambda run: run.moved),
    ("tokens that these had", "{:,.0f}", lambda run: run.again),
)


def add_fleet_arguments(parser: argparse.ArgumentParser, load: Any) -> None:
    """load: the group of options of which one says what is served."""
    trace = "of the format of a --workload, with its times and shared prefixes, repeated for --duration at --rate"
    load.add_argument("--trace", type=Path, metavar="FILE", help=trace)
    add = parser.add_argument
    add("--replicas", type=int, default=1, metavar="N", help="engines behind the router (default: 1)")
    routing = "what the router goes by, several to compare: %(choices)s (default: both)"
    add("--routing", nargs="+", choices=ROUTING, default=["both"], metavar="RULE", help=routing)
    failures = (
        "what happens to `count` replicas from `replica` on after `at` seconds, for `seconds`: "
        "kind=death,replica=0,count=1,at=60,seconds=60;kind=slow,...,factor=2;kind=drain,..."
    )
    add("--failures", default="", metavar=SETTINGS, help=failures)
    processes = "parts of the fleet, each with a router and a share of the requests, that run in processes of their own"
    add("--processes", type=int, default=1, metavar="N", help=processes)


def load_fleet(args: argparse.Namespace, longest: int) -> tuple[int, list[list[Arrival]]]:
    """The tokens of the longest request, and the requests of each part of the fleet."""
    parts = args.processes
    require(args.replicas >= 1, "replicas", args.replicas, "at least 1")
    require(parts >= 1 and args.replicas % parts == 0, "processes", parts, f"a divisor of replicas={args.replicas}")
    if args.trace is None:
        workload = load_workload(args.workload, longest, args.requests)
        arrivals = arrivals_of(workload.lengths, arrival_times(len(workload.lengths), args.rate))
        return workload.longest, [arrivals[part::parts] for part in range(parts)]
    require(args.requests is None, "requests", args.requests, "not beside --trace, which goes on for --duration")
    trace, _ = read_requests(args.trace, None, longest)
    rate = (args.rate or own_rate(trace)) / parts
    loads = [repeat_trace(trace, rate, args.duration, seed=part) for part in range(parts)]
    require(all(loads), "duration", args.duration, "longer: there is no request")
    return max(sum(each.lengths) for each in trace), loads


def simulate_fleets(
    args: argparse.Namespace, cost: CostModel, configs: list[EngineConfig], parts: list[list[Arrival]]
) -> str:
    """The table of all runs: with each rule of routing, without and with compression."""
    failures = parse_failures(args.failures)
    for failure in failures:
        require(failure.replicas.stop <= args.replicas, "replica", failure.replicas[-1], f"below {args.replicas}")
    names = ["without", "compressed"][: len(configs)]
    runs = [(name, config, rule) for rule in args.routing for name, config in zip(names, configs, strict=True)]
    outcomes = [_simulate(args, cost, config, rule, failures, parts) for _, config, rule in runs]
    lines = [f"{'':<30}" + "".join(f"{f'{rule}, {name}':>20}" for name, _, rule in runs)]
    for title, shape, value in SHOWN:
        lines.append(f"{title:<30}" + "".join(f"{shape.format(value(outcome)):>20}" for outcome in outcomes))
    return "\n".join([f"{args.replicas} replicas of {Path(args.model).name} on {cost.hardware.name}", *lines])


def _simulate(
    args: argparse.Namespace,
    cost: CostModel,
    config: EngineConfig,
    rule: str,
    failures: list[Failure],
    parts: list[list[Arrival]],
) -> FleetOutcome:
    size = args.replicas // len(parts)
    serve = partial(
        simulate_fleet,
        config,
        cost,
        replicas=size,
        routing=rule,
        report_seconds=REPORT_SECONDS if size > 1 else 0.0,  # a single engine is in the same process
        recalled_pairs=args.recalled_pairs,
    )
    of_parts = [of_part(failures, part * size, size) for part in range(len(parts))]
    if len(parts) == 1:
        return serve(parts[0], failures=of_parts[0])
    with ProcessPoolExecutor(len(parts)) as pool:
        first, *others = pool.map(partial(_serve_part, serve), parts, of_parts)
    for other in others:
        first.add(other)
    return first


def _serve_part(serve: Callable[..., FleetOutcome], arrivals: list[Arrival], failures: list[Failure]) -> FleetOutcome:
    return serve(arrivals, failures=failures)
