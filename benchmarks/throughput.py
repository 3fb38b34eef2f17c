"""Throughput of engine variants, side by side.

    python -m benchmarks.throughput --model 50m --workload C --pool-fraction 0.5 \\
        --variants vanilla kara:period=32,window_blocks=3,buffer=8 --block-size 16

Every run is a process of its own, the variants take turns, and medians over the repeats are compared. Outputs have
fixed lengths (greedy, end of sequence ignored), so all variants generate the same number of tokens. The figures go to
throughput.json and a plot of the first repeat to throughput.png.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.common import engines, jobs, limits, machine, report, shapes, workloads
from benchmarks.common.summary import MEMORY, SHOWN, ratios, spread, summarize
from benchmarks.common.variants import parse_variant
from benchmarks.common.workloads import Request
from kvllm.config import require
from kvllm.errors import ConfigError, KvLLMError
from kvllm.models.config import ModelConfig, load_model_config
from kvllm.tokenizer import has_tokenizer, load_tokenizer


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throughput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    engines.add_model_arguments(parser)

    add = parser.add_argument_group("workload (default: --workload A)").add_argument
    add("--workload", choices=tuple(workloads.WORKLOADS), help="16 short requests, one, 8 long (C512: half as long)")
    add("--num-prompts", type=int, help="requests of random ids, or how many to take from a file (default 100)")
    add("--input-len", type=int, help="tokens of a random prompt")
    add("--output-len", type=int, help="tokens generated for a random prompt or one from --prompts")
    add("--random-range-ratio", type=float, default=0.0, help="lengths vary by this share, 0 (default) to below 1")
    add("--prompts", type=Path, metavar="FILE", help="JSONL with a prompt in each line")
    add("--field", default="prompt", help="where in a line of --prompts the text is (default: prompt)")
    add("--trace", type=Path, metavar="FILE", help="CSV with lengths: ContextTokens, GeneratedTokens")
    add("--seed", type=int, default=0)

    add = engines.add_engine_arguments(parser)
    add("--max-model-len", type=int, help="default: the longest request; of a trace, longer requests are left out")
    add("--max-num-seqs", type=int, default=256)

    add = parser.add_argument_group("runs").add_argument
    add("--variants", nargs="+", default=["vanilla", "kara"], help="vanilla, kara, kara:period=32,window_blocks=3, ...")
    add("--repeats", type=int, default=3)
    add("--output", type=Path, default=Path("benchmark-output"), metavar="DIR")
    return parser.parse_args(arguments)


# Requests: everything is checked here, before the first process starts.


def make_requests(args: argparse.Namespace, path: Path, model: ModelConfig) -> tuple[str, list[Request]]:
    """The workload in words, and its requests."""
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
    for flag in ("num_prompts", "input_len", "output_len", "repeats", "max_model_len"):
        value = getattr(args, flag)
        require(value is None or value >= 1, f"--{flag.replace('_', '-')}", value, "at least 1")
    require(0 <= args.random_range_ratio < 1, "--random-range-ratio", args.random_range_ratio, "0 to below 1")
    needs_output = args.input_len is not None or args.prompts is not None
    if needs_output and args.output_len is None:
        raise ConfigError("--input-len and --prompts need --output-len: how many tokens to generate for each prompt")
    if args.output_len is not None and not needs_output:
        raise ConfigError("--output-len goes with --input-len or --prompts: other workloads bring their own lengths")
    if args.num_prompts is not None and not (needs_output or args.trace):
        raise ConfigError("--num-prompts goes with --input-len, --prompts or --trace: other workloads have their own")


# The report


def show(summaries: dict[str, dict[str, dict[str, float]]], against: dict[str, dict[str, float]]) -> str:
    """Medians over the repeats (least - most), one column for each variant."""
    header = ["", *(name.replace(":", ":\n").replace(",", ",\n") for name in summaries)]
    rows = [
        [title, *(spread(summary[name], shape) for summary in summaries.values())]
        for name, (title, shape) in SHOWN.items()
    ]
    for name, title in MEMORY.items():
        cells = [{k: v / report.MIB for k, v in summary[name].items()} for summary in summaries.values()]
        rows.append([title, *(spread(cell, "{:.1f}") for cell in cells)])
    if against:
        rows.append(["tokens/s, ratio", "1", *(spread(ratio, "{:.2f}") for ratio in against.values())])
    return report.table(header, rows)


def show_limit(limit: dict[str, float | None], summaries: dict[str, dict[str, dict[str, float]]], alone: bool) -> str:
    size, bandwidth, rate = limit.values()
    text = f"Weights read in a step: {size / 1e6:.0f} MB; memory is read at {bandwidth / 1e9:.1f} GB/s.\n"
    if rate is None:
        return text + "The weights fit into the last-level cache: reading them sets no limit."
    text += f"So one sequence alone decodes at most {rate:.0f} tokens/s"
    if not alone:
        return text + "."
    reached = (f"{name} {s['output_tokens_per_s']['median'] / rate:.0%}" for name, s in summaries.items())
    return f"{text}; reached, prompt included: {', '.join(reached)}."


def benchmark(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    variants = [parse_variant(text) for text in args.variants]
    names = [variant.name for variant in variants]
    if len(set(names)) < len(names):
        raise ConfigError(f"--variants {' '.join(names)}: each may be given once")
    with tempfile.TemporaryDirectory() as directory:
        path = (
            shapes.named_shape(args.model, Path(directory))
            if args.model in shapes.SHAPES
            else Path(args.model).resolve()
        )
        model = load_model_config(path)
        workload, requests = make_requests(args, path, model)
        engines.check_lengths(args, model, requests)
        of_variants = {variant.name: engines.make_job(args, variant, path, model, requests) for variant in variants}
        provenance = machine.provenance("benchmarks.throughput", arguments)
        totals = {
            "name": workload,
            "requests": len(requests),
            "prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
            "output_tokens": sum(request.output_length for request in requests),
        }
        print(provenance["command"])
        print(machine.describe(provenance["machine"]))
        print("Workload {name}: {requests} requests, {prompt_tokens} + {output_tokens} tokens.".format(**totals))
        runs = jobs.run_all(of_variants, args.repeats)
    limit = limits.physical_limit(model, args.dtype, runs[names[0]][0].device)
    summaries = {name: summarize(measurements) for name, measurements in runs.items()}
    against = ratios(runs)
    pools = {name: job.engine["num_gpu_blocks_override"] for name, job in of_variants.items()}
    print(f"\nMedians of {args.repeats} runs (least-most); the ratio is of runs that followed each other.\n")
    print(show(summaries, against) + "\n")
    print(show_limit(limit, summaries, alone=len(requests) == 1))
    content = {
        **provenance,
        "model": {"name": args.model, **msgspec.to_builtins(model)},
        "workload": totals,
        "physical_limit": limit,
        "variants": {
            name: {
                "engine": of_variants[name].engine | {"model": args.model},
                "compression": msgspec.to_builtins(of_variants[name].compression),
                "summary": summaries[name],
                "runs": msgspec.to_builtins(measurements),
            }
            for name, measurements in runs.items()
        },
        "ratios": against,
    }
    report.write_json(args.output / "throughput.json", content)
    report.plot_timelines(
        args.output / "throughput.png",
        f"{args.model}, workload {Path(workload).name}: the first run of each variant",
        {name: measurements[0].timeline for name, measurements in runs.items()},
        list(pools.values()),
    )
    print(f"Written: {args.output / 'throughput.json'}, {args.output / 'throughput.png'}")


def main() -> None:
    try:
        benchmark(sys.argv[1:])
    except KvLLMError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
