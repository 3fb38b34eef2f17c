"""The fewest machines that keep a service level, by what the KV cache holds, simulated.

    python -m benchmarks.machines config.json --hardware h100 --trace conversation_trace.jsonl --duration 900 \\
        --machines 3 4 5 6 --within 9

All options but --machines, --within and --output are those of `kvllm simulate`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.common import command_line, report
from kvllm.entrypoints import simulate
from kvllm.entrypoints.engine_flags import parse_compression
from kvllm.entrypoints.simulate_fleet import load_fleet
from kvllm.simulation.cost import CostModel, resolve_dtype
from kvllm.simulation.fleet import FleetOutcome, simulate_fleet
from kvllm.simulation.hardware import load_hardware

CACHES = {
    "bfloat16": ("auto", "none"),
    "bfloat16, pressure": ("auto", "retain_blocks=1"),
    "int6_int4_hadamard": ("int6_int4_hadamard", "none"),
    "int6_int4_hadamard, pressure": ("int6_int4_hadamard", "retain_blocks=1"),
}


def main(arguments: Sequence[str]) -> None:
    parser = command_line.make_parser("benchmarks.machines", __doc__)
    parser.set_defaults(command="simulate")
    simulate.add_arguments(parser)
    parser.add_argument("--machines", type=int, nargs="+", required=True, metavar="N", help="replicas to try")
    parser.add_argument("--within", type=float, required=True, metavar="S", help="first token, 99 of 100 requests")
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    cases: list[tuple[str, int]] = [(cache, n) for cache in CACHES for n in args.machines]
    with ProcessPoolExecutor() as pool:
        runs = dict(zip(cases, pool.map(partial(serve, args), cases), strict=True))
    print(report.table(["KV cache", "machines", *HEADS], rows(args, runs)))
    draw(args, runs)


def serve(args: argparse.Namespace, case: tuple[str, int]) -> FleetOutcome:
    cache, replicas = case
    args.kv_cache_dtype, compression = CACHES[cache]
    args.replicas = replicas
    model, hardware = simulate.read_model_config(simulate.given_checkpoint(args)), load_hardware(args.hardware)
    dtype = resolve_dtype(args.dtype, model, hardware.flops_per_s)
    cost = CostModel(hardware, model, dtype, args.tensor_parallel_size, args.kv_cache_dtype)
    longest, parts = load_fleet(args, simulate.longest_request(args, cost))
    config = simulate.make_config(args, cost, longest, parse_compression(compression))
    return simulate_fleet(config, cost, parts[0], replicas, routing=args.routing[0])


HEADS = ("tokens/s each", "first token, p50, s", "p99, s", "between, p99, ms", "preemptions", "found, %")


def rows(args: argparse.Namespace, runs: dict[tuple[str, int], FleetOutcome]) -> list[list[str]]:
    """A row for the fewest machines that keep the level, or for the most that were tried."""
    found = []
    for cache in CACHES:
        keep = [n for n in sorted(args.machines) if runs[cache, n].first_token.p99 <= args.within]
        run = runs[cache, keep[0] if keep else max(args.machines)]
        figures = [f"{run.tokens_per_device:,.0f}", f"{run.first_token.p50:.2f}", f"{run.first_token.p99:.2f}"]
        figures += [f"{1e3 * run.between.p99:.0f}", f"{run.preemptions:,}"]
        cached = f"{100 * run.cached_tokens / run.prompt_tokens:.0f}"
        found.append([cache, f"{'' if keep else 'above '}{run.replicas}", *figures, cached])
    return found


def draw(args: argparse.Namespace, runs: dict[tuple[str, int], FleetOutcome]) -> None:
    machines = sorted(args.machines)
    lines = {cache: report.Line(machines, [runs[cache, n].first_token.p99 for n in machines]) for cache in CACHES}
    lines["service level"] = report.Line(machines, [args.within] * len(machines))
    title = f"{Path(args.model).stem} on {args.hardware}: {(args.trace or args.workload).stem}"
    path: Path = args.output / "machines.png"
    report.plot_lines(path, title, "machines", {"first token, p99 (s)": lines}, logarithmic=True)
    print(f"Written: {path}")


if __name__ == "__main__":
    command_line.run_script(main)
