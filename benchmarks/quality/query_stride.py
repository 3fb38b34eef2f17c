"""The cost and the savings of scoring a window with every s-th of its queries.

    python -m benchmarks.quality.query_stride

The query tokens of a recomputation do not depend on each other, so any subset of them is exact, and fewer cost less.
The script measures three things for each stride, on the problems of the demo: the share of the set kept with all
queries that the stride keeps, too (window by window, in the same state); the answers of an engine that runs with the
stride; and the time of an event. The figures go to query_stride.json, a plot to query_stride.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import mean
from typing import Any

import msgspec
import torch
from msgspec import structs

from benchmarks.common import command_line, machine, report
from benchmarks.common.internals import runner_of
from benchmarks.common.problem_sets import KARA, MAX_NUM_SEQS, MAX_TOKENS, ProblemSet, Run
from benchmarks.common.variants import Variant
from kvllm import LLM, SamplingParams
from kvllm.compression.queries import QueryTokens
from kvllm.config import require

STRIDES = (1, 2, 4, 8, 16)


class Overlap:
    """Stands in for the scores of an engine, and compares the choices of the strides with that from all queries."""

    def __init__(self, score: Any, choose: Any, retain: int, strides: Sequence[int]) -> None:
        self.score = score
        self.choose = choose
        self.retain = retain
        self.shares: dict[int, list[float]] = {stride: [] for stride in strides}

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor, *, buffer: int, **options: Any) -> torch.Tensor:
        scores = self.score(queries, keys, buffer=buffer, **options)
        kept = self.choose(scores, retain=self.retain, buffer=buffer, **options)
        scored = self.retain - buffer
        for stride, shares in self.shares.items():
            tokens = QueryTokens(recent=buffer, stride=stride).offsets(keys.shape[2])
            of_stride = self.score(queries[:, :, tokens], keys, buffer=buffer, **options)
            other = self.choose(of_stride, retain=self.retain, buffer=buffer, **options)
            # The buffer is always kept, so only the scored KV pairs count.
            found = (kept[..., :scored, None] == other[..., None, :scored]).any(-1)
            shares += found.float().mean(dim=(1, 2)).tolist()
        return scores


def overlaps(problem_set: ProblemSet, strides: Sequence[int]) -> dict[int, float]:
    """The share of the KV pairs kept with all queries that every s-th query keeps, over windows, layers and heads."""
    llm = LLM(compression=KARA, **problem_set.engine(Variant("overlap")))
    compressor = runner_of(llm).compressor
    assert compressor is not None  # Kara compresses
    selector = compressor.selector
    overlap = Overlap(selector.score, selector.choose, KARA.retained(selector.block_size), strides)
    selector.score = overlap
    llm.generate(
        [p.prompt for p in problem_set.problems], SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False
    )
    return {stride: mean(shares) for stride, shares in overlap.shares.items()}


def show(strides: Sequence[int], shares: dict[int, float], runs: dict[int, Run]) -> str:
    rows = []
    for stride in strides:
        run, measured = runs[stride], runs[stride].measurement
        per_window = 1e3 / max(1, measured.windows_compressed)
        rows.append(
            [
                str(stride),
                f"{shares[stride]:.1%}",
                f"{run.exact / len(run.grades):.1%}",
                f"{run.right / len(run.grades):.1%}",
                f"{measured.recompute_seconds * per_window:.2f}",
                f"{measured.score_seconds * per_window:.2f}",
                f"{measured.output_tokens_per_s:,.0f}",
            ]
        )
    header = ["stride", "kept as with\nall queries", "exact\nworkings", "right\nanswers", "recompute,\nms a window"]
    return report.table([*header, "score,\nms a window", "output\ntokens/s"], rows)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.make_parser("benchmarks.quality.query_stride", __doc__)
    add = parser.add_argument
    add("--strides", nargs="+", type=int, default=STRIDES, metavar="S", help="strides (default: 1 2 4 8 16)")
    add("--problems", type=int, default=96, metavar="N", help="number of problems (default 96)")
    add(
        "--max-num-seqs",
        type=int,
        default=MAX_NUM_SEQS,
        metavar="N",
        help=f"most sequences at once (default {MAX_NUM_SEQS})",
    )
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    require(args.problems >= 1, "--problems", args.problems, "at least 1")
    require(min(args.strides) >= 1, "--strides", args.strides, "at least 1 each")
    return args


def run_strides(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    problem_set = ProblemSet(args.problems, args.max_num_seqs, seed=1)
    provenance = machine.provenance("benchmarks.quality.query_stride", arguments)
    print(f"{machine.describe(provenance['machine'])}\n{problem_set.describe()}")
    shares = overlaps(problem_set, args.strides)
    problem_set.warm_up()
    runs = {
        stride: problem_set.run(Variant(f"stride {stride}", structs.replace(KARA, query_stride=stride)))
        for stride in args.strides
    }
    print(f"\n{show(args.strides, shares, runs)}")
    content = {
        stride: {
            "overlap": shares[stride],
            "exact_workings": run.exact,
            "right_answers": run.right,
            "measurement": msgspec.to_builtins(run.measurement),
        }
        for stride, run in runs.items()
    }
    report.write_json(args.output / "query_stride.json", {**provenance, "problems": args.problems, "strides": content})
    lines = {
        "kept as with all queries": (args.strides, [100 * shares[stride] for stride in args.strides]),
        "exact workings": (args.strides, [100 * runs[stride].exact / args.problems for stride in args.strides]),
    }
    report.plot_lines(args.output / "query_stride.png", "Kara with every s-th query", "stride", {"%": lines})
    print(f"Written: {args.output / 'query_stride.json'}, {args.output / 'query_stride.png'}")


def main() -> None:
    command_line.run_script(run_strides)


if __name__ == "__main__":
    main()
