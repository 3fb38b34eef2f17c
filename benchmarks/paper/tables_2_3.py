"""Throughput and latency over the number of sequences that may run at once (tables 2 and 3 of the Kara paper), and the
running sequences and the use of the KV pool over the steps (figures 1 and 9).

    python -m benchmarks.paper.tables_2_3
    python -m benchmarks.paper.tables_2_3 --preset cpu

The full cache, SnapKV by threshold, and KvLLM in its modes serve the same requests in the same KV pool. All requests
arrive at the beginning. Every run is a process of its own, and the variants take turns. The default preset has the
paper's settings (appendix B.1) on the shape of its model, with random weights and prompts of random ids. The paper does
not tell the lengths of answers, which are lognormal here, nor the size of the pool. The figures go to tables_2_3.json,
the steps of the first runs with the most sequences to figures_1_9.png. Counts repeat exactly; times do not.

Throughput has two definitions here, because the paper's figures mix them: output tokens over the time of the run, and
the mean over its steps of tokens / the step's time. The second weighs a long run's last, nearly empty steps as much as
full ones.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from typing import Any

from benchmarks.common import command_line, jobs, machine, report, shapes, summary, workloads
from benchmarks.common.measurement import Measurement
from benchmarks.common.variants import Variant
from benchmarks.paper import settings
from kvllm import CompressionConfig
from kvllm.config import require
from kvllm.models.config import load_model_config

PAPER: dict[str, Any] = {
    "model": "8b",
    "num_prompts": 500,
    "input_len": 128,
    "output_median": 2048,
    "output_sigma": 0.8,
    "max_output_len": 8192,
    "block_size": 256,
    "max_num_seqs": [16, 32, 64, 128, 256],
    "pool_fraction": 0.5,
    "repeats": 3,
}
CPU = {"model": "50m", "num_prompts": 24, "input_len": 64, "block_size": 64, "max_num_seqs": [8, 16], "repeats": 1}
CPU |= {"output_median": 256, "output_sigma": 0.6, "max_output_len": 768}
PRESETS = {"paper": PAPER, "cpu": PAPER | CPU}
THROUGHPUT = ("output_tokens_per_s", "step_tokens_per_s")
COUNTS = ("mean_concurrency", "preemptions", "tokens_recomputed", "compression_events", "windows_compressed")
SECONDS = ("mean_latency", "p99_latency", "decode_seconds", "prefill_seconds", "recompute_seconds", "score_seconds")
SECONDS += ("compact_seconds", "other_load")
Runs = dict[str, list[Measurement]]


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.paper.tables_2_3", __doc__)
    jobs.add_engine_arguments(parser)
    add = parser.add_argument
    add("--preset", choices=tuple(PRESETS), default="paper", help="defaults of the other options")
    add("--num-prompts", type=int, help="requests")
    add("--input-len", type=int, help="tokens of a prompt")
    add("--output-median", type=int, help="of the tokens of an answer")
    add("--output-sigma", type=float, help="standard deviation of their logarithm: a larger one gives a longer tail")
    add("--max-output-len", type=int, help="most tokens of an answer")
    add("--max-num-seqs", type=int, nargs="+", help="most running sequences; each number gets a table")
    names = tuple(paper_variants(256))
    add("--variants", nargs="+", choices=names, default=names, metavar="V", help=", ".join(names))
    add("--repeats", type=int, help="runs of each variant")
    command_line.add_output_argument(parser)
    parser.set_defaults(**PRESETS[parser.parse_known_args(arguments)[0].preset])
    args = parser.parse_args(arguments)
    command_line.require_positive(args, "num_prompts", "input_len", "output_median", "max_output_len", "repeats")
    require(args.block_size >= 8, "--block-size", args.block_size, "at least 8: the paper's numbers are scaled by it")
    return args


def paper_variants(block_size: int) -> dict[str, Variant]:
    """The variants of the paper, and the modes of KvLLM, by their names on the command line.

    The paper's numbers are for blocks of 256 tokens, and scaled to other sizes: KvLLM keeps 257 of 768 KV pairs every
    128 steps, with a buffer of 32.
    """

    def kara(title: str, **options: Any) -> Variant:
        eighths = {"period": block_size // 2, "buffer": block_size // 8, "chunk_budget": block_size // 8}
        return Variant(title, CompressionConfig(method="kara", **settings.WINDOWS | eighths | options))

    kept, window = block_size + 1, 3 * block_size
    return {
        "vanilla": Variant("vanilla"),
        "snapkv": Variant(f"SnapKV, {5 * block_size} to {4 * block_size + 1}", settings.snapkv(block_size)),
        "periodic": kara(f"KvLLM periodic, {kept} of {window}", retain_tokens=kept),
        "periodic-blocks": kara("KvLLM periodic, 1 block of 3"),
        "pressure": kara("KvLLM pressure, 1 block of 3", policy="pressure"),
    }


def output_lengths(args: argparse.Namespace, rng: random.Random) -> list[int]:
    """exp(N(log median, sigma^2)), rounded, at least 1 and at most `--max-output-len`. With sigma 0.8, one answer in a
    hundred is more than six times as long as the median."""
    drawn = [exp(rng.gauss(log(args.output_median), args.output_sigma)) for _ in range(args.num_prompts)]
    return [min(args.max_output_len, max(1, round(length))) for length in drawn]


# The tables of one number of sequences


def show(runs: Runs, published: dict[str, str]) -> str:
    """Medians; gains are over the first variant. published: the paper's gains by variant."""
    gains = {figure: summary.ratios(runs, figure) for figure in THROUGHPUT}
    summaries = {name: summary.summarize(measured) for name, measured in runs.items()}

    def medians(name: str, figures: Sequence[str], shape: str) -> list[str]:
        return [shape.format(summaries[name][figure]["median"]) for figure in figures]

    throughput, latency = [], []
    for name in runs:
        row = [name]
        for figure in THROUGHPUT:
            gain = gains[figure].get(name)
            row += [*medians(name, [figure], "{:,.0f}"), f"{gain['median'] - 1:+.1%}" if gain else ""]
        throughput.append([*row, published.get(name, ""), *medians(name, COUNTS, "{:,.0f}")])
        latency.append([name, *medians(name, SECONDS, "{:,.2f}")])
    header = ["throughput", "output\ntokens/s", "gain", "mean over\nsteps", "gain", "paper", "mean con-\ncurrency"]
    header += ["preemp-\ntions", "tokens re-\ncomputed", "events", "windows"]
    phases = ["mean", "99th per-\ncentile", "decode", "prefill", "recompute", "score", "compact", "other load,\ncores"]
    return f"{report.table(header, throughput)}\n\n{report.table(['latency and phases, s', *phases], latency)}"


