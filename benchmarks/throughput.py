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
from statistics import median

import msgspec

from benchmarks.common import command_line, engines, jobs, limits, report, runs, summary, workloads
from benchmarks.common.variants import parse_variant
from benchmarks.common.workloads import Request
from kvllm.config import require
from kvllm.errors import ConfigError
from kvllm.models.config import ModelConfig
from kvllm.tokenizer import has_tokenizer, load_tokenizer


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.throughput", __doc__)
    engines.add_model_arguments(parser)

    add = parser.add_argument_group("workload (default: --workload A)").add_argument
    named = "16 short requests, 1 request, 8 long ones (C512: half as long)"
    add("--workload", choices=tuple(workloads.WORKLOADS), help=named)
    add("--num-prompts", type=int, help="requests of random ids or of a file (default 100)")
    add("--input-len", type=int, help="tokens of a random prompt")
    add("--output-len", type=int, help="tokens generated for a random prompt or one from --prompts")
    add("--random-range-ratio", type=float, default=0.0, help="lengths vary by this share, 0 (default) to below 1")
    add("--prompts", type=Path, metavar="FILE", help="JSONL with a prompt in each line")
    add("--field", default="prompt", help="field of a line of --prompts that holds the text (default: prompt)")
    add("--trace", type=Path, metavar="FILE", help="CSV with lengths: ContextTokens, GeneratedTokens")
    add("--seed", type=int, default=0)

    add = engines.add_engine_arguments(parser)
    add("--max-model-len", type=int, help="default: the longest request; a trace leaves longer requests out")
    add("--max-num-seqs", type=int, default=256)

    add = parser.add_argument_group("runs").add_argument
    names = "vanilla, auto, kara:policy=periodic,window_blocks=3, ..."
    add("--variants", nargs="+", default=["vanilla", "auto"], help=names)
    add("--repeats", type=int, default=3, help="runs of each variant (default 3)")
    command_line.add_output_argument(parser)
    return parser.parse_args(arguments)


# Requests: everything is checked here, before the first process starts.


def make_requests(args: argparse.Namespace, path: Path, model: ModelConfig) -> tuple[str, list[Request]]:
    """A description of the workload, and its requests."""
    _check_workload(args)
    rng = random.Random(args.seed)
    count = 100 if args.num_prompts is None else args.num_prompts
    if args.prompts:
        if not has_tokenizer(path):
            raise ConfigError(f"--prompts needs a tokenizer, and {args.model} has none: use --input-len for random ids")
        tokenizer = load_tokenizer(path)
        texts = workloads.read_prompts(args.prompts, args.field, count)
        requests = [Request(tokenizer.encode(text), args.output_len) for text in texts]
        return f"{args.prompts}: {args.field}, {args.output_len} output tokens each", requests
    if args.trace:
        longest = args.max_model_len or model.max_position_embeddings
        lengths, left_out = workloads.read_trace(args.trace, count, longest)
        name = f"{args.trace}, {left_out} requests of more than {longest} tokens left out"
    elif args.input_len is not None:
        lengths = workloads.synthetic(rng, count, args.input_len, args.output_len, args.random_range_ratio)
        name = f"random lengths around {args.input_len} + {args.output_len}, ratio {args.random_range_ratio}"
    else:
        name = args.workload or "A"
        lengths = workloads.WORKLOADS[name](rng)
    return name, workloads.random_requests(rng, lengths, model.vocab_size)


def _check_workload(args: argparse.Namespace) -> None:
    given = [flag for flag in ("workload", "input_len", "prompts", "trace") if getattr(args, flag) is not None]
    if len(given) > 1:
        flags = ", ".join("--" + flag.replace("_", "-") for flag in given)
        raise ConfigError(f"{flags} each describe a workload: give one")
    command_line.require_positive(args, "num_prompts", "input_len", "output_len", "repeats", "max_model_len")
    require(0 <= args.random_range_ratio < 1, "--random-range-ratio", args.random_range_ratio, "0 to below 1")
    needs_output = args.input_len is not None or args.prompts is not None
    if needs_output and args.output_len is None:
        raise ConfigError("--input-len and --prompts need --output-len, the tokens to generate for each prompt")
    if args.output_len is not None and not needs_output:
        raise ConfigError("--output-len goes with --input-len or --prompts: other workloads bring their own lengths")
    if args.num_prompts is not None and not (needs_output or args.trace):
        raise ConfigError("--num-prompts goes with --input-len, --prompts or --trace: other workloads have their own")


# The whole


def benchmark(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    command_line.require_unique("--variants", args.variants)
    variants = [parse_variant(text) for text in args.variants]
    with tempfile.TemporaryDirectory() as directory:
        path, model = runs.find_model(args, Path(directory))
        workload, requests = make_requests(args, path, model)
        engines.check_lengths(args, model, requests)
        of_variants = {variant.name: engines.make_job(args, variant, path, model, requests) for variant in variants}
        of_workload = runs.totals(workload, requests)
        provenance = runs.announce("benchmarks.throughput", arguments, of_workload)
        measured = jobs.run_all(of_variants, args.repeats)
    limit = limits.physical_limit(model, args.dtype, measured[variants[0].name][0].device)
    print(f"\nMedians of {args.repeats} runs (least-most); the ratio is of runs that follow each other.\n")
    rates = {name: median(run.output_tokens_per_s for run in each) for name, each in measured.items()}
    print(f"{summary.show(measured)}\n\n{limits.show_weights_limit(limit, rates, alone=len(requests) == 1)}")
    content = {
        **provenance,
        "model": {"name": args.model, **msgspec.to_builtins(model)},
        "workload": of_workload,
        "physical_limit": msgspec.to_builtins(limit),
        "ratios": summary.ratios(measured),
        "variants": {name: runs.entry(job, args.model, measured[name]) for name, job in of_variants.items()},
    }
    report.write_json(args.output / "throughput.json", content)
    print(f"Written: {args.output / 'throughput.json'}")


if __name__ == "__main__":
    command_line.run_script(benchmark)
