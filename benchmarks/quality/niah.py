"""A needle in a haystack: facts that are found again in a long prompt that is compressed.

    python -m benchmarks.quality.niah
    python -m benchmarks.quality.niah --question-after

Each depth of the needle and each length of the prompt has several problems: sentences that say nothing, one sentence
that gives a name its value, and then the question for that name (benchmarks/reasoner/recall.py). Prompts are compressed
as soon as they are computed. Kara runs first, window by window. The KV pairs that it holds at the end of a question are
the budget to which each baseline cuts the whole cache. So all methods answer with the same memory.

The question comes with the prompt, as in the paper. Methods that score with the last queries then see the question
before they choose. Kara's windows end before the question, except for the last one, so Kara scores the rest of the text
without it. With --question-after no method sees the question: the prompt is compressed first, and the question follows
token by token. With --recall-bound or --recall-period dropped KV pairs come back where they are attended.

The figures go to niah.json, a heat map for each method to niah.png.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import msgspec
from matplotlib.figure import Figure

from benchmarks.common import accuracy, command_line, compressions, intervals, machine, report
from benchmarks.common.progress import show_progress
from benchmarks.common.trials import REASONER, Outcome, Trial, event_seconds
from benchmarks.reasoner.problems import Problem, grade
from benchmarks.reasoner.recall import hide
from benchmarks.reasoner.tasks import TASKS
from kvllm import LLM, SamplingParams
from kvllm.comparison.teacher_forcing import TeacherForcing
from kvllm.compression.specs import SPECS
from kvllm.config import require
from kvllm.tokenizer import Tokenizer, load_tokenizer

FULL, KARA = "full cache", "kara"
OTHERS = (
    "kara_sharp",
    "kvzip",
    "chunkkv",
    "adakv",
    "snapkv",
    "pyramidkv",
    "rkv",
    "keydiff",
    "streaming",
    "h2o",
    "random",
)
SENTENCES = (10, 20, 40, 80, 140, 210, 280)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 0.9)
"""In training a needle hardly ever stands right before the question, so at 1.0 the full cache fails, too."""
SPARE = 16
"""Tokens that an answer may have more than the right one."""


class Needle(NamedTuple):
    """One problem: its cell of the grid, and the token ids of the text that is compressed and of the question."""

    row: int
    column: int
    problem: Problem
    haystack: list[int]
    question: list[int]

    @property
    def length(self) -> int:
        return len(self.haystack) + len(self.question)


def make_needles(args: argparse.Namespace, tokenizer: Tokenizer) -> list[Needle]:
    rng = random.Random(f"needles/{args.seed}")
    needles = []
    for row, depth in enumerate(args.depths):
        for column, sentences in enumerate(args.sentences):
            for _ in range(args.problems):
                problem = hide(rng, sentences, [depth])
                text, mark, question = problem.prompt.rpartition("\n?")
                rest = tokenizer.encode(mark + question, add_special_tokens=False)
                needles.append(Needle(row, column, problem, tokenizer.encode(text), rest))
    return needles


# One trial


def run(args: argparse.Namespace, trial: Trial, needles: Sequence[Needle], tokenizer: Tokenizer) -> Outcome:
    """Answer all questions greedily. `--question-after` makes each question the forced beginning of its answer."""
    limits = [len(tokenizer.encode(needle.problem.working, add_special_tokens=False)) + SPARE for needle in needles]
    if args.question_after:
        prompts, forced = [needle.haystack for needle in needles], [needle.question for needle in needles]
    else:
        prompts, forced = [needle.haystack + needle.question for needle in needles], [[] for _ in needles]
    llm = LLM(
        accuracy.path_of(args),
        dtype=accuracy.dtype_of(args),
        block_size=trial.block_size,
        max_num_seqs=min(args.max_num_seqs, len(needles)),
        max_model_len=max(needle.length + limit for needle, limit in zip(needles, limits, strict=True)),
        compression=trial.compression,
        kv_offloading_size=trial.kv_offloading_size,
    )
    params = [
        SamplingParams(temperature=0, max_tokens=len(given) + limit, budget_tokens=budget)
        for given, limit, budget in zip(forced, limits, trial.budgets or [None] * len(needles), strict=True)
    ]
    begin, cpu_begin = time.perf_counter(), time.process_time()
    with show_progress(llm, trial.name, len(needles)):
        outputs = TeacherForcing(llm).feed(prompts, forced, params)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    answers = [output.outputs[0].token_ids[len(given) :] for output, given in zip(outputs, forced, strict=True)]
    texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    grades = [grade(needle.problem, text) for needle, text in zip(needles, texts, strict=True)]
    # The token sampled last is never stored.
    lengths = [needle.length + len(answer) - 1 for needle, answer in zip(needles, answers, strict=True)]
    return Outcome(
        right=[right for right, _ in grades],
        exact=[exact for _, exact in grades],
        cached_lengths=[n - output.metrics.evicted_entries for n, output in zip(lengths, outputs, strict=True)],
        logical_lengths=lengths,
        tokens=[len(answer) for answer in answers],
        windows=llm.stats().windows_compressed,
        recalled_bytes=llm.stats().recalled_bytes,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        event_seconds=event_seconds(llm),
    )


def trial_of(args: argparse.Namespace, method: str, budgets: list[int]) -> Trial:
    if method == FULL:
        return Trial(name=method)
    size = args.kv_offloading_size if args.recall else None
    if SPECS[method].refusal("threshold"):
        options = {"window": args.window, "buffer": args.buffer, "method": method, "compress_prompt": True}
        compression = compressions.kara(args.retention, **options, **args.recall)
        return Trial(name=method, compression=compression, kv_offloading_size=size)
    # A smaller gap would take their last `buffer` tokens from methods that keep more in some heads than in others.
    compression = compressions.threshold(
        method, recent=args.buffer, gap=2 * args.buffer, protect_prompt=False, **args.recall
    )
    return Trial(name=method, compression=compression, budgets=budgets, kv_offloading_size=size)


# Figures


def cells(needles: Sequence[Needle], values: Sequence[float]) -> list[list[float]]:
    """Means by depth and length."""
    grid: dict[tuple[int, int], list[float]] = {}
    for needle, value in zip(needles, values, strict=True):
        grid.setdefault((needle.row, needle.column), []).append(value)
    rows, columns = (range(1 + max(cell[axis] for cell in grid)) for axis in (0, 1))
    return [[mean(grid[row, column]) for column in columns] for row in rows]


def lengths(needles: Sequence[Needle]) -> list[int]:
    """Tokens of a prompt, by column."""
    grid = cells(needles, [needle.length for needle in needles])
    return [round(mean(column)) for column in zip(*grid, strict=True)]


def show(needles: Sequence[Needle], outcomes: Mapping[str, Outcome]) -> str:
    rows = []
    for name, outcome in outcomes.items():
        columns = zip(*cells(needles, outcome.right), strict=True)
        difference = intervals.paired_difference(outcome.right, outcomes[KARA].right)
        against = "" if name == KARA else f"{difference.text} (p {difference.p_value:.1g})"
        by_length = [f"{100 * mean(column):.0f}" for column in columns]
        rows.append([name, f"{100 * outcome.kept:.1f}", intervals.percent(outcome.right), against, *by_length])
    header = ["", "KV pairs kept\nat the end, %", "right answers,\n%", "minus Kara,\npoints"]
    header += [f"{length}\ntokens" for length in lengths(needles)]
    return report.table(header, rows)


def plot(path: Path, title: str, args: argparse.Namespace, needles: Sequence[Needle], outcomes: Any) -> None:
    """A heat map for each method: depth over length."""
    columns = min(4, len(outcomes))
    rows = -(-len(outcomes) // columns)
    height = 0.8 + 0.3 * len(args.depths)
    figure = Figure(figsize=(max(6, 3.4 * columns), rows * height + 0.8), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    image = None
    for axes, (name, outcome) in zip(panels, outcomes.items(), strict=False):
        grid = [[100 * value for value in row] for row in cells(needles, outcome.right)]
        image = axes.imshow(grid, vmin=0, vmax=100, cmap="viridis", aspect="auto")
        for i, row in enumerate(grid):
            for j, value in enumerate(row):
                colour = "black" if value > 60 else "white"  # on a bright or a dark field
                axes.text(j, i, f"{value:.0f}", ha="center", va="center", fontsize=7, color=colour)
        axes.set_title(f"{name}: {100 * outcome.accuracy:.0f}%", fontsize=9)
        axes.set_xticks(range(len(args.sentences)), [str(n) for n in lengths(needles)], fontsize=7, rotation=90)
        axes.set_yticks(range(len(args.depths)), [f"{100 * depth:.0f}%" for depth in args.depths], fontsize=7)
    for axes in panels[len(outcomes) :]:
        axes.set_axis_off()
    figure.supxlabel("tokens of the prompt", fontsize=9)
    figure.supylabel("depth of the needle", fontsize=9)
    figure.suptitle(title, fontsize=10)
    assert image is not None
    figure.colorbar(image, ax=figure.axes, label="right answers (%)", shrink=0.8)
    report.save(path, figure)


# The script


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    task = TASKS["needle"]
    parser = command_line.make_parser("benchmarks.quality.niah", __doc__)
    add = parser.add_argument
    add("--model", default=REASONER, metavar="DIR", help="a checkpoint of the reasoner (default: the package's)")
    add("--dtype", help="default: float32 for the package's model, else the checkpoint's")
    add("--sentences", type=int, nargs="+", default=SENTENCES, metavar="N", help="sentences of the prompts, by column")
    add(
        "--depths", type=float, nargs="+", default=DEPTHS, metavar="D", help="depths of the needle, from 0 to 1, by row"
    )
    add("--problems", type=int, default=10, help="problems of each depth and length (default 10)")
    add("--seed", type=int, default=1, help="seed of the problems (default 1)")
    add("--retention", default="0.3", help="share of a window that Kara keeps (default 0.3)")
    add("--window", type=int, default=128, help="KV pairs of Kara's window (default 128)")
    add("--buffer", type=int, default=16, help="last KV pairs that every method keeps (default 16)")
    add("--question-after", action="store_true", help="give the question after the prompt is compressed")
    add("--methods", nargs="+", choices=OTHERS, default=OTHERS, metavar="M", help="methods beside Kara (default: all)")
    add("--max-num-seqs", type=int, default=32, metavar="N", help="most sequences at once (default 32)")
    compressions.add_recall_arguments(parser)
    command_line.add_output_argument(parser)
    args = parser.parse_args(arguments)
    for field in ("problems", "max_num_seqs", "buffer"):
        require(getattr(args, field) >= 1, f"--{field.replace('_', '-')}", getattr(args, field), "at least 1")
    fits = all(task.smallest <= sentences <= task.largest for sentences in args.sentences)
    require(fits, "--sentences", args.sentences, f"numbers from {task.smallest} to {task.largest}")
    require(all(0 <= depth <= 1 for depth in args.depths), "--depths", args.depths, "numbers from 0 to 1")
    compressions.check_retention("--retention", args.retention)
    command_line.require_unique("--methods", args.methods)
    args.recall = compressions.recall_of(args, [KARA, *args.methods])
    return args


def run_niah(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    tokenizer = load_tokenizer(accuracy.path_of(args))
    needles = make_needles(args, tokenizer)
    provenance = machine.provenance("benchmarks.quality.niah", arguments)
    print(f"{machine.describe(provenance['machine'])}\n{len(needles)} questions", flush=True)
    written: dict[str, Any] = {
        **provenance,
        "depths": list(args.depths),
        "sentences": list(args.sentences),
        "tokens": lengths(needles),
        "problems": args.problems,
        "methods": {},
    }
    outcomes: dict[str, Outcome] = {}
    for method in (FULL, KARA, *args.methods):
        trial = trial_of(args, method, outcomes[KARA].cached_lengths if KARA in outcomes else [])
        outcomes[method] = outcome = run(args, trial, needles, tokenizer)
        print(f"  {method}: {intervals.percent(outcome.right)} % right", flush=True)
        written["methods"][method] = {
            "compression": msgspec.to_builtins(trial.compression),
            "accuracy": outcome.accuracy,
            "interval": intervals.interval(sum(outcome.right), len(outcome.right)),
            "cells": cells(needles, outcome.right),
            "kept": outcome.kept,
            **msgspec.to_builtins(outcome),
        }
        report.write_json(args.output / "niah.json", written)
    print(f"\nRight answers with {intervals.CONFIDENCE:.0%} intervals, then by length of the prompt")
    print(show(needles, outcomes))
    asked = "after the prompt is compressed" if args.question_after else "with the prompt"
    title = f"A needle in a haystack; of the prompt, Kara keeps {args.retention}; the question comes {asked}"
    plot(args.output / "niah.png", title, args, needles, outcomes)
    print(f"Written: {args.output / 'niah.json'}, {args.output / 'niah.png'}")


def main() -> None:
    command_line.run_script(run_niah)


if __name__ == "__main__":
    main()
