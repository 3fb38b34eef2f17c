"""Survivors of each region of a text after repeated compression (figure 2 of the Kara paper).

    python -m benchmarks.paper.figure_2 --model DIR --prompts math500/test.jsonl
    python -m benchmarks.paper.figure_2 --preset cpu

Every method generates the same number of tokens for the same prompts, one run after the other. Meanwhile the script
follows the position in the text of every KV pair in the cache, for each layer and KV head. At the end it cuts the text,
prompt included, into equal regions, and gives two shares of each: the KV pairs that survive, and the layers and heads
that hold none of the region any more.

Kara and its ablations compress windows (1 block of 3, the prompt whole, "periodic"). All other methods compress the
whole cache at a threshold. --policy gives one policy to all methods, and leaves out those that it does not allow. The
figures go to figure_2.json, a plot to figure_2.png.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import torch
from torch import Tensor

from benchmarks.common import command_line, engines, kara_paper, report, runs
from benchmarks.common.internals import executor_of, replace_executor
from benchmarks.common.jobs import Job, make_engine, serve
from benchmarks.common.variants import Variant
from kvllm.compression.specs import SPECS, Compresses
from kvllm.config import CompressionConfig, require
from kvllm.core.executor import BlockingExecutor
from kvllm.core.policies import Periodic, Threshold
from kvllm.core.protocol import CompressionJob, StepPlan, StepResult
from kvllm.worker.inline import InlineExecutor

HOLE = -1
"""Stands for a position where a head keeps fewer KV pairs than it has slots."""
OWN, PERIODIC, THRESHOLD = "own", "periodic", "threshold"
KINDS: dict[str, Compresses] = {PERIODIC: "windows", THRESHOLD: "cache"}
METHODS = tuple(SPECS)
BY_WINDOWS = tuple(name for name, spec in SPECS.items() if name.startswith("kara") or spec.refusal("cache"))
PRESETS: dict[str, runs.Preset] = {
    "paper": {"model": "8b", "num_prompts": 4, "input_len": 128, "output_len": 8192, "block_size": 256},
    "cpu": {"model": runs.REASONER, "num_prompts": 2, "input_len": 64, "output_len": 512, "block_size": 32},
}


class PositionTracker(BlockingExecutor):
    """Runs plans, and follows the position in the text of every cached KV pair.

    positions: by sequence, int64 `[layers, kv_heads, kv_pairs]`, in the order of the cache. The positions of a sequence
        stay after its end. events: the number of times that each sequence was compressed.
    """

    def __init__(self, inner: InlineExecutor) -> None:
        self.inner = inner
        self.runner = inner.runner
        self.positions: dict[int, Tensor] = {}
        self.events: dict[int, int] = {}
        self._logical: dict[int, int] = {}
        self._moved: Tensor | None = None
        if self.runner.compressor:
            operations = self.runner.compressor.operations
            self._compact, operations.compact = operations.compact, self._record

    def _record(self, kept: Tensor, sources: Tensor, destinations: Tensor) -> None:
        self._moved = kept.cpu()
        self._compact(kept, sources, destinations)

    def close(self) -> None:
        self.inner.close()

    def execute(self, plan: StepPlan) -> StepResult:
        result = self.inner.execute(plan)
        for start in plan.new_seqs:
            self._logical[start.seq_id] = start.cached_length
            self.positions[start.seq_id] = self._text(0, start.cached_length)
            self.events[start.seq_id] = 0
        moving = [job for job in plan.compressions if job.destinations]
        for i, job in enumerate(moving):
            assert self._moved is not None
            self._compress(job, self._moved[:, i])
        for job in plan.compressions:
            if not job.destinations:  # whole blocks at the beginning are released
                self._compress(job, self._text(0, 0))
        for seq_id, num_tokens in plan.query_tokens():
            begin = self._logical[seq_id]
            self._logical[seq_id] = end = begin + num_tokens
            self.positions[seq_id] = torch.cat((self.positions[seq_id], self._text(begin, end)), dim=-1)
        return result

    def _text(self, begin: int, end: int) -> Tensor:
        shape = self.runner.cache.shape
        return torch.arange(begin, end).expand(shape.num_layers, shape.num_kv_heads, end - begin)

    def _compress(self, job: CompressionJob, kept: Tensor) -> None:
        """kept: `[layers, kv_heads, kv_pairs]`, offsets in the region, padded with -1."""
        positions = self.positions[job.seq_id]
        begin = job.first_block * self.runner.block_size
        end = min(positions.shape[-1], begin + job.region_blocks * self.runner.block_size)
        kept = kept[:, :, : end - begin - job.dropped]
        survivors = positions[:, :, begin:end].gather(-1, kept.clamp(min=0)).masked_fill(kept < 0, HOLE)
        self.positions[job.seq_id] = torch.cat((positions[:, :, :begin], survivors, positions[:, :, end:]), dim=-1)
        self.events[job.seq_id] += 1

    def length(self, seq_id: int) -> int:
        """Tokens of the text so far, evicted ones included."""
        return self._logical[seq_id]


def survivors_of_regions(positions: Tensor, length: int, regions: int) -> tuple[Tensor, Tensor]:
    """Count the survivors of each of `regions` equal parts of a text of `length` tokens.

    positions: int64 `[layers, kv_heads, kv_pairs]`, HOLE where there is none.
    Returns: the counts, int64 `[layers, kv_heads, regions]`, and the tokens of each region, int64 `[regions]`.
    """
    bounds = torch.tensor([length * i // regions for i in range(regions + 1)])
    index = torch.bucketize(positions.contiguous(), bounds[1:], right=True)
    index = index.masked_fill(positions == HOLE, regions)
    counts = torch.zeros(*positions.shape[:2], regions + 1, dtype=torch.int64)
    counts.scatter_add_(-1, index, torch.ones_like(index))
    return counts[..., :regions], bounds.diff()


def compression(args: argparse.Namespace, method: str) -> CompressionConfig:
    policy = (PERIODIC if method in BY_WINDOWS else THRESHOLD) if args.policy == OWN else args.policy
    eighth = args.block_size // 8
    options: Any = Periodic(window_blocks=3, period=args.block_size // 2)
    if policy == THRESHOLD:
        protects = SPECS[method].reselects
        options = Threshold(threshold_tokens=args.threshold, budget_tokens=args.budget, protect_prompt=protects)
    own = SPECS[method].own(chunk_budget=eighth, query_window=eighth)
    return CompressionConfig(method=method, method_options=own, policy=options, buffer=eighth)


def make_jobs(args: argparse.Namespace, path: Path, model: Any, requests: list[Any]) -> dict[str, Job]:
    if args.methods is None:
        allowed = [name for name, spec in SPECS.items() if args.policy == OWN or not spec.refusal(KINDS[args.policy])]
        methods = [name for name in allowed if not SPECS[name].reads_file]  # these need a file beside the model
    else:
        methods = args.methods
    command_line.require_unique("--methods", methods)
    options = argparse.Namespace(**vars(args), max_num_seqs=len(requests))
    return {
        name: engines.make_job(options, Variant(name, compression(args, name)), path, model, requests)
        for name in methods
    }


def follow(job: Job, regions: int) -> dict[str, Any]:
    """Run a job and report the survivors, on average over its sequences."""
    llm = make_engine(job)
    tracker = PositionTracker(executor_of(llm))
    replace_executor(llm, tracker)
    _, measurement = serve(llm, job.requests)
    counts, sizes = zip(
        *(survivors_of_regions(p, tracker.length(seq_id), regions) for seq_id, p in tracker.positions.items()),
        strict=True,
    )
    share = [(count / size).mean(dim=(0, 1)) for count, size in zip(counts, sizes, strict=True)]
    lost = [(count == 0).double().mean(dim=(0, 1)) for count in counts]
    return {
        "survivors": torch.stack(share).mean(0).tolist(),
        "lost": torch.stack(lost).mean(0).tolist(),
        "lost_of_all": torch.stack(lost).mean().item(),
        "kept_of_all": sum(int(count.sum()) for count in counts)
        / sum(int(size.sum()) * count[..., 0].numel() for count, size in zip(counts, sizes, strict=True)),
        "events_per_sequence": mean(tracker.events.values()),
        "mean_kv_bytes": measurement.mean_blocks * measurement.block_bytes,
    }


def table(results: dict[str, dict[str, Any]], figure: str, total: str, title: str) -> str:
    regions = len(next(iter(results.values()))[figure])
    header = [title, *(f"{100 * i // regions}-\n{100 * (i + 1) // regions}%" for i in range(regions)), "all", "events"]
    rows = []
    for name, result in results.items():
        shares = [f"{value:.0%}" for value in result[figure]]
        rows.append([name, *shares, f"{result[total]:.1%}", f"{result['events_per_sequence']:.1f}"])
    return report.table(header, rows)


def plot(path: Path, title: str, results: dict[str, dict[str, Any]]) -> None:
    def lines(figure: str) -> dict[str, report.Line]:
        return {
            name: ([100 * (i + 0.5) / len(r[figure]) for i in range(len(r[figure]))], [100 * v for v in r[figure]])
            for name, r in results.items()
        }

    panels = {"KV pairs that survive (%)": lines("survivors"), "layers and heads without any (%)": lines("lost")}
    report.plot_lines(path, title, "region of the text (%)", panels)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = runs.make_parser("benchmarks.paper.figure_2", __doc__, PRESETS)
    add = parser.add_argument
    allowed = f"default: all that --policy allows and that need no statistics, of {', '.join(METHODS)}"
    add("--methods", nargs="+", choices=METHODS, metavar="M", help=allowed)
    own = "own: periodic for Kara, its ablations and others that need it, else threshold"
    add("--policy", choices=(OWN, PERIODIC, THRESHOLD), default=OWN, help=own)
    add("--threshold", type=int, help="KV pairs at which a whole cache is compressed (default: 5 blocks)")
    add("--budget", type=int, help="KV pairs that are left then (default: 4 blocks and one KV pair)")
    add("--regions", type=int, default=10, help="number of equal parts of the text (default 10)")
    engines.add_engine_arguments(parser)
    args = runs.parse(parser, PRESETS, arguments)
    command_line.require_positive(args, "regions")
    require(args.block_size >= 8, "--block-size", args.block_size, "at least 8: buffers are an eighth of it")
    if args.threshold is None:
        args.threshold = 5 * args.block_size
    if args.budget is None:
        args.budget = 4 * args.block_size + 1
    return args


def draw_figure(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as directory:
        path, model = runs.find_model(args, Path(directory))
        workload, requests = runs.make_requests(args, path, model)
        shortest = min(request.kv_pairs for request in requests)
        require(args.regions <= shortest, "--regions", args.regions, f"at most the shortest text's {shortest} KV pairs")
        jobs = make_jobs(args, path, model, requests)
        totals = runs.totals(workload, requests)
        provenance = runs.announce("benchmarks.paper.figure_2", arguments, totals)
        for name, job in jobs.items():
            results[name] = follow(job, args.regions)
            print(f"{name}: {results[name]['events_per_sequence']:.1f} compressions of a sequence", flush=True)
    print(f"\n{table(results, 'survivors', 'kept_of_all', 'KV pairs that survive')}\n")
    print(table(results, "lost", "lost_of_all", "layers and heads without any"))
    print(f"\nPublished ({kara_paper.PAPER}): a figure, whose numbers are not known.")
    print(
        "The limit: the settings fix the share that is kept of all regions, so a method keeps more of one region only "
        "where\nit keeps less of another. Methods whose 'all' differ are not comparable."
    )
    content = {
        **provenance,
        "paper": kara_paper.PAPER,
        "model": {"name": args.model, **msgspec.to_builtins(model)},
        "workload": totals,
        "methods": {
            name: {"compression": msgspec.to_builtins(jobs[name].compression), **result}
            for name, result in results.items()
        },
    }
    report.write_json(args.output / "figure_2.json", content)
    plot(args.output / "figure_2.png", f"{args.model}: survivors of a text", results)
    print(f"Written: {args.output / 'figure_2.json'}, {args.output / 'figure_2.png'}")


if __name__ == "__main__":
    command_line.run_script(draw_figure)
