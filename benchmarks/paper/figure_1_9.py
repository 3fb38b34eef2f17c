"""Running sequences and use of the KV pool over the steps of a run (figures 1 and 9 of the Kara paper).

    python -m benchmarks.paper.figure_1_9 --model DIR --prompts math500/test.jsonl
    python -m benchmarks.paper.figure_1_9 --preset cpu

The full cache, SnapKV by threshold, and KvLLM in its modes serve the same requests in the same KV pool, once each,
every run in a process of its own. The default preset has the paper's settings (appendix B.1) on the shape of its model,
with random weights. Prompts are random ids unless --prompts names a file. Every step goes to figure_1_9.json, the plot
to figure_1_9.png. Counts repeat exactly; times do not.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.common import command_line, engines, jobs, kara_paper, limits, report, runs
from benchmarks.common.measurement import Measurement

PRESETS: dict[str, runs.Preset] = {
    name: {**preset, "max_num_seqs": max(preset["max_num_seqs"])} for name, preset in kara_paper.PRESETS.items()
}


def table(titles: Mapping[str, str], measurements: Mapping[str, Measurement], limit: limits.PhysicalLimit) -> str:
    header = ["", "mean con-\ncurrency", "peak", "pool in\nuse, mean", "peak", "steps", "output\ntokens/s"]
    header += ["memory\nallows", "preemp-\ntions", "windows", "blocks\nreleased"]
    rows = []
    for name, run in measurements.items():
        allowed = limits.memory_limit(limit, run)
        rows.append(
            [
                titles[name],
                f"{run.mean_concurrency:.1f}",
                f"{run.peak_concurrency}",
                f"{run.mean_blocks / run.num_blocks:.0%}",
                f"{run.peak_blocks / run.num_blocks:.0%}",
                f"{run.steps:,}",
                f"{run.output_tokens_per_s:,.0f}",
                "no limit" if allowed is None else f"{allowed:,.0f}",
                f"{run.preemptions:,}",
                f"{run.windows_compressed:,}",
                f"{run.blocks_released:,}",
            ]
        )
    return report.table(header, rows)


def measure_figure(arguments: Sequence[str]) -> None:
    parser = runs.make_parser("benchmarks.paper.figure_1_9", __doc__, PRESETS)
    kara_paper.add_variant_arguments(parser)
    engines.add_engine_arguments(parser)("--max-num-seqs", type=int, help="most running sequences")
    args = runs.parse(parser, PRESETS, arguments)
    variants = kara_paper.chosen_variants(args)
    titles = {name: variant.name for name, variant in variants.items()}
    with tempfile.TemporaryDirectory() as directory:
        path, model = runs.find_model(args, Path(directory))
        workload, requests = runs.make_requests(args, path, model)
        of_variants = runs.make_jobs(args, variants, path, model, requests, [args.max_num_seqs])[args.max_num_seqs]
        totals = runs.totals(workload, requests)
        provenance = runs.announce("benchmarks.paper.figure_1_9", arguments, totals)
        measurements = {name: of_variant[0] for name, of_variant in jobs.run_all(of_variants, 1).items()}
    first = measurements[args.variants[0]]
    limit = limits.physical_limit(model, args.dtype, first.device)
    print(f"\nKV pool: {first.num_blocks} blocks of {args.block_size} tokens; {args.max_num_seqs} sequences at most.\n")
    print(table(titles, measurements, limit))
    print(f"\nPublished ({kara_paper.PAPER}): figures, whose numbers are not known.")
    print(limits.show_memory_limit(limit))
    content = {
        **provenance,
        "paper": kara_paper.PAPER,
        "model": {"name": args.model, **msgspec.to_builtins(model)},
        "workload": totals,
        "physical_limit": msgspec.to_builtins(limit),
        "variants": {
            name: {
                "name": titles[name],
                "engine": of_variants[name].engine | {"model": args.model},
                "compression": msgspec.to_builtins(of_variants[name].compression),
                "memory_limit_tokens_per_s": limits.memory_limit(limit, run),
                "run": msgspec.to_builtins(run),
            }
            for name, run in measurements.items()
        },
    }
    report.write_json(args.output / "figure_1_9.json", content)
    report.plot_timelines(
        args.output / "figure_1_9.png",
        f"{args.model}: at most {args.max_num_seqs} sequences, {first.num_blocks} blocks of {args.block_size}",
        {titles[name]: run.timeline for name, run in measurements.items()},
        [run.num_blocks for run in measurements.values()],
    )
    print(f"Written: {args.output / 'figure_1_9.json'}, {args.output / 'figure_1_9.png'}")


def main() -> None:
    command_line.run_script(measure_figure)


if __name__ == "__main__":
    main()