def measure_tables(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    variants, rng = paper_variants(args.block_size), random.Random(args.seed)
    chosen = [variants[name] for name in args.variants]
    published, most = {variants["periodic"].name: settings.GAIN}, max(args.max_num_seqs)
    with tempfile.TemporaryDirectory() as directory:
        path = shapes.find_model(args.model, Path(directory))
        lengths = [(args.input_len, length) for length in output_lengths(args, rng)]
        requests = workloads.random_requests(rng, lengths, load_model_config(path).vocab_size)
        of_number = {
            number: {each.name: jobs.make_job(args, each, path, requests, number, most) for each in chosen}
            for number in args.max_num_seqs
        }
        provenance = machine.announce("benchmarks.paper.tables_2_3", arguments)
        print(f"{len(lengths)} requests, {sum(output for _, output in lengths):,} output tokens")
        tables: dict[int, Runs] = {}
        for number, of_variants in of_number.items():
            print(f"\nAt most {number} sequences at once", flush=True)
            tables[number] = jobs.run_all(of_variants, args.repeats)
            print(f"\n{show(tables[number], published)}", flush=True)
    print(f"\nMedians of {args.repeats} runs; gains are over {chosen[0].name}, of runs that follow each other.")
    print(f"'paper': {settings.PAPER}; of its figures only this one is known, without its setting.")
    content = {
        **provenance,
        "paper": settings.PAPER,
        "workload": workloads.totals("lognormal output lengths", requests),
        "tables": {
            number: {name: summary.entry(job, args.model, tables[number][name]) for name, job in of_variants.items()}
            for number, of_variants in of_number.items()
        },
    }
    report.write_json(args.output / "tables_2_3.json", content)
    firsts = {name: measured[0] for name, measured in tables[most].items()}
    report.plot_timelines(
        args.output / "figures_1_9.png",
        f"{args.model}: at most {most} sequences",
        {name: run.timeline for name, run in firsts.items()},
        [run.num_blocks for run in firsts.values()],
    )
    print(f"Written: {args.output / 'tables_2_3.json'}, {args.output / 'figures_1_9.png'}")


if __name__ == "__main__":
    command_line.run_script(measure_tables)
