"""Throughput of engine variants, side by side.

    python -m benchmarks.throughput --model 50m --workload C --pool-fraction 0.5 \\
        --variants vanilla kara:policy=periodic,window_blocks=3 --block-size 64

Every run is a process of its own, and the variants take turns. The script compares medians over the repeats. Outputs
have fixed lengths (greedy, end of sequence ignored), so all variants generate the same number of tokens. The figures go
to throughput.json.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.common import command_line, jobs, machine, report, shapes, summary, workloads
from benchmarks.common.variants import parse_variant
from kvllm.config import require
from kvllm.errors import ConfigError
from kvllm.models.config import load_model_config
from kvllm.simulation.workload import Lengths, synthetic


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.throughput", __doc__)
    jobs.add_engine_arguments(parser)
    add = parser.add_argument
    add("--max-num-seqs", type=int, default=256)
    named = "16 short requests (default), 1 request, 8 long ones (C512: half as long)"
    add("--workload", choices=tuple(workloads.WORKLOADS), help=named)
    add("--input-len", type=int, help="instead: tokens of a prompt")
    add("--output-len", type=int, help="tokens generated for it")
    add("--num-prompts", type=int, default=100, help="requests of these lengths (default 100)")
    add("--random-range-ratio", type=float, default=0.0, help="lengths vary by this share, 0 (default) to below 1")
    names = "vanilla, auto, kara:policy=periodic,window_blocks=3, ..."
    add("--variants", nargs="+", default=["vanilla", "auto"], help=names)
    add("--repeats", type=int, default=3, help="runs of each variant (default 3)")
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    command_line.require_positive(args, "num_prompts", "input_len", "output_len", "repeats")
    require(0 <= args.random_range_ratio < 1, "--random-range-ratio", args.random_range_ratio, "0 to below 1")
    given = [value is not None for value in (args.input_len, args.output_len)]
    if any(given) and (not all(given) or args.workload):
        raise ConfigError("give --workload, or both --input-len and --output-len")
    return args


def draw_lengths(args: argparse.Namespace, rng: random.Random) -> tuple[str, list[Lengths]]:
    """A description of the workload, and its lengths."""
    if args.input_len is None:
        name = args.workload or "A"
        return name, workloads.WORKLOADS[name](rng)
    name = f"random lengths around {args.input_len} + {args.output_len}, ratio {args.random_range_ratio}"
    return name, synthetic(rng, args.num_prompts, args.input_len, args.output_len, args.random_range_ratio)


def benchmark(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    variants, rng = [parse_variant(text) for text in args.variants], random.Random(args.seed)
    with tempfile.TemporaryDirectory() as directory:
        path = shapes.find_model(args.model, Path(directory))
        model = load_model_config(path)
        name, lengths = draw_lengths(args, rng)
        requests = workloads.random_requests(rng, lengths, model.vocab_size)
        size = args.max_num_seqs
        of_variants = {each.name: jobs.make_job(args, each, path, requests, size, size) for each in variants}
        provenance = machine.announce("benchmarks.throughput", arguments)
        of_workload = workloads.totals(name, requests)
        print("Workload: {name}: {requests} requests, {prompt_tokens} + {output_tokens} tokens.".format(**of_workload))
        measured = jobs.run_all(of_variants, args.repeats)
    print(f"\nMedians of {args.repeats} runs (least-most); the ratio is of runs that follow each other.\n")
    print(summary.show(measured))
    content = {
        **provenance,
        "model": {"name": args.model, **msgspec.to_builtins(model)},
        "workload": of_workload,
        "ratios": summary.ratios(measured),
        "variants": {name: summary.entry(job, args.model, measured[name]) for name, job in of_variants.items()},
    }
    report.write_json(args.output / "throughput.json", content)
    print(f"Written: {args.output / 'throughput.json'}")


if __name__ == "__main__":
    command_line.run_script(benchmark)
