"""Presets, models, requests and jobs of the scripts for the paper's tables and figures.

The paper's settings (appendix B.1) are the defaults. It leaves two open, the lengths of the answers and the size of the
KV pool. These are assumptions, and the output of every script names them: answers are lognormal with a long tail.
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Mapping, Sequence
from math import exp, log
from pathlib import Path
from statistics import quantiles
from typing import Any

import msgspec

from benchmarks.common import command_line, engines, machine, shapes, workloads
from benchmarks.common.jobs import Job
from benchmarks.common.measurement import Measurement
from benchmarks.common.summary import summarize
from benchmarks.common.variants import Variant
from benchmarks.common.workloads import Request
from benchmarks.reasoner.tasks import make_problem
from benchmarks.reasoner.tokenizer import encode
from kvllm.config import require
from kvllm.engine_args import DEFAULT_MODEL
from kvllm.errors import ConfigError
from kvllm.models.config import ModelConfig, load_model_config
from kvllm.tokenizer import has_tokenizer, load_tokenizer

REASONER = "reasoner"
LINES = (26, 40)
"""Fewest and most lines of the reasoner's programs."""
Preset = dict[str, Any]


# Arguments


def make_parser(module: str, description: str | None, presets: Mapping[str, Preset]) -> argparse.ArgumentParser:
    """A parser with the arguments that all of these scripts have."""
    parser = command_line.make_parser(module, description)
    parser.epilog = "--model also takes a config.json, for random weights, and 'reasoner', the model of the package."
    add = parser.add_argument
    add("--preset", choices=tuple(presets), default=next(iter(presets)), help="defaults of the other options")
    command_line.add_output_argument(parser)
    engines.add_model_arguments(parser)
    add = parser.add_argument_group("requests").add_argument
    add("--num-prompts", type=int, help="requests")
    add("--input-len", type=int, help="tokens of a prompt of random ids")
    add("--prompts", type=Path, metavar="FILE", help="JSONL with a prompt in each line, instead of random ids")
    add("--field", default="problem", help="field of a line of --prompts that holds the text (default: problem)")
    add("--output-len", type=int, help="tokens generated for every prompt; default: lognormal lengths")
    add("--output-median", type=int, help="median of the lognormal lengths")
    add("--output-sigma", type=float, help="standard deviation of their logarithm: a larger one gives a longer tail")
    add("--max-output-len", type=int, help="most tokens of an output")
    add("--seed", type=int, default=0)
    parser.set_defaults(max_model_len=None)  # the longest request
    return parser


def parse(
    parser: argparse.ArgumentParser, presets: Mapping[str, Preset], arguments: Sequence[str]
) -> argparse.Namespace:
    """The arguments, over the defaults of their preset. Raises ConfigError for numbers that describe no requests."""
    preset = parser.parse_known_args(arguments)[0].preset
    parser.set_defaults(**presets[preset])
    args = parser.parse_args(arguments)
    command_line.require_positive(args, "num_prompts", "input_len", "output_len", "output_median", "max_output_len")
    require(args.output_sigma is None or args.output_sigma >= 0, "--output-sigma", args.output_sigma, "at least 0")
    return args


# Models and requests


def find_model(args: argparse.Namespace, directory: Path) -> tuple[Path, ModelConfig]:
    """The checkpoint that `--model` names: a directory, "reasoner" (the package's model), a shape, or a config.json.

    Shapes and configs have random weights. Their files are written to `directory`.
    """
    if args.model in shapes.SHAPES:
        path = shapes.named_shape(args.model, directory)
    elif args.model == REASONER:
        path = DEFAULT_MODEL
    elif Path(args.model).is_file():
        path, args.load_format = directory, "dummy"
        shutil.copyfile(args.model, directory / "config.json")
    else:
        path = Path(args.model).resolve()
    return path, load_model_config(path)


