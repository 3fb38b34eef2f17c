"""Survivors of each region of a text after repeated compression (figure 2 of the Kara paper).

    python -m benchmarks.paper.figure_2 --model DIR
    python -m benchmarks.paper.figure_2 --preset cpu

Every method generates the same number of tokens for the same prompts, one run after the other, and reports which KV
pairs of each layer and KV head are left. The script cuts the text, prompt included, into equal regions, and gives the
share of the KV pairs of each that survive.

Kara and its ablations compress windows (1 block of 3, the prompt whole, "periodic"). All other methods compress the
whole cache at a threshold, from 5 blocks to 4 and one KV pair. Prompts are random ids, or the reasoner's problems. The
figures go to figure_2.json, a plot to figure_2.png.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from benchmarks.common import command_line, jobs, machine, report, shapes, workloads
from benchmarks.common.jobs import Job
from benchmarks.common.variants import Variant
from benchmarks.common.workloads import Request
from benchmarks.paper import settings
from benchmarks.reasoner.tokenizer import encode
from kvllm import LLM
from kvllm.compression.specs import SPECS
from kvllm.config import CompressionConfig, require
from kvllm.core.policies import Periodic, Threshold
from kvllm.core.protocol import KeptPairs
from kvllm.models.config import load_model_config

METHODS = tuple(SPECS)
DEFAULT = tuple(name for name, spec in SPECS.items() if not spec.reads_file)
"""Without those that need a file beside the model."""
LINES = (26, 40)
"""Fewest and most lines of the reasoner's programs."""
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"model": "8b", "num_prompts": 4, "input_len": 128, "output_len": 8192, "block_size": 256},
    "cpu": {"model": shapes.REASONER, "num_prompts": 2, "input_len": 64, "output_len": 512, "block_size": 32},
}


def left_of(reports: Sequence[KeptPairs], shape: tuple[int, ...]) -> Tensor:
    """Which KV pairs of a text are left after the compressions that are reported: bool `[layers, kv_heads, tokens]`."""
    left = torch.ones(shape, dtype=torch.bool)
    for each in reports:
        rows = np.array([[np.frombuffer(head, dtype=np.uint8) for head in heads] for heads in each.bits])
        bits = np.unpackbits(rows, axis=-1, bitorder="little", count=each.end - each.first)
        left[each.layers, :, each.first : each.end] = torch.from_numpy(bits.astype(bool))
    return left


