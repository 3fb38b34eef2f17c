"""KvLLM and other engines side by side on this machine: tokens per second, time to the first token, and memory.

    python -m benchmarks.peers --model 50m --workloads A B C --rounds 3

Each peer runs in a virtual environment of its own, which is made from PyPI on first use (several GB for all of them;
llama.cpp is compiled). An engine that cannot be installed or does not run on this CPU is listed with the reason. All
engines get the same token ids and generate the same number of tokens, greedily. With `--pool-fraction` the KV cache is
smaller than the demand: engines let requests wait, preempt them, or drop KV pairs. Every run is a process of its own.
The engines take turns, in the opposite order in every other round, and ratios are taken within a round. The figures go
to peers.json.

`--busy-processes` adds a run of each engine beside processes that compute without end, and the share of its speed that
it keeps there.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from msgspec import Struct

from benchmarks.common import command_line, limits, machine, report, shapes, workloads
from benchmarks.common.summary import Spread, show_spread, spread_of
from benchmarks.common.workloads import Request
from benchmarks.peers_engines.environments import PeerFiles
from benchmarks.peers_engines.protocol import ChildFailed, Job, call
from benchmarks.peers_engines.registry import ENGINES
from kvllm.config import require
from kvllm.models.config import ModelConfig, load_model_config

TIMEOUT = 1800
"""Seconds that a run or a conversion may take."""


class Run(Struct):
    """A run of an engine. See `benchmarks.peers_engines.protocol.measure`.

    first_tokens: of each request. kv: the format of the KV cache. version: of the engine's package.
    kept_beside_work: tokens per second beside the busy processes, over those without them; None if there are none.
    """

    seconds: float
    output_tokens_per_s: float
    start_seconds: float
    peak_memory_bytes: int
    weight_bytes: int
    kv: str
    kv_bytes: float
    overhead_bytes: float
    first_tokens: list[int]
    version: str
    kept_beside_work: float | None = None


Runs = dict[str, list[Run]]
"""By the name of the engine, a run of each round."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.peers", __doc__)
    add = parser.add_argument
    add("--model", default="50m", help=shapes.MODEL_HELP)
    named = "A: 16 short requests; B: one; C: 8 long ones (the default is these); C512: half as long"
    add("--workloads", nargs="+", choices=tuple(workloads.WORKLOADS), default=("A", "B", "C"), help=named)
    add("--engines", nargs="+", choices=tuple(ENGINES), metavar="NAME", help=", ".join(ENGINES))
    pool = "KV blocks over those that all requests fill at their ends (default 1)"
    add("--pool-fraction", type=float, default=1.0, metavar="SHARE", help=pool)
    add("--rounds", type=int, default=3, help="runs of each engine (default 3)")
    busy = "every run is followed by another one beside N processes that compute without end (default 0)"
    add("--busy-processes", type=int, default=0, metavar="N", help=busy)
    folder = "folder of the environments and of converted checkpoints, kept for later runs (default .venv-peers)"
    add("--environments", type=Path, default=Path(".venv-peers"), metavar="DIR", help=folder)
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    command_line.require_positive(args, "rounds")
    require(args.busy_processes >= 0, "--busy-processes", args.busy_processes, "at least 0")
    require(0 < args.pool_fraction <= 1, "--pool-fraction", args.pool_fraction, "above 0 and at most 1")
    fitting = default_engines(args.pool_fraction)
    args.engines = args.engines or fitting
    unlimited = [name for name in args.engines if not ENGINES[name].pooled and args.pool_fraction < 1]
    require(not unlimited, "--engines", unlimited, f"--pool-fraction needs one of {fitting}")
    return args


def default_engines(pool_fraction: float) -> list[str]:
    """Those that drop KV pairs, and all others whose pool can be small, if it is small; else all that drop none."""
    if pool_fraction < 1:
        return [name for name, engine in ENGINES.items() if engine.pooled]
    return [name for name, engine in ENGINES.items() if not engine.evicts]


# Runs