def make_requests(args: argparse.Namespace, path: Path, model: ModelConfig) -> tuple[str, list[Request]]:
    """A description of the requests, and the requests: prompts of a file, the reasoner's problems, or random ids.

    Raises ConfigError if a request is longer than the model allows.
    """
    rng = random.Random(args.seed)
    if args.prompts:
        if not has_tokenizer(path):
            raise ConfigError(f"--prompts needs a tokenizer, and {args.model} has none: leave it out for random ids")
        tokenizer = load_tokenizer(path)
        texts = workloads.read_prompts(args.prompts, args.field, args.num_prompts)
        lengths = output_lengths(args, rng, len(texts))
        requests = [Request(tokenizer.encode(text), n) for text, n in zip(texts, lengths, strict=True)]
        name = f"{args.prompts}: {args.field}, {_describe_lengths(args)}"
    elif args.model == REASONER:
        requests = _problems(args, rng)
        name = "the reasoner's problems, " + (
            "as many tokens as a right working has" if args.output_len is None else _describe_lengths(args)
        )
    else:
        lengths = [(args.input_len, n) for n in output_lengths(args, rng, args.num_prompts)]
        requests = workloads.random_requests(rng, lengths, model.vocab_size)
        name = f"{args.input_len} random ids each, {_describe_lengths(args)}"
    engines.check_lengths(args, model, requests)
    return name, requests


def output_lengths(args: argparse.Namespace, rng: random.Random, count: int) -> list[int]:
    """Tokens to generate for each request: the same for all, or drawn from a lognormal distribution.

    A length is exp(N(log median, sigma^2)), rounded, at least 1 and at most `--max-output-len`. The mean before that
    cut is median * exp(sigma^2 / 2). With sigma 0.8, one answer in a hundred is more than six times as long as the
    median.
    """
    if args.output_len is not None:
        return [args.output_len] * count
    drawn = [exp(rng.gauss(log(args.output_median), args.output_sigma)) for _ in range(count)]
    return [min(args.max_output_len, max(1, round(length))) for length in drawn]


def _describe_lengths(args: argparse.Namespace) -> str:
    if args.output_len is not None:
        return f"{args.output_len} output tokens each"
    return (
        f"lognormal output lengths (assumed: median {args.output_median}, sigma {args.output_sigma}, "
        f"at most {args.max_output_len})"
    )


def _problems(args: argparse.Namespace, rng: random.Random) -> list[Request]:
    problems = [make_problem(rng, rng.randint(*LINES)) for _ in range(args.num_prompts)]
    return [
        Request(encode(problem.prompt), args.output_len or len(encode(problem.working)) + 1) for problem in problems
    ]


def totals(name: str, requests: Sequence[Request]) -> dict[str, Any]:
    """The entry of a report about its requests."""
    lengths = sorted(request.output_length for request in requests)
    return {
        "name": name,
        "requests": len(requests),
        "prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
        "output_tokens": sum(lengths),
        "output_length_deciles": quantiles(lengths, n=10, method="inclusive") if len(lengths) > 1 else lengths,
        "longest_output": lengths[-1],
    }


def entry(job: Job, model: str, measured: Sequence[Measurement]) -> dict[str, Any]:
    """The entry of a report about a variant."""
    return {
        "engine": job.engine | {"model": model},
        "compression": msgspec.to_builtins(job.compression),
        "summary": summarize(measured),
        "runs": msgspec.to_builtins(measured),
    }


def announce(module: str, arguments: Sequence[str], requests: Mapping[str, Any]) -> dict[str, Any]:
    """Print the command, the machine and the requests. Returns the provenance for the report."""
    provenance = machine.announce(module, arguments)
    print(
        "Workload: {name}: {requests} requests, {prompt_tokens} + {output_tokens} tokens, the longest output "
        "{longest_output}.".format(**requests),
        flush=True,
    )
    return provenance


def make_jobs(
    args: argparse.Namespace,
    variants: Mapping[str, Variant],
    path: Path,
    model: ModelConfig,
    requests: list[Request],
    max_num_seqs: Sequence[int],
) -> dict[int, dict[str, Job]]:
    """Jobs by most running sequences and by variant, all with the same pool.

    A pool that is a share of the demand goes by the largest of `max_num_seqs`.
    """
    for number in max_num_seqs:
        require(number >= 1, "--max-num-seqs", number, "at least 1")
    require(args.block_size >= 1, "--block-size", args.block_size, "between 1 and 256")
    options = argparse.Namespace(**vars(args))
    largest = {"block_size": args.block_size, "max_num_seqs": max(max_num_seqs), "dtype": args.dtype}
    options.num_gpu_blocks_override = engines.pool_blocks(args, largest, model, requests)
    jobs: dict[int, dict[str, Job]] = {}
    for number in max_num_seqs:
        options.max_num_seqs = number
        jobs[number] = {
            name: engines.make_job(options, variant, path, model, requests) for name, variant in variants.items()
        }
    return jobs
