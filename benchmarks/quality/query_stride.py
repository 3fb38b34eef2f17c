"""What it costs, and what it saves, to score a window with every s-th of its queries.

    python -m benchmarks.quality.query_stride

Query rows of a recomputation do not depend on each other, so any subset of them is exact; fewer rows cost less. On the
problems of the demo this measures, for each stride: how much of the set kept with all queries is kept (windows in the
same state, compared one by one), what becomes of the answers when the engine runs with the stride, and the time of an
event. The figures go to query_stride.json and a plot to query_stride.png.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import torch
from msgspec import structs

from benchmarks.common import machine, report
from benchmarks.common.problem_sets import KARA, MAX_NUM_SEQS, MAX_TOKENS, ProblemSet, Run
from benchmarks.common.variants import Variant
from kvllm import LLM, SamplingParams
from kvllm.compression.queries import QueryTokens
from kvllm.config import require
from kvllm.errors import KvLLMError

STRIDES = (1, 2, 4, 8, 16)


class Overlap:
    """Stands in for the selection of an engine: chooses as it would, and compares what the strides would choose."""

    def __init__(self, select: Any, strides: Sequence[int]) -> None:
        self.select = select
        self.shares: dict[int, list[float]] = {stride: [] for stride in strides}

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor, *, retain: int, buffer: int, **options: Any) -> Any:
        kept = self.select(queries, keys, retain=retain, buffer=buffer, **options)
        scored = retain - buffer
        for stride, shares in self.shares.items():
            tokens = QueryTokens(recent=buffer, stride=stride).offsets(keys.shape[2])
            other = self.select(queries[:, :, tokens], keys, retain=retain, buffer=buffer, **options)
            # The buffer is kept in any case: only the scored entries count.
            found = (kept[..., :scored, None] == other[..., None, :scored]).any(-1)
            shares += found.float().mean(dim=(1, 2)).tolist()
        return kept


def overlaps(problem_set: ProblemSet, strides: Sequence[int]) -> dict[int, float]:
    """Share of the entries kept with all queries that are kept with every s-th, over all windows, layers and heads."""
    llm = LLM(compression=KARA, **problem_set.engine(Variant("overlap")))
    compressor = llm.llm_engine.executor.runner.compressor  # pyright: ignore[reportAttributeAccessIssue]
    compressor.select = Overlap(compressor.select, strides)
    llm.generate(
        [p.prompt for p in problem_set.problems], SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False
    )
    return {stride: mean(shares) for stride, shares in compressor.select.shares.items()}


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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality.query_stride",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--strides", nargs="+", type=int, default=STRIDES, metavar="S", help="default: 1 2 4 8 16")
    add("--problems", type=int, default=96, metavar="N", help="how many problems to solve (default 96)")
    add("--max-num-seqs", type=int, default=MAX_NUM_SEQS, metavar="N", help=f"at once (default {MAX_NUM_SEQS})")
    add("--output", type=Path, default=Path("benchmark-output"), metavar="DIR")
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
    try:
        run_strides(sys.argv[1:])
    except KvLLMError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