def compression(method: str, block_size: int) -> CompressionConfig:
    eighth = block_size // 8
    policy: Any = Periodic(window_blocks=3, period=block_size // 2)
    if not (method.startswith("kara") or SPECS[method].refusal("cache")):
        cut = {"threshold_tokens": 5 * block_size, "budget_tokens": 4 * block_size + 1}
        policy = Threshold(**cut, protect_prompt=SPECS[method].reselects)
    own = SPECS[method].own(chunk_budget=eighth, query_window=eighth)
    return CompressionConfig(method=method, method_options=own, policy=policy, buffer=eighth)


def make_requests(args: argparse.Namespace, vocab_size: int) -> list[Request]:
    if args.model == shapes.REASONER:
        problems = settings.make_problems(args.num_prompts, LINES, args.seed)
        return [Request(encode(problem.prompt), args.output_len) for problem in problems]
    lengths = [(args.input_len, args.output_len)] * args.num_prompts
    return workloads.random_requests(random.Random(args.seed), lengths, vocab_size)


def make_jobs(args: argparse.Namespace, path: Path) -> dict[str, Job]:
    requests = make_requests(args, load_model_config(path).vocab_size)
    variants = [Variant(name, compression(name, args.block_size)) for name in args.methods]
    number = len(requests)
    return {each.name: jobs.make_job(args, each, path, requests, number, number) for each in variants}


def follow(job: Job, regions: int) -> dict[str, Any]:
    """Run a job and report the survivors, on average over its sequences."""
    llm = LLM(job.model, compression=job.compression, **job.engine)
    prompts, params = workloads.prompts_of(job.requests)
    asking = [msgspec.structs.replace(each, report_kept_pairs=True) for each in params]
    outputs, shape = llm.generate(prompts, asking, use_tqdm=False), llm.cache_shape
    left = [
        left_of(output.metrics.kept_pairs, (shape.num_layers, shape.num_kv_heads, request.kv_pairs))
        for output, request in zip(outputs, job.requests, strict=True)
    ]
    bounds = [[each.shape[-1] * i // regions for i in range(1, regions)] for each in left]
    shares = [
        [part.float().mean().item() for part in each.tensor_split(at, -1)]
        for each, at in zip(left, bounds, strict=True)
    ]
    return {
        "survivors": [mean(of_region) for of_region in zip(*shares, strict=True)],
        "kept_of_all": sum(int(each.sum()) for each in left) / sum(each.numel() for each in left),
        "events_per_sequence": mean(len(output.metrics.kept_pairs) for output in outputs),
        "compression": msgspec.to_builtins(job.compression),
    }


def show(results: dict[str, dict[str, Any]], regions: int) -> str:
    parts = [f"{100 * i // regions}-\n{100 * (i + 1) // regions}%" for i in range(regions)]
    rows = []
    for name, result in results.items():
        shares = [f"{value:.0%}" for value in result["survivors"]]
        rows.append([name, *shares, f"{result['kept_of_all']:.1%}", f"{result['events_per_sequence']:.1f}"])
    return report.table(["KV pairs that survive", *parts, "all", "events"], rows)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.paper.figure_2", __doc__)
    jobs.add_engine_arguments(parser)
    add = parser.add_argument
    add("--preset", choices=tuple(PRESETS), default="paper", help="defaults of the other options")
    add("--num-prompts", type=int, help="texts")
    add("--input-len", type=int, help="tokens of a prompt of random ids")
    add("--output-len", type=int, help="tokens generated for every prompt")
    allowed = f"default: all that need no statistics, of {', '.join(METHODS)}"
    add("--methods", nargs="+", choices=METHODS, default=DEFAULT, metavar="M", help=allowed)
    add("--regions", type=int, default=10, help="number of equal parts of the text (default 10)")
    command_line.add_output_argument(parser)
    parser.set_defaults(**PRESETS[parser.parse_known_args(arguments)[0].preset])
    args = parser.parse_args(arguments)
    command_line.require_positive(args, "num_prompts", "input_len", "regions")
    require(args.output_len >= args.regions, "--output-len", args.output_len, f"at least --regions={args.regions}")
    require(args.block_size >= 8, "--block-size", args.block_size, "at least 8: buffers are an eighth of it")
    return args


def draw_figure(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as directory:
        of_methods = make_jobs(args, shapes.find_model(args.model, Path(directory)))
        provenance = machine.announce("benchmarks.paper.figure_2", arguments)
        for name, job in of_methods.items():
            results[name] = follow(job, args.regions)
            print(f"{name}: {results[name]['events_per_sequence']:.1f} compressions of a sequence", flush=True)
    print(f"\n{show(results, args.regions)}")
    print(f"\nPublished ({settings.PAPER}): a figure, whose numbers are not known.")
    print("The settings fix the share that is kept of all regions. Methods whose 'all' differ are not comparable.")
    report.write_json(args.output / "figure_2.json", {**provenance, "model": args.model, "methods": results})
    middles = [100 * (i + 0.5) / args.regions for i in range(args.regions)]
    lines = {name: report.Line(middles, [100 * share for share in r["survivors"]]) for name, r in results.items()}
    panels = {"KV pairs that survive (%)": lines}
    report.plot_lines(args.output / "figure_2.png", f"{args.model}: a text", "region of the text (%)", panels)
    print(f"Written: {args.output / 'figure_2.json'}, {args.output / 'figure_2.png'}")


if __name__ == "__main__":
    command_line.run_script(draw_figure)
