"""Throughput and latency over the number of sequences that may run at once (tables 2 and 3 of the Kara paper), and the
running sequences and the use of the KV pool over the steps (figures 1 and 9).

    python -m benchmarks.paper.tables_2_3 --model DIR --prompts math500/test.jsonl
    python -m benchmarks.paper.tables_2_3 --preset cpu

The full cache, SnapKV by threshold, and KvLLM in its modes serve the same requests in the same KV pool. All requests
arrive at the beginning. Every run is a process of its own, and the variants take turns. The default preset has the
paper's settings (appendix B.1) on the shape of its model, with random weights. Prompts are random ids unless --prompts
names a file. The figures go to tables_2_3.json, a plot to tables_2_3.png, the steps of the first runs with the most
sequences to figures_1_9.png. Counts repeat exactly; times do not.

Throughput has two definitions here, because the paper's figures mix them: output tokens over the time of the run, and
the mean over its steps of tokens / the step's time. The second weighs a long run's last, nearly empty steps as much as
full ones.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common import command_line, jobs, kara_paper, limits, report, runs, summary
from benchmarks.common.measurement import Measurement

PHASES = ("decode_seconds", "prefill_seconds", "recompute_seconds", "score_seconds", "compact_seconds")
Runs = dict[str, list[Measurement]]


class Row:
    """The runs of one variant at one number of sequences, and their gains over the first variant."""

    def __init__(self, of_variant: list[Measurement], limit: limits.PhysicalLimit) -> None:
        self.runs = of_variant
        self.summary = summary.summarize(of_variant)
        self.memory_limit = limits.memory_limit(limit, of_variant[0])
        self.gains: dict[str, dict[str, float]] = {}

    def median(self, figure: str, shape: str) -> str:
        return shape.format(self.summary[figure]["median"])

    def gain(self, figure: str) -> str:
        return f"{self.gains[figure]['median'] - 1:+.1%}" if self.gains else ""


def make_rows(of_variants: Runs, limit: limits.PhysicalLimit) -> dict[str, Row]:
    rows = {name: Row(measurements, limit) for name, measurements in of_variants.items()}
    for figure in ("output_tokens_per_s", "step_tokens_per_s"):
        for name, ratio in summary.ratios(of_variants, figure).items():
            rows[name].gains[figure] = ratio
    return rows


def throughput_table(titles: dict[str, str], rows: dict[str, Row]) -> str:
    header = ["throughput", "output\ntokens/s", "gain", "paper", "mean over\nsteps", "gain", "memory\nallows"]
    header += ["mean con-\ncurrency", "preemp-\ntions", "tokens re-\ncomputed", "events", "windows"]
    return report.table(
        header,
        [
            [
                titles[name],
                row.median("output_tokens_per_s", "{:,.0f}"),
                row.gain("output_tokens_per_s"),
                kara_paper.published_gain(name),
                row.median("step_tokens_per_s", "{:,.0f}"),
                row.gain("step_tokens_per_s"),
                "no limit" if row.memory_limit is None else f"{row.memory_limit:,.0f}",
                row.median("mean_concurrency", "{:.1f}"),
                *(
                    row.median(figure, "{:,.0f}")
                    for figure in ("preemptions", "tokens_recomputed", "compression_events", "windows_compressed")
                ),
            ]
            for name, row in rows.items()
        ],
    )


def latency_table(titles: dict[str, str], rows: dict[str, Row]) -> str:
    header = [
        "latency and phases, s",
        "mean",
        "99th per-\ncentile",
        "decode",
        "prefill",
        "recompute",
        "score",
        "compact",
    ]
    return report.table(
        [*header, "other load,\ncores"],
        [
            [
                titles[name],
                *(row.median(figure, "{:,.2f}") for figure in ("mean_latency", "p99_latency", *PHASES)),
                row.median("other_load", "{:.1f}"),
            ]
            for name, row in rows.items()
        ],
    )


def pool_table(titles: dict[str, str], rows: dict[str, Row]) -> str:
    header = ["running sequences and KV pool", "mean con-\ncurrency", "peak", "pool in\nuse, mean", "peak", "steps"]
    firsts = {name: row.runs[0] for name, row in rows.items()}
    return report.table(
        [*header, "blocks\nreleased"],
        [
            [
                titles[name],
                f"{run.mean_concurrency:.1f}",
                f"{run.peak_concurrency}",
                f"{run.mean_blocks / run.num_blocks:.0%}",
                f"{run.peak_blocks / run.num_blocks:.0%}",
                f"{run.steps:,}",
                f"{run.blocks_released:,}",
            ]
            for name, run in firsts.items()
        ],
    )


def plot(path: Path, model: str, titles: dict[str, str], tables: dict[int, dict[str, Row]]) -> None:
    def lines(figure: str) -> dict[str, report.Line]:
        return {
            title: (list(tables), [rows[name].summary[figure]["median"] for rows in tables.values()])
            for name, title in titles.items()
        }

    panels = {
        "output tokens/s": lines("output_tokens_per_s"),
        "tokens/s, mean over steps": lines("step_tokens_per_s"),
        "mean latency (s)": lines("mean_latency"),
        "99th percentile (s)": lines("p99_latency"),
    }
    report.plot_lines(path, f"{model}: throughput and latency", "most running sequences", panels)


def to_json(rows: dict[str, Row], jobs: dict[str, Any], model: str) -> dict[str, Any]:
    return {
        name: {
            "engine": jobs[name].engine | {"model": model},
            "compression": msgspec.to_builtins(jobs[name].compression),
            "published_gain": kara_paper.published_gain(name),
            "gains": row.gains,
            "memory_limit_tokens_per_s": row.memory_limit,
            "summary": row.summary,
            "runs": [
                {field: value for field, value in msgspec.to_builtins(run).items() if field != "timeline"}
                for run in row.runs
            ],
        }
        for name, row in rows.items()
    }


def measure_tables(arguments: Sequence[str]) -> None:
    args = kara_paper.parse_arguments("benchmarks.paper.tables_2_3", __doc__, arguments)
    variants = kara_paper.chosen_variants(args)
    titles = {name: variant.name for name, variant in variants.items()}
    tables: dict[int, dict[str, Row]] = {}
    limit: limits.PhysicalLimit | None = None
    with tempfile.TemporaryDirectory() as directory:
        path, model = runs.find_model(args, Path(directory))
        workload, requests = runs.make_requests(args, path, model)
        of_number = runs.make_jobs(args, variants, path, model, requests, args.max_num_seqs)
        totals = runs.totals(workload, requests)
        provenance = runs.announce("benchmarks.paper.tables_2_3", arguments, totals)
        pool = of_number[args.max_num_seqs[0]][args.variants[0]].engine["num_gpu_blocks_override"]
        print(f"KV pool: {pool} blocks of {args.block_size} tokens.", flush=True)
        for number in args.max_num_seqs:
            print(f"\nAt most {number} sequences at once")
            of_variants = jobs.run_all(of_number[number], args.repeats)
            limit = limit or limits.physical_limit(model, args.dtype, of_variants[args.variants[0]][0].device)
            tables[number] = rows = make_rows(of_variants, limit)
            for table in (throughput_table, latency_table, pool_table):
                print(f"\n{table(titles, rows)}", flush=True)
    print(
        f"\nMedians of {args.repeats} runs; gains are over {titles[args.variants[0]]}, of runs that follow each other."
    )
    print(f"'paper': {kara_paper.PAPER}; of its figures only this one is known, without its setting.")
    assert limit is not None  # at least one table was made
    print(limits.show_memory_limit(limit))
    content = {
        **provenance,
        "paper": kara_paper.PAPER,
        "model": {"name": args.model, **msgspec.to_builtins(model)},
        "workload": totals,
        "physical_limit": msgspec.to_builtins(limit),
        "variants": titles,
        "timelines": {name: row.runs[0].timeline for name, row in tables[max(tables)].items()},
        "tables": {str(number): to_json(rows, of_number[number], args.model) for number, rows in tables.items()},
    }
    report.write_json(args.output / "tables_2_3.json", content)
    plot(args.output / "tables_2_3.png", args.model, titles, tables)
    most = max(tables)
    firsts = {titles[name]: row.runs[0] for name, row in tables[most].items()}
    report.plot_timelines(
        args.output / "figures_1_9.png",
        f"{args.model}: at most {most} sequences, {pool} blocks of {args.block_size}",
        {title: run.timeline for title, run in firsts.items()},
        [run.num_blocks for run in firsts.values()],
    )
    print(f"Written: {args.output / 'tables_2_3.json'}, {args.output / 'tables_2_3.png'}, figures_1_9.png")


if __name__ == "__main__":
    command_line.run_script(measure_tables)