def prepare(files: PeerFiles, names: Sequence[str], checkpoint: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Environments and converted checkpoints: the checkpoints that the engines load, and why others load none."""
    checkpoints: dict[str, Path] = {}
    failures: dict[str, str] = {}
    for name in names:
        try:
            files.python(ENGINES[name].environment)
            checkpoints[name] = files.converted(name, checkpoint, TIMEOUT)
        except ChildFailed as error:
            failures[name] = str(error)
            print(f"{name}: {error}", flush=True)
    return checkpoints, failures


def make_job(
    name: str,
    checkpoint: Path,
    loaded: Path,
    model: ModelConfig,
    requests: Sequence[Request],
    pool_fraction: float = 1.0,
) -> Job:
    numbers_of_pair = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    return {
        "action": "run",
        "checkpoint": str(checkpoint),
        "prepared": str(loaded),
        "options": ENGINES[name].options,
        "prompts": [request.prompt_token_ids for request in requests],
        "output_lengths": [request.output_length for request in requests],
        "vocab_size": model.vocab_size,
        "kv_numbers": int(pool_fraction * numbers_of_pair * sum(request.kv_pairs for request in requests)),
        "pool_fraction": pool_fraction,
        "threads": machine.machine()["cores"],
    }


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """So many processes that compute without end, for as long as the context."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command, start_new_session=True) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_engine(files: PeerFiles, name: str, job: Job, busy: int) -> Run:
    """Run an engine, and once more beside busy processes if there are to be any. Raises ChildFailed."""
    engine = ENGINES[name]
    python, log = files.python(engine.environment), files.log(name)

    def measured() -> Run:
        return msgspec.convert(call(python, engine.module, job, log, {}, TIMEOUT), Run)

    run = measured()
    if busy:
        with busy_processes(busy):
            run.kept_beside_work = measured().output_tokens_per_s / run.output_tokens_per_s
    return run


def run_rounds(files: PeerFiles, jobs: Mapping[str, Job], rounds: int, busy: int = 0) -> tuple[Runs, dict[str, str]]:
    """The runs of all engines that ran in every round, and why others did not."""
    runs: Runs = {name: [] for name in jobs}
    failures: dict[str, str] = {}
    names = list(jobs)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            if name in failures:
                continue
            try:
                runs[name].append(run := run_engine(files, name, jobs[name], busy))
                shown = f"{run.output_tokens_per_s:.1f} output tokens/s, {run.seconds:.1f} s"
            except ChildFailed as error:
                shown = failures[name] = str(error)
            print(f"round {number + 1} of {rounds}, {name}: {shown}", flush=True)
    return {name: of_engine for name, of_engine in runs.items() if name not in failures}, failures


# Figures


def kvllm_of(name: str, runs: Runs) -> str | None:
    """KvLLM with the weights' format of an engine, dropping KV pairs if it does; None if it has no runs."""
    engine = ENGINES[name]
    alike = (n for n in runs if ENGINES[n].is_kvllm and ENGINES[n].weights == engine.weights)
    return next((n for n in alike if ENGINES[n].evicts == engine.evicts), None)


def ratio(first: Sequence[Run], second: Sequence[Run]) -> Spread:
    """Of tokens per second, within a round."""
    return spread_of([a.output_tokens_per_s / b.output_tokens_per_s for a, b in zip(first, second, strict=True)])


def ratios(runs: Runs) -> dict[str, Spread]:
    """KvLLM / peer of the same weights, by the name of the peer."""
    peers = {name: kvllm_of(name, runs) for name in runs if not ENGINES[name].is_kvllm}
    return {name: ratio(runs[kvllm], runs[name]) for name, kvllm in peers.items() if kvllm is not None}


def eviction_ratios(runs: Runs) -> dict[str, Spread]:
    """KvLLM that drops KV pairs / KvLLM that drops none."""
    dropping = [name for name in runs if ENGINES[name].is_kvllm and ENGINES[name].evicts]
    return {name: ratio(runs[name], runs["kvllm"]) for name in dropping if "kvllm" in runs}


def kept_shares(runs: Runs) -> dict[str, Spread]:
    """What engines keep of their speed beside busy processes, if there were any."""
    shares = {name: [run.kept_beside_work for run in of_engine] for name, of_engine in runs.items()}
    return {name: spread_of(kept) for name, of in shares.items() if (kept := [s for s in of if s is not None])}


# The report


def show(runs: Runs, failures: Mapping[str, str]) -> str:
    """A line for each engine with medians (least-most), and one for each engine that did not run."""
    header = ["engine", "weights", "KV", "output tokens/s", "KvLLM / it"]
    header += ["start to first\ntoken, s", "memory beyond\nweights, KV, MiB", "first tokens\nas KvLLM's"]
    against, rows = ratios(runs), []
    for name, of_engine in runs.items():
        kvllm = kvllm_of(name, runs)
        figures = (
            ("{:.1f}", [run.output_tokens_per_s for run in of_engine]),
            ("{:.1f}", [run.start_seconds for run in of_engine]),
            ("{:.0f}", [run.overhead_bytes / report.MIB for run in of_engine]),
        )
        rate, *others = (show_spread(spread_of(values), shape) for shape, values in figures)
        ratio = show_spread(against[name], "{:.2f}") if name in against else ""
        tokens = of_engine[0].first_tokens
        like = [a == b for a, b in zip(tokens, runs[kvllm][0].first_tokens, strict=True)] if kvllm else []
        same = f"{sum(like)} of {len(like)}" if like else ""
        rows.append([name, ENGINES[name].weights, of_engine[0].kv, rate, ratio, *others, same])
    lines = [report.table(header, rows)]
    lines += [f"{name} / kvllm: {show_spread(s, '{:.2f}')}" for name, s in eviction_ratios(runs).items()]
    lines += [f"{name} beside busy processes: {show_spread(s, '{:.0%}')}" for name, s in kept_shares(runs).items()]
    lines += [f"{name} did not run: {reason}" for name, reason in failures.items()]
    return "\n".join(lines)


def benchmark(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    files = PeerFiles(args.environments)
    model = load_model_config(shapes.find_model(args.model, args.environments / "configs"))
    provenance = machine.announce("benchmarks.peers", arguments)
    checkpoint = files.checkpoint(args.model)
    checkpoints, missing = prepare(files, args.engines, checkpoint)
    limit = limits.PhysicalLimit(limits.weight_bytes(model, "bfloat16"), machine.read_bandwidth())
    content: dict[str, Any] = {}
    for workload in args.workloads:
        rng = random.Random(0)
        requests = workloads.random_requests(rng, workloads.WORKLOADS[workload](rng), model.vocab_size)
        totals = workloads.totals(workload, requests)
        share = f"{args.pool_fraction:.0%} of the KV blocks that all of them fill"
        print(
            "\nWorkload {name}: {requests} requests, {output_tokens} output tokens, ".format(**totals) + share,
            flush=True,
        )
        jobs = {
            name: make_job(name, checkpoint, path, model, requests, args.pool_fraction)
            for name, path in checkpoints.items()
        }
        runs, failures = run_rounds(files, jobs, args.rounds, args.busy_processes)
        print(f"\n{show(runs, missing | failures)}\n")
        rates = {name: median(run.output_tokens_per_s for run in each) for name, each in runs.items()}
        of_full_weights = {name: rate for name, rate in rates.items() if ENGINES[name].weights == "bf16"}
        print(limits.show_weights_limit(limit, of_full_weights, alone=len(requests) == 1), flush=True)
        content[workload] = {
            **totals,
            "ratios": ratios(runs),
            "eviction_ratios": eviction_ratios(runs),
            "kept_beside_work": kept_shares(runs),
            "failures": missing | failures,
            "engines": msgspec.to_builtins(runs),
        }
        of_all = {"model": args.model, "physical_limit": msgspec.to_builtins(limit), "workloads": content}
        report.write_json(args.output / "peers.json", provenance | of_all)
    print(f"Written: {args.output / 'peers.json'}")


if __name__ == "__main__":
    command_line.run_script(benchmark)
